"""The pages in a real browser: their numbers are the library's, they are silent, inert and alive."""

from __future__ import annotations

import csv
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from covey.audit.run_folder import readable
from covey.insight.pages.copy import write_copy
from covey.insight.pages.drawings import lab_texts
from covey.runs.folder import RunFolder
from covey.runs.owner import name_owner
from covey.runs.rollouts import read_rollouts
from tests.fakes import as_stream
from tests.insight.pages.browser import walk
from tests.insight.pages.conftest import evaluation, log_step, made_group, made_run, serving


def test_the_copy_works_from_a_file_and_asks_nobody(page, tmp_path) -> None:
    file = write_copy(tmp_path / "copy")
    requests = []
    page.on("request", lambda r: requests.append(r.url))
    for guide in lab_texts()["guides"]:
        page.goto(f"{file.as_uri()}#/lab/guide/{guide['id']}")
        walk(page, guide)
    page.goto(f"{file.as_uri()}#/lab")
    page.click(".card >> nth=0")
    page.wait_for_selector("text=3 of 6 are correct")
    for tool in ("bench", "weights", "gate", "kl", "odds", "toy", "models", "ways"):
        page.goto(f"{file.as_uri()}#/lab/{tool}")
        page.wait_for_selector("h1")
        assert page.query_selector(".note.bad") is None, tool
    assert all(url.startswith(("file:///", "data:")) for url in requests)


def test_what_a_model_writes_stays_text(page, tmp_path) -> None:
    folder = made_run(tmp_path / "hostile")
    texts_of = [
        "<script>window.struck = 1</script><img src=x onerror='window.struck = 1'>",
        "\x1b[31mred\x07 \x9b2J",
        "price \u202e00.1\u202c \u2066x\u2069 \u200b\U000e0041",
        "]]></title><style>body{display:none}</style>",
    ]
    hostile = "<b onclick=alert(1)>\u202eprompt"
    log_step(folder, 0, [made_group([1, 0, 1, 0], texts_of, prompt=hostile, name="<i>name</i>\u202e")])
    folder.append("events.jsonl", {"step": 0, "event": "<img src=x onerror=alert(1)>\x1b[0m"})
    with serving(tmp_path) as url:
        for fragment in (
            "#/run/hostile",
            "#/run/hostile/step/0",
            "#/run/hostile/step/0/group/0",
            "#/run/hostile/step/0/group/0/token/0",
        ):
            page.goto(f"{url}?token=right{fragment}")
            page.wait_for_selector("h1")
        page.goto(f"{url}?token=right#/run/hostile/step/0/group/0")
        page.wait_for_selector(".completion")
        shown = page.inner_text("main")
        hidden = page.eval_on_selector_all(".hidden-char", "all => all.map(e => e.title)")
        struck = page.evaluate("window.struck")
        foreign = page.evaluate("document.querySelectorAll('main script, main img, main style').length")
        page.goto("about:blank")
    folder.close()
    assert "<script>window.struck = 1</script>" in shown
    assert (struck, foreign) == (None, 0)
    assert not set("\x1b\x07\x9b\u202e\u2066\u200b") & set(shown)
    assert {"U+001B", "U+0007", "U+009B", "U+202E", "U+2066", "U+200B", "U+E0041"} <= set(hidden)


def test_a_live_page_grows_while_the_run_writes(site, page) -> None:
    folder = RunFolder(site.root / "one")
    page.goto(site.at("#/run/one"))
    page.wait_for_selector(".strip a")
    assert page.locator(".strip a").count() == 3
    page.wait_for_selector("text=training")
    groups = [made_group([1, 1, 0, 1], ["a", "b", "c", "d"])]
    log_step(folder, 3, groups, **{"entropy/sampled": 0.5})
    page.wait_for_selector("a[aria-label^='Step 3,']")
    line = as_stream([{"step": 4, "reward/mean": 0.75, "groups/dead": 0}])
    with (site.root / "one" / "metrics.jsonl").open("a") as file:
        file.write(line[:30])
        file.flush()
        time.sleep(1)
        assert page.locator("text=4 / ").count() == 0
        file.write(line[30:])
    page.wait_for_selector("text=4 / ")
    page.wait_for_selector(".tile:has-text('reward') >> text=0.750")
    folder.close()


