"""A report: the page of a run in one file, which asks nobody and holds what it leads to."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.cli import main
from covey.config.rows import flatten
from covey.insight.pages.records import Runs, run_page
from covey.insight.pages.report import GROUPS, write_report
from covey.runs.folder import RunFolder
from covey.runs.reader import recorded_yaml
from tests.fakes import as_stream
from tests.insight.pages.conftest import evaluation, log_step, made_group, made_run, serving

HOSTILE = "</script><script>window.struck = 1</script><!-- <script> \u2028\u202e\x1b[2J\x9b é"


def answers_of(page: str) -> dict[str, Any]:
    """What a report can answer, and nothing but what its policy allows may run in it."""
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    scripts = re.findall(r'<script( type="module")?>(.*?)</script>', page, re.DOTALL)
    for text in (*(text for _, text in scripts), *re.findall(r"<style>(.*?)</style>", page, re.DOTALL)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "default-src 'none'; base-uri 'none'; form-action 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    data = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert len(data) == 1 and len(re.findall("<script", page)) == len(scripts) + 1
    assert data[0].isascii() and "<" not in data[0]
    return json.loads(data[0])


def reported(run: Path) -> dict[str, Any]:
    write_report(run, run.parent / "report.html")
    return answers_of((run.parent / "report.html").read_text())


def steps_in(answers: dict[str, Any]) -> list[int]:
    return sorted(int(key.rpartition("=")[2]) for key in answers if key.startswith("step?"))


def rounds(folder: RunFolder, steps: int, groups: int = 2, text: str = "four") -> None:
    for step in range(steps):
        log_step(
            folder, step, [made_group([1, 0, 0.5, 0], [text, "five", "4", "six"]) for _ in range(groups)]
        )


def test_a_report_has_every_page_that_it_leads_to(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    rounds(folder, 5)
    folder.close()
    answers = reported(folder.path)
    assert answers["report?"] == {"name": "run", "runs": ["run"]}
    run = answers["run?run=run"]
    assert steps_in(answers) == [0, 2, 4]
    assert "Of 5 steps with completions it has 3, with 6 of their groups and 24 completions" in run["report"]
    for step in (0, 2, 4):
        page = answers[f"step?run=run&step={step}"]
        assert page["of"] == 2
        for group in (g["group"] for g in page["groups"]):
            held = answers[f"group?group={group}&run=run&step={step}"]
            assert held["order"] == [0, 1] and len(held["completions"]) == 4
            tokens = [answers[f"tokens?group={group}&run=run&sample={s}&step={step}"] for s in range(4)]
            assert all(page["siblings"] == 4 and page["values"]["logprob"] for page in tokens)


def test_a_report_of_a_long_run_is_small_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", train={"steps": 5000})
    rng = np.random.default_rng(0)
    names = ["reward/mean", "accuracy", "groups/dead", *(f"some/metric_{n}" for n in range(57))]
    values = rng.normal(size=(5000, len(names))).tolist()
    rows = [{"step": step, **dict(zip(names, row, strict=True))} for step, row in enumerate(values)]
    (folder.path / "metrics.jsonl").write_text(as_stream(rows))
    texts = [f"{n} é文 " * 3000 for n in range(16)]
    for step in (0, 2500, 4990, 4999):
        groups = [made_group(rng.random(16).tolist(), texts) for _ in range(GROUPS + 8)]
        lengths = [len(c.tokens) for g in groups for c in g.completions]
        folder.write_rollouts(step, groups, [np.zeros(n) for n in lengths])
    folder.close()
    answers = reported(folder.path)
    assert (tmp_path / "report.html").stat().st_size < 3_000_000
    run = answers["run?run=run"]
    assert {0, 4999} <= set(steps_in(answers)) <= {0, 4990, 4999}
    assert len(run["metrics"]) < 500
    for step in (0, 4999):
        page = answers[f"step?run=run&step={step}"]
        assert (len(page["groups"]), page["of"]) == (GROUPS, GROUPS + 8)
        group = answers[f"group?group={page['groups'][0]['group']}&run=run&step={step}"]
        rewards = [c["reward"] for c in group["completions"]]
        assert sorted(rewards) == [min(group["rewards"]), max(group["rewards"])], "the best and the worst"
        assert len(group["rewards"]) == 16


def test_the_evidence_of_findings_is_in_the_report(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    rounds(folder, 40)
    found = {"id": "x", "step": 30, "severity": "note", "sentence": "s", "remedy": "", "advice": ""}
    places = [
        {"step": 29, "group": 1, "completion": 3, "token": 2},
        {"step": 12},
        {"step": [1], "group": "x", "completion": {}},
        {"step": 10**30, "group": 1.5},
    ]
    records = [{**found, "evidence": place} for place in places]
    (folder.path / "findings.jsonl").write_text(as_stream(records))
    folder.close()
    answers = reported(folder.path)
    assert steps_in(answers) == [0, 12, 20, 29, 39]
    assert "tokens?group=1&run=run&sample=3&step=29" in answers


def test_the_page_of_a_run_has_all_its_settings_and_says_which_differ(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", algorithm={"name": "dapo"}, rollout={"max_tokens": 9})
    shown = run_page("run", folder.path)["settings"]
    folder.close()
    named = {s["setting"]: s["differs"] for s in shown}
    assert len(named) == len(shown)
    assert named["train.steps"] and named["rollout.max_tokens"] and named["algorithm.name"]
    assert not named["train.weight_decay"] and not named["rollout.group_size"]
    keys = {key for key, _ in flatten(recorded_yaml(folder.path))}
    covered = {key for key in keys for name in named if f"{key}.".startswith(f"{name}.")}
    assert covered == keys


def test_the_page_of_a_run_sums_its_times_over_all_steps(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    for step in range(900):  # more than a curve has points
        folder.append(
            "timings.jsonl",
            {
                "step": step, "seconds/rollout": 0.5, "seconds/save": 0.25,
                "tokens_per_second/rollout": 10.0,
            },
        )  # fmt: skip
    folder.close()
    spent = run_page("run", folder.path)["spent"]
    assert spent == {"seconds/rollout": 450, "seconds/save": 225, "tokens/rollout": 4500, "tokens/save": 0}


def test_ten_buckets_of_pass_rates_are_three_curves(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    buckets = {f"difficulty/pass_rate_{b / 10:.2f}_{(b + 1) / 10:.2f}": (b + 1) / 55 for b in range(10)}
    folder.append("metrics.jsonl", {"step": 0, **buckets})
    folder.close()
    (shown,) = run_page("run", folder.path)["metrics"]
    thirds = [shown[f"difficulty/pass_rate_{name}"] for name in ("0_0.2", "0.2_0.8", "0.8_1")]
    assert thirds == pytest.approx([3 / 55, 33 / 55, 19 / 55], rel=1e-5)


def test_a_stage_names_the_other_stages_of_its_pipeline(tmp_path: Path) -> None:
    for name in ("1-sft", "2-rl", "10-rl"):
        made_run(tmp_path / "pipe" / name).close()
    made_run(tmp_path / "alone").close()
    runs = Runs(tmp_path)
    assert runs.page("pipe/2-rl")["stages"] == ["pipe/1-sft", "pipe/2-rl", "pipe/10-rl"]
    assert runs.page("alone")["stages"] == []
    assert Runs(tmp_path / "pipe" / "2-rl").page("2-rl")["stages"] == ["2-rl"], "the others are not served"


def test_the_name_of_a_folder_need_not_be_text(tmp_path: Path) -> None:
    run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff<"))
    made_run(tmp_path / "run").close()
    (tmp_path / "run").rename(run)
    assert reported(run)["report?"]["name"] == "r\udcff<"


def test_a_report_needs_a_run_and_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path / "run").close()
    run = str(tmp_path / "run")
    assert main(["report", run, "-o", str(tmp_path / "no" / "where.html")]) == 2
    assert main(["report", run, "-o", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    assert capsys.readouterr().err.count("error: ") == 3
    assert not (tmp_path / "r.html").exists()
    assert main(["report", run, str(tmp_path / "r.html")]) == 0, "before its first step"


# --- in a browser -------------------------------------------------------------------------------------


def test_a_report_shows_what_the_page_of_the_run_shows(page, tmp_path: Path) -> None:
    """One renderer: the text of both is the same, but for the way to other pages, and to the run's files."""
    folder = made_run(tmp_path / "run", train={"steps": 9, "lr": 0.5})
    rounds(folder, 3)
    for step, rate in ((0, 0.25), (3, 0.5)):
        folder.append("evals.jsonl", evaluation(step, rate))
    (folder.path / "findings.jsonl").write_text(
        as_stream(
            [{"id": "x", "step": 1, "severity": "severe", "sentence": "It fell", "remedy": "train: {lr: 1}"}]
        )
    )
    folder.close()
    write_report(folder.path, tmp_path / "report.html")

    def shown() -> dict[str, str]:
        page.wait_for_selector(".completion")
        page.wait_for_selector(".chart canvas")
        page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
        parts = page.eval_on_selector_all("main section, main .lead", "all => all.map(e => e.innerText)")
        page.goto("about:blank")
        return {text.partition("\n")[0]: text for text in parts}

    with serving(tmp_path) as url:
        page.goto(f"{url}?token=right#/run/run")
        served = shown()
    page.goto((tmp_path / "report.html").as_uri())
    kept = shown()
    facts = next(name for name in kept if name.startswith("Settings that differ"))
    own, _, said = kept.pop(facts).partition("\nA report of covey")
    assert own.rstrip() == served.pop(facts).rstrip() and "it holds everything that it shows" in said
    assert kept.pop("Look into a step").splitlines()[-1] == "Step 0 · Step 1 · Step 2"
    served.pop("Look into a step")
    served["Curves"], _, files = served["Curves"].partition("\n\nAll metrics and times of every step:\n")
    assert files.split() == ["CSV", "JSON"]
    assert kept == served
    whole = "\n".join([own, *kept.values()])
    for text in (
        "It fell",
        "train: {lr: 1}",
        "25 % [15, 35]",
        "1.234 [1.200, –]",
        "train.lr",
        "0.5",
        "rollout",
    ):
        assert text in whole, text


def test_a_report_is_walked_from_a_file_and_asks_nobody(page, tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    rounds(folder, 3)
    folder.close()
    write_report(folder.path, tmp_path / "report.html")
    requests: list[str] = []
    page.on("request", lambda r: requests.append(r.url))
    page.goto((tmp_path / "report.html").as_uri())
    page.click("text=Step 2 >> nth=0")
    page.wait_for_selector("h1:text-is('Step 2')")
    page.click(".group a.cover >> nth=0")
    page.wait_for_selector(".completion")
    assert page.locator("text=Open this group in the lab").count() == 0
    page.click("text=Completion 1")
    page.wait_for_selector(".tokens .tok")
    page.click("text=next ›")
    page.wait_for_selector("h1:text-is('Completion 2')")
    page.click(".crumbs >> text=Report")
    page.wait_for_selector("h1:text-is('run')")
    page.goto(f"{(tmp_path / 'report.html').as_uri()}#/run/run/step/77")
    page.wait_for_selector(".note.bad >> text=This report does not hold that page")
    assert all(url.startswith(("file:///", "data:")) for url in requests)


def test_what_a_model_writes_stays_text_in_a_report(page, tmp_path: Path) -> None:
    run = tmp_path / "<b>run & co"
    folder = made_run(run)
    log_step(folder, 0, [made_group([1, 0], [HOSTILE, "no"], prompt=HOSTILE, name=HOSTILE)])
    folder.append("events.jsonl", {"step": 0, "event": HOSTILE})
    folder.append("evals.jsonl", {**evaluation(0, 0.5), HOSTILE: 0.1, f"{HOSTILE}/low": 0.05})
    finding = {"id": "x", "step": 0, "severity": "note", "sentence": HOSTILE, "remedy": HOSTILE}
    (run / "findings.jsonl").write_text(as_stream([finding]))
    folder.close()
    write_report(run, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    answers_of(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]", text)
    title = re.search("<title>(.*?)</title>", text)
    assert title is not None and unescape(title[1]) == "<b>run & co" and "<" not in title[1]
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector(".completion")
    for fragment in ("step/0", "step/0/group/0", "step/0/group/0/token/0"):
        page.goto(f"{(tmp_path / 'report.html').as_uri()}#/run/%3Cb%3Erun%20%26%20co/{fragment}")
        page.wait_for_selector(".crumbs")
        assert page.locator(".note.bad").count() == 0
        assert page.evaluate("document.querySelectorAll('main script, main b[onclick]').length") == 0
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector(".completion")
    shown = page.inner_text("main")
    assert "</script><script>window.struck = 1</script><!-- <script>" in shown
    assert not set("\x1b\x9b\u202e\u2028") & set(shown)
    assert page.evaluate("window.struck ?? null") is None


def test_the_stages_of_a_pipeline_are_below_one_another(page, tmp_path: Path) -> None:
    for name in ("10-rl", "2-rl", "1-sft"):
        folder = made_run(tmp_path / "pipe" / name)
        rounds(folder, 2, groups=1)
        folder.close()
    write_report(tmp_path / "pipe", tmp_path / "report.html")
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector("h1:text-is('pipe')")
    heads = page.eval_on_selector_all("main .title h2", "all => all.map(e => e.textContent)")
    assert heads == ["1-sft", "2-rl", "10-rl"]
    page.click("a:text-is('Step 1') >> nth=1")
    page.wait_for_selector(".crumbs >> text=2-rl")


def test_paper_is_light_and_shows_what_is_closed(page, tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    rounds(folder, 3)
    folder.close()
    write_report(folder.path, tmp_path / "report.html")
    page.emulate_media(color_scheme="dark")
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector(".chart canvas")
    closed = "document.querySelectorAll('details:not([open])').length > 0"
    state = f"[document.documentElement.dataset.theme ?? '', {closed}]"
    assert page.evaluate(state) == ["", True]
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(state) == ["light", False]
    widths = page.eval_on_selector_all(".charts", "all => all.map(e => e.clientWidth)")
    assert max(widths) <= 720, "a page of A4 is about 720 pixels wide"
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(state) == ["", True]


def test_at_360_pixels_a_report_does_not_stick_out(page, tmp_path: Path) -> None:
    folder = made_run(tmp_path / ("run" * 20))
    rounds(folder, 3, text="w" * 400)
    folder.append("evals.jsonl", evaluation(0, 0.5))
    folder.close()
    write_report(folder.path, tmp_path / "report.html")
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector(".completion")
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