def test_half_written_and_damaged_runs_show_what_is_left_of_them(site, page) -> None:
    one, two = site.root / "one", site.root / "two"
    with (one / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    (two / "metrics.jsonl").write_bytes(b"\x00\xff\n" + (two / "metrics.jsonl").read_bytes())
    (two / "rollouts" / "step_000001.npz").write_bytes(b"PK\x03")
    (two / ".owner").write_text("process 999999999 on elsewhere")
    (site.root / "foreign").mkdir()
    (site.root / "foreign" / "config.yaml").write_text("server: {port: 80}")
    (site.root / "bad").mkdir()
    (site.root / "bad" / "config.yaml").write_text("{ not: [yaml")
    page.goto(site.at("#/"))
    page.wait_for_selector(".run >> nth=3")
    damaged = {name.split("\n")[0] for name in page.locator(".run").all_inner_texts() if "is damaged" in name}
    assert damaged == {"bad", "foreign"}
    page.goto(site.at("#/run/foreign"))
    page.wait_for_selector("h1:has-text('foreign')")
    assert "config.yaml is damaged" in page.locator("main").inner_text()
    page.goto(site.at("#/run/one"))
    page.wait_for_selector(".pill.state")
    assert page.locator(".strip a").count() == 3, "the half line of step 3 is no step"
    page.goto(site.at("#/run/two"))
    page.wait_for_selector("text=metrics.jsonl: 1 line cannot be read")
    assert page.locator(".strip a").count() == 3
    page.goto(site.at("#/run/two/step/1/group/0"))
    page.wait_for_selector(".completion")
    assert page.locator(".completion").count() == 4, "texts and rewards do not need the damaged arrays"


def test_tokens_have_their_numbers_by_keyboard(site, page) -> None:
    page.goto(site.at("#/run/one/step/0/group/0/token/1"))
    page.wait_for_selector(".tokens .tok")
    page.focus(".tokens")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    page.wait_for_selector(".panel >> text=Token 2")
    row = {
        k: float(v)
        for k, v in page.eval_on_selector_all(
            ".panel tr:has(.num)",
            "all => all.map(r => [r.cells[0].textContent, r.querySelector('.num').dataset.value])",
        )
    }
    archive = read_rollouts(site.root / "one", 0).arrays
    place = int(archive["ends"][0]) + 2
    expected = {
        "log-prob": "logprobs",
        "advantage": "advantages",
        "ratio": "ratios",
        "entropy": "entropies",
        "gradient": "applied",
    }
    for shown, name in expected.items():
        assert row[shown] == pytest.approx(float(archive[name][place]), abs=1e-6), shown
    page.check("input[value=clip]", force=True)
    page.wait_for_selector(".legend >> text=silenced")


def test_three_curves_are_large_and_the_rest_unfolds(site, page) -> None:
    with (site.root / "one" / "timings.jsonl").open("w") as file:
        speed = {"seconds/update": 1.0, "tokens_per_second/update": 500.0}
        file.write(as_stream([{"step": n, "elapsed": 3600.0 * (n + 1), **speed} for n in range(3)]))
    page.goto(site.at("#/run/one"))
    page.wait_for_selector(".charts.large .chart >> nth=2")
    log_step(RunFolder(site.root / "one"), 3, [made_group([1, 0], ["a", "b"])], **{"entropy/sampled": 0.5})
    page.click("summary:has-text('more charts')")
    page.wait_for_selector(".chart >> nth=3")
    assert page.locator(".charts.large .chart").count() == 3
    page.select_option("select[aria-label='Axis of the curves']", "hours")
    page.select_option("select[aria-label='Smoothing of the curves']", "5")
    page.wait_for_selector(".u-legend .u-label:text-is('hours')", state="attached")
    page.select_option("select[aria-label='Smoothing of the curves']", "1")
    page.select_option("select[aria-label='Axis of the curves']", "tokens")
    head, *points = downloaded(page, "figure:has-text('Accuracy') >> button:text-is('CSV')")
    assert head[0] == "tokens"
    assert {x for x, *_ in points} >= {"1000", "1500"}
    page.select_option("select[aria-label='Any other metric']", "time:elapsed")
    page.wait_for_selector(".charts.large .chart:first-child figcaption:has-text('time:elapsed')")
    assert page.locator(".charts.large .chart").count() == 3
    assert page.locator("select[aria-label='Any other metric']").input_value() == "time:elapsed"


def test_all_metrics_are_saved_as_csv_and_json(site, page) -> None:
    page.goto(site.at("#/run/one"))
    button = "button[title='Download \"one metrics\" as {}']"
    head, *rows = downloaded(page, button.format("CSV"))
    assert head[0] == "step"
    assert [row[0] for row in rows] == ["0", "1", "2"]
    with page.expect_download() as saved:
        page.click(button.format("JSON"))
    assert saved.value.suggested_filename == "one_metrics.json"
    records = json.loads(Path(saved.value.path()).read_text())["metrics"]
    assert [float(row[head.index("reward/mean")]) for row in rows] == [r["reward/mean"] for r in records]


def test_completions_of_a_group_are_searched_and_compared(site, page) -> None:
    def shown() -> list[str]:
        return page.locator(".completion:visible .text").all_inner_texts()

    page.goto(site.at("#/run/one/step/0/group/0"))
    page.wait_for_selector(".completion >> nth=3")
    page.fill("input[type=search]", "F")
    assert shown() == ["four", "five"]
    page.wait_for_selector("[role=status]:text-is('2 of 4')")
    page.fill("input[type=search]", "")
    page.select_option("select[aria-label='Completions shown']", "paid")
    assert shown() == ["four", "4"]
    page.goto(site.at("#/run/one/step/0/group/1"))
    page.wait_for_selector(".completion >> nth=3")
    page.check(".choices input[type=checkbox]")
    assert page.locator(".same").all_inner_texts() == ["same"] * 3
    page.goto("about:blank")


def test_siblings_are_compared_word_by_word(page, tmp_path) -> None:
    folder = made_run(tmp_path / "run")
    texts = ["2 + 2 is 4, so the answer is 4.", "2 + 2 is 5, so the answer is 5.", "4"]
    log_step(folder, 0, [made_group([1, 0, 0], texts, prompt="a long question " * 500)])
    folder.close()
    with serving(tmp_path) as url:
        page.goto(f"{url}?token=right#/run/run/step/0/group/0")
        page.wait_for_selector(".completion >> nth=2")
        page.check(".choices input[type=checkbox]")
        assert page.locator(".prompt").bounding_box()["height"] < 500, "completions are in sight below"
        second = page.locator(".completion >> nth=1")
        assert second.locator(".differs").all_inner_texts() == ["5", "5"]
        assert second.locator("del").all_inner_texts() == ["4", "4"]
        shown = second.locator(".text").evaluate(
            "t => [...t.childNodes].map(n => n.localName === 'del' ? '' : n.textContent)"
        )
        assert "".join(shown) == texts[1], "without what is missing, the text is whole"
        assert second.locator(".text").inner_text().startswith("2 + 2 is 45, so"), (
            "what is missing comes first"
        )
        assert page.locator(".completion >> nth=0").locator(".same, .differs, del").count() == 0
        page.goto("about:blank")


def test_the_completions_of_a_step_are_searched(site, page) -> None:
    page.goto(site.at("#/run/one/step/0"))
    page.wait_for_selector(".group >> nth=1")
    page.fill("input[type=search]", "SAME")
    page.wait_for_selector("[role=status]:text-is('4 completions in 1 group')")
    assert page.locator(".group:visible").get_attribute("data-group") == "1"
    page.fill("input[type=search]", "fiv")
    page.wait_for_selector("[role=status]:text-is('1 completion in 1 group')")
    assert page.locator(".group:visible").get_attribute("data-group") == "0"
    page.fill("input[type=search]", "")
    page.wait_for_selector(".group:visible >> nth=1")


def test_a_finding_leads_to_its_evidence(site, page) -> None:
    evidence = {"step": 1, "group": 0, "completion": 2, "token": 3}
    finding = {
        "id": "x",
        "step": 2,
        "severity": "severe",
        "sentence": "It went wrong",
        "remedy": "train: {lr: 1}",
    }
    with (site.root / "one" / "findings.jsonl").open("a") as file:
        file.write(as_stream([{**finding, "advice": "", "evidence": evidence}]))
    page.goto(site.at("#/run/one"))
    page.wait_for_selector(".finding.severe >> text=train: {lr: 1}")
    page.click(".finding.severe a")
    page.wait_for_selector("h1:text-is('Completion 2')")
    page.wait_for_selector(".panel >> text=Token 3")


def test_labels_of_an_axis_are_the_numbers_they_stand_at(page, tmp_path) -> None:
    """Of small gradients every label was 0.01, whose own lines stood at .002, .004, .006."""
    folder = made_run(tmp_path / "small")
    folder.write_rollouts(
        0,
        [made_group([1, 0], ["yes", "no"])],
        [np.ones(4), -np.ones(5)],
        per_token={"applied": np.arange(9) / 1300},
    )
    folder.close()
    with serving(tmp_path) as url:
        page.goto(f"{url}?token=right#/run/small/step/0/group/0/token/1")
        page.wait_for_selector("svg.plot text[text-anchor=end]")
        said = page.eval_on_selector_all(
            "svg.plot text[text-anchor=end]",
            "all => all.map(t => [Number(t.textContent), Number(t.getAttribute('y'))])",
        )
    values, heights = np.array(said).T
    slopes = np.diff(values) / np.diff(heights)
    assert len(set(values)) == len(values) > 2
    assert slopes == pytest.approx(slopes[0], rel=1e-3)


def test_a_run_without_a_conclusion_says_why_and_how_it_continues(site, page) -> None:
    run = site.root / "one"
    record = {"exit_code": 75, "error": "stopped by SIGTERM", "resume_command": "covey resume runs/one"}
    (run / ".owner").write_text("")
    (run / "exit.json").write_text(json.dumps(record))
    (run / "findings.jsonl").write_text(
        as_stream([{"id": "x", "step": 2, "severity": "note", "sentence": "it fell"}])
    )
    page.goto(site.at("#/run/one"))
    page.wait_for_selector(".note >> text=stopped by SIGTERM. Continue with: covey resume runs/one")
    page.wait_for_selector("text=No conclusion yet")
    page.wait_for_selector(".finding >> text=step 2")
    (run / "result.json").write_text("{}")
    page.reload()
    page.wait_for_selector("text=No conclusion: held-out problems were not measured")


def test_a_run_without_a_step_says_so(page, tmp_path) -> None:
    made_run(tmp_path / "new").close()
    with serving(tmp_path) as url:
        page.goto(f"{url}?token=right#/run/new")
        page.wait_for_selector("text=No step has ended yet")
        assert page.locator(".tile h3").all_inner_texts() == ["step"]
        assert page.locator(".curves select:visible").count() == 0
        log_step(RunFolder(tmp_path / "new"), 0, [made_group([1, 0], ["a", "b"])])
        page.wait_for_selector(".chart canvas")
        assert page.locator("text=No step has ended yet").is_hidden()
        page.goto("about:blank")


def test_two_runs_are_compared(site, page) -> None:
    page.goto(site.at("#/"))
    page.check("input[data-run=one]")
    page.check("input[data-run=two]")
    page.click("button:text-is('Compare')")
    page.wait_for_selector("h2:text-is('What differs')")
    page.wait_for_selector("canvas")


def test_a_record_of_another_trainer_is_listed_with_what_it_has(page, tmp_path) -> None:
    record = tmp_path / "history.csv"
    record.write_text("_step,train/reward,train/loss\n1,0.1,0.2\n2,0.3,0.1\n")
    with readable(record) as folder, serving(folder, source=record) as url:
        page.goto(f"{url}?token=right#/")
        page.wait_for_selector(".run")
        words = page.inner_text("main")
        assert str(record) in words and "null" not in words and "· ·" not in words
        assert page.locator(".facts dd").all_inner_texts() == ["2", "–", "–"]
        page.click(".cover")
        page.wait_for_selector(".finding >> text=checks apply")
        assert "after" not in page.locator(".finding").inner_text(), "the note is on the whole record"
        assert str(folder) not in page.inner_text("main"), "a copy that goes when the pages end"
        page.goto("about:blank")


def test_the_curves_of_more_runs_are_in_one_chart(site, page) -> None:
    shutil.copytree(site.root / "two", site.root / "three")
    page.goto(site.at("#/"))
    for run in ("one", "two", "three"):
        page.check(f"input[data-run={run}]")
    page.click("button:text-is('Compare')")
    page.wait_for_selector("h1:text-is('3 runs')")
    page.wait_for_selector(".chart canvas")
    labels = page.locator(".chart >> nth=0").locator(".u-label").all_inner_texts()
    assert labels[1:] == ["one", "two", "three"]
    assert page.locator(".charts.large .chart").count() == 3


def seeds(root: Path) -> None:
    """Three runs that differ in nothing but the seed, and another one."""
    for name, seed, lr in (("x,seed=0", 0, 0.1), ("x,seed=1", 1, 0.1), ("x,seed=2", 2, 0.1), ("y", 0, 0.2)):
        folder = made_run(root / name, seed=seed, train={"steps": 9, "lr": lr})
        for step in range(3 + seed):
            folder.append("metrics.jsonl", {"step": step, "accuracy": step / 10 + seed / 100})
        folder.append("evals.jsonl", evaluation(0, 0.2))
        folder.append("evals.jsonl", evaluation(3, 0.25 + seed / 4))
        folder.close()
        (root / name / ".owner").write_text("")  # which names this process, and that is at work


def downloaded(page, button: str) -> list[list[str]]:
    """The rows of a file that a button offers."""
    with page.expect_download() as download:
        page.click(button)
    return list(csv.reader(Path(download.value.path()).read_text().splitlines()))


def test_seeds_are_one_curve_with_a_band_and_open_to_single_ones(page, tmp_path) -> None:
    seeds(tmp_path)
    with serving(tmp_path) as url:
        page.goto(f"{url}?token=right#/")
        bundle = page.locator("details.bundle")
        bundle.locator("summary >> text=3 seeds").wait_for()
        assert page.locator("input[data-run]:visible").count() == 1  # of the run that is alone
        assert "50 % [25, 75]" in bundle.locator("summary").inner_text()
        name_owner(tmp_path / "x,seed=2")  # this process, which is at work
        page.reload()
        bundle.locator("summary >> text=3 seeds").wait_for()
        states = bundle.locator("summary .pills .state").all_inner_texts()
        assert sorted(states) == ["1 training", "2 interrupted"], "each state with its number of seeds"
        conclusion = bundle.locator("summary .pills .pill:not(.state)").all_inner_texts()
        assert len(conclusion) == 1, conclusion
        page.check("input[data-runs]")
        page.check("input[data-run=y]")
        page.click("button:text-is('Compare')")
        page.wait_for_selector("h1:text-is('4 runs')")
        page.wait_for_selector("th >> text=train.lr")
        chart = ".chart:has(figcaption :text-is('Accuracy: training'))"
        labels = f"{chart} .u-series:not(.end) .u-label"
        page.wait_for_selector(labels, state="attached")
        texts = page.locator(labels).all_inner_texts()
        assert texts[1:] == ["x", "y"]
        rows = downloaded(page, f"{chart} .csv")
        assert rows[0][:4] == ["step", "x", "x, lowest", "x, highest"]
        found = np.array([[float(v) for v in row[:4]] for row in rows[1:] if all(row[:4])])
        # The first seed has three steps, the second four, the third five.
        expected = [
            [0, 0.01, 0, 0.02],
            [1, 0.11, 0.1, 0.12],
            [2, 0.21, 0.2, 0.22],
            [3, 0.315, 0.31, 0.32],
            [4, 0.42, 0.42, 0.42],
        ]
        assert found == pytest.approx(np.array(expected))
        page.select_option("select[aria-label='Runs of several seeds']", "single")
        page.wait_for_selector(f"{chart} .u-label:text-is('x,seed=1')", state="attached")
        page.goto("about:blank")


def test_runs_are_found_tagged_deleted_and_put_back(page, tmp_path) -> None:
    seeds(tmp_path)
    with serving(tmp_path) as url:
        page.goto(f"{url}?token=right#/")
        page.check("input[data-run=y]")
        page.click(".actions button:text-is('Tag')")
        page.fill("dialog input", "paper, baseline")
        page.keyboard.press("Enter")
        page.wait_for_selector(".tag:text-is('paper')")
        assert json.loads((tmp_path / "y" / "tags.json").read_text()) == ["paper", "baseline"]
        page.fill("input[type=search]", "PAPER")
        assert page.locator(".run:visible").count() == 1
        page.fill("input[type=search]", "")
        page.select_option("select[aria-label='Runs together']", "tag")
        assert page.locator("h2").all_inner_texts() == ["paper1", "baseline1", "no tag3"]
        page.check("input[data-run=y] >> nth=0")
        page.click(".actions button:text-is('Delete')")
        page.click("dialog button:text-is('Cancel')")
        assert (tmp_path / "y").is_dir()
        page.click(".actions button:text-is('Delete')")
        page.click("dialog button:text-is('Move to the trash')")
        page.wait_for_selector(".note >> text=.trash/y-")
        assert not (tmp_path / "y").exists()
        page.click("button:text-is('Undo')")
        page.wait_for_selector("input[data-run=y]")
        assert (tmp_path / "y" / "metrics.jsonl").is_file()
        page.goto("about:blank")
    (tmp_path / "y" / ".owner").write_text("process 7 on elsewhere.example")
    with serving(tmp_path) as url:
        page.goto(f"{url}?token=right#/")
        for answer in ("Cancel", "It has ended: delete"):
            page.check("input[data-run=y]")
            page.click(".actions button:text-is('Delete')")
            page.click("dialog button:text-is('Move to the trash')")
            page.wait_for_selector("dialog >> text=its next write")
            page.click(f"dialog button:text-is('{answer}')")
            page.wait_for_selector("dialog", state="detached")
            assert (tmp_path / "y").is_dir() or answer != "Cancel"
        page.wait_for_selector(".note >> text=.trash/y-")
        page.click("button:text-is('Undo')")
        page.wait_for_selector("input[data-run=y]")
        page.goto("about:blank")
    with serving(tmp_path, read_only=True) as url:
        page.goto(f"{url}?token=right#/")
        page.check("input[data-run=y]")
        assert page.locator(".actions button:visible").all_inner_texts() == ["Compare", "Clear"]
        page.goto("about:blank")


def test_every_metric_that_is_shown_opens_to_its_hint(site, page) -> None:
    folder = RunFolder(site.root / "one")
    log_step(folder, 3, [made_group([1, 0], ["a", "b"])], **{"entropy/sampled": 0.5, "loss": 0.1})
    folder.append("timings.jsonl", {"step": 3, "elapsed": 4.0})
    page.goto(site.at("#/run/one"))
    page.click("summary:has-text('more charts')")
    page.wait_for_selector(".chart >> nth=4")
    for place in (".chart figcaption", ".tile h3"):
        without = page.eval_on_selector_all(
            place, "all => all.filter(e => !e.querySelector('.term')?.title).map(e => e.textContent)"
        )
        assert without == [], place
    page.click(".tile .term:text-is('dead groups')")
    page.wait_for_selector(".tile .hint:visible >> text=fraction of groups whose rewards all tie")
    page.click("summary:has-text('All other settings')")
    page.click("summary:has-text('All other settings') ~ .wide .term:text-is('rollout.temperature')")
    page.wait_for_selector(".facts-of .hint:visible")


PAGES = [
    "#/",
    "#/run/one",
    "#/run/one/step/0",
    "#/run/one/step/0/group/0",
    "#/run/one/step/0/group/0/token/0",
    "#/compare/one/two",
    "#/lab",
]
TOOLS = [
    "bench",
    "weights",
    "gate",
    "kl",
    "odds",
    "toy",
    "models",
    "ways",
    "guide/tickets",
    "guide/prefix",
    "guide/laststep",
]


def test_at_360_pixels_nothing_sticks_out_and_everything_has_a_name(site, page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    for fragment in (*PAGES, *(f"#/lab/{t}" for t in TOOLS)):
        page.goto(site.at(fragment))
        page.wait_for_selector("h1")
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, fragment
        nameless = page.evaluate(
            """[...document.querySelectorAll('button, a, input, select')].filter(e => !(e.textContent.trim()
            || e.getAttribute('aria-label') || e.title || e.closest('label')?.textContent.trim()))
            .map(e => e.outerHTML)"""
        )
        assert nameless == [], fragment
        assert page.locator("h1").count() == 1, fragment


def test_a_step_of_half_a_million_tokens_sends_a_page_what_it_shows(page, tmp_path) -> None:
    folder = made_run(tmp_path / "large")
    big = made_group([float(i % 3 == 0) for i in range(16)], ["word " * 250] * 16)
    tokens = np.arange(1000) % 300
    completions = tuple(
        replace(c, tokens=tokens, logprobs=np.full(1000, -0.5, np.float32), drawn_mask=tokens >= 0)
        for c in big.completions
    )
    log_step(folder, 0, [replace(big, completions=completions) for _ in range(32)])
    logged = sum(file.stat().st_size for file in (tmp_path / "large/rollouts").iterdir())
    sizes = []
    with serving(tmp_path) as url:
        page.goto(f"{url}?token=right#/run/large")
        page.wait_for_selector(".strip a")
        page.on("response", lambda reply: sizes.append(len(reply.body())))
        for fragment, ready in (
            ("#/run/large/step/0", ".group >> nth=31"),
            ("#/run/large/step/0/group/3/token/2", ".tok >> nth=999"),
        ):
            page.evaluate(f"location.hash = {fragment!r}")
            page.wait_for_selector(ready, state="attached")
            assert page.locator("*").count() < 1500, "a thousand are the tokens of one completion"
        page.goto("about:blank")
    folder.close()
    assert 0 < sum(sizes) < logged / 100
