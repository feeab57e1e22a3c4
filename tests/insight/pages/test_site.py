"""Who is let in, what is answered, and that colours can be read."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import covey
from covey.config.load import load_config, resolved_yaml
from covey.insight.metric_table import hints
from covey.insight.pages import server, tokens
from covey.insight.pages.records import Runs, run_list, run_page
from covey.insight.pages.server import STATIC
from covey.insight.pages.steps import group_page, step_page
from covey.insight.pages.thinning import MAX_POINTS, ThinnedCurve
from covey.insight.show import end_reason, show_step
from covey.models.tiny import build_tokenizer
from covey.runs.folder import RunFolder
from covey.runs.state import RunStatus, run_state
from covey.runs.trust import write_own
from tests.conftest import full_tokenizer
from tests.fakes import as_stream, rewrite_rollouts, rows_of
from tests.insight.pages.conftest import TOKEN, log_step, made_group, made_run, serving


def test_a_run_that_trains_again_is_listed_without_its_last_end(tmp_path) -> None:
    folder = made_run(tmp_path / "run")
    folder.close()
    end = {"exit_code": 75, "error": "stopped by SIGTERM", "resume_command": "covey resume run"}
    (tmp_path / "run" / "exit.json").write_text(json.dumps(end))
    (row,) = run_list(Runs(tmp_path))["runs"]
    assert row["state"] == "training" and row["ended"] == ""
    (tmp_path / "run" / ".owner").write_text("")  # which names this process, and that is at work
    (row,) = run_list(Runs(tmp_path))["runs"]
    assert row["state"] == "interrupted" and "stopped by SIGTERM" in row["ended"]


def test_the_pages_start_without_the_libraries_of_models() -> None:
    # They took two seconds of every start.
    code = "import sys, covey.insight.pages.server; assert not {'transformers', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def asked(
    url: str,
    path: str,
    host: str | None = None,
    token: str = TOKEN,
    method: str = "GET",
    body: bytes = b"",
    **headers: str,
):
    port = urlsplit(url).port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    if token:
        connection.putheader("x-covey-token", token)
    if body:
        connection.putheader("content-length", str(len(body)))
    connection.endheaders(body or None)
    try:
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def test_only_the_holder_of_the_token_is_let_in(site) -> None:
    for path in ("/api/runs", "/api/run?run=one", "/api/live?run=one", "/api/lab/group"):
        assert asked(site.url, path, token="")[0].status == 403
        assert asked(site.url, path, token="wrong")[0].status == 403
    assert asked(site.url, "/api/runs")[0].status == 200
    assert asked(site.url, f"/api/runs?token={TOKEN}", token="")[0].status == 200
    # What is the same for everybody needs none: the page reads the token from its own address.
    assert asked(site.url, "/", token="")[0].status == 200
    assert asked(site.url, "/static/main.js", token="")[0].status == 200


def test_no_cookie_carries_the_token_to_other_ports(site) -> None:
    assert "set-cookie" not in asked(site.url, f"/?token={TOKEN}", token="")[0].headers


def test_a_connection_that_asks_nothing_is_closed(site, monkeypatch) -> None:
    monkeypatch.setattr(server, "HEADERS_WITHIN", 0.2)
    port = urlsplit(site.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=20) as half:
        half.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        assert half.recv(1) == b""
    assert asked(site.url, "/api/runs")[0].status == 200


def test_the_browser_is_not_told_the_token_on_its_command_line(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1/?token=secret#/"
    page = server._doorway(tmp_path, url)
    assert "secret" not in page.as_uri() and url in page.read_text()


def test_other_hosts_and_other_methods_are_refused(site) -> None:
    for host in ("evil.example", "127.0.0.1", "localhost.evil.example:80"):
        assert asked(site.url, "/api/runs", host=host)[0].status == 421
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert asked(site.url, "/api/runs", method=method)[0].status == 405


def changed(url: str, path: str, change: object, **headers: str):
    """A change as a page of the site sends it, but for these headers."""
    given = {"content_type": "application/json", "origin": url.rstrip("/"), "sec_fetch_site": "same-origin"}
    response, body = asked(url, path, method="POST", body=json.dumps(change).encode(), **given | headers)
    return response.status, body.decode()


def test_only_a_page_of_the_site_changes_anything(site) -> None:
    change = {"run": "one", "tags": ["paper"]}
    refused = {
        403: ({"origin": "http://evil.example"}, {"sec_fetch_site": "cross-site"}, {"token": ""}),
        415: ({"content_type": "text/plain"}, {"content_type": "application/x-www-form-urlencoded"}),
        421: ({"host": "evil.example"},),
    }
    for status, cases in refused.items():
        for headers in cases:
            assert changed(site.url, "/api/tag", change, **headers)[0] == status, headers
    # An address can be known to others, as by a screenshot; a header cannot.
    assert changed(site.url, f"/api/tag?token={TOKEN}", change, token="")[0] == 403
    assert changed(site.url, "/api/tag", {**change, "more": "x" * 20_000})[0] == 413
    assert changed(site.url, "/api/trash/", {"run": "one"})[0] == 405
    assert not (site.root / "one" / "tags.json").exists()
    assert changed(site.url, "/api/tag", change) == (200, '{"tags":["paper"]}')
    assert json.loads((site.root / "one" / "tags.json").read_text()) == ["paper"]


def test_a_change_that_cannot_be_is_said_in_words(site) -> None:
    for path, change, says in (
        ("/api/tag", ["one"], "an object of JSON"),
        ("/api/tag", {"run": "../one", "tags": []}, "no run of that name"),
        ("/api/tag", {"run": "one", "tags": "paper"}, "a list of words"),
        ("/api/trash", {}, "run is missing"),
        ("/api/restore", {"run": "one"}, "not moved to the trash"),
    ):
        status, body = changed(site.url, path, change)
        assert status == 400 and says in json.loads(body)["error"], body


def test_a_run_is_moved_to_the_trash_and_back_unless_it_trains(site) -> None:
    at_work = RunFolder(site.root / "one")
    status, body = changed(site.url, "/api/trash", {"run": "one"})
    assert status == 400 and "one is training" in body
    at_work.close()
    (site.root / "one" / ".owner").write_text("")
    status, body = changed(site.url, "/api/trash", {"run": "one"})
    assert status == 200 and Path(json.loads(body)["place"], "metrics.jsonl").is_file()
    names = lambda: [row["run"] for row in json.loads(asked(site.url, "/api/runs")[1])["runs"]]
    assert names() == ["two"]
    assert changed(site.url, "/api/restore", {"run": "one"})[0] == 200
    assert sorted(names()) == ["one", "two"]


def test_a_run_of_another_host_is_deleted_once_its_end_there_is_confirmed(site) -> None:
    lock = site.root / "one" / ".owner"
    lock.write_text("process 7 on elsewhere.example")
    rows = {row["run"]: row for row in json.loads(asked(site.url, "/api/runs")[1])["runs"]}
    assert (rows["one"]["state"], rows["one"]["elsewhere"]) == ("training", "elsewhere.example")
    assert rows["two"]["elsewhere"] == ""
    for unsaid in (None, 7, [], ["another.example"]):
        status, body = changed(site.url, "/api/trash", {"run": "one", "ended_on": unsaid})
        assert status == 400 and "may be training on elsewhere.example" in body, unsaid
    at_work = RunFolder(site.root / "two")
    status, body = changed(site.url, "/api/trash", {"run": "two", "ended_on": [os.uname().nodename]})
    assert status == 400 and "two is training" in body, "of this host it is known"
    at_work.close()
    assert changed(site.url, "/api/trash", {"run": "one", "ended_on": ["elsewhere.example"]})[0] == 200
    assert not lock.exists()


def test_all_metrics_of_a_run_are_downloaded_with_the_tokens_so_far(site) -> None:
    folder = RunFolder(site.root / "one")
    for step in range(3, 600):  # more than a curve has points
        folder.append("metrics.jsonl", {"step": step, "accuracy": step / 600})
        folder.append("timings.jsonl", {"step": step, "seconds/update": 2.0, "tokens_per_second/update": 5.0})
    folder.close()
    found = json.loads(asked(site.url, "/api/metrics?run=one")[1])
    assert found["run"] == "one"
    assert [record["step"] for record in found["metrics"]] == list(range(600))
    assert found["timings"][-1]["tokens"] == 10 * 597
    page = json.loads(asked(site.url, "/api/run?run=one")[1])
    assert len(page["metrics"]) < 500
    assert page["timings"][-1]["tokens"] == page["at"]["tokens"] == 10 * 597
    assert asked(site.url, "/api/metrics?run=none")[0].status == 400


def test_read_only_pages_change_nothing(tmp_path: Path) -> None:
    made_run(tmp_path / "one").close()
    with serving(tmp_path, read_only=True) as url:
        assert json.loads(asked(url, "/api/runs")[1])["writable"] is False
        for path in ("/api/tag", "/api/trash", "/api/restore"):
            assert changed(url, path, {"run": "one", "tags": ["paper"]})[0] == 404
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


def test_every_answer_forbids_foreign_content(site) -> None:
    for path in ("/", "/static/main.js", "/api/runs", "/nothing"):
        headers = asked(site.url, path)[0].headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    for file in STATIC.rglob("*"):
        if file.suffix in (".js", ".css", ".html") and file.parent.name != "vendor":
            assert not re.search(r"(src|href|url|import|fetch)\W{1,3}https?://", file.read_text()), file


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/api/run?run=../../etc",
        "/api/run?run=%2Fetc",
        "/api/run",
        "/api/step?run=one&step=99",
        "/api/step?run=one&step=x",
        "/api/group?run=one&step=0&group=77",
        "/api/tokens?run=one&step=0&group=0&sample=9",
        "/api/lab/none",
        "/api/live?run=none",
        "/api/compare?a=one",
    ],
)
def test_what_is_not_there_is_said_in_words(site, path: str) -> None:
    response, body = asked(site.url, path)
    assert response.status in (400, 404)
    assert response.status == 404 or json.loads(body)["error"]


def test_groups_come_in_the_order_of_what_they_teach(site) -> None:
    groups = json.loads(asked(site.url, "/api/step?run=one&step=0")[1])["groups"]
    assert [g["dead"] for g in groups] == [False, True]
    assert [g["texts"] for g in groups] == [4, 1]


def test_a_line_without_a_step_is_no_record_and_a_result_ends_a_run(site) -> None:
    run = site.root / "one"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"loss": 1}\n{"step": 1'
            + "0" * 400
            + '}\n{"step": 2, "loss": NaN}\n{"step": 2, "loss": 1e999}\n'
        )
    assert run_list(Runs(site.root))["runs"][0]["done"] == 2
    assert any("4 lines cannot be read" in note for note in run_page("one", run)["notes"])
    assert run_state(run) == "training"  # this process has its lock
    (run / "result.json").write_text("{}")  # as a stage leaves it that makes examples, and no model
    assert run_state(run) == "finished"


def test_what_is_not_finite_becomes_null(site) -> None:
    log = site.root / "one" / "rollouts" / "step_000000.npz"
    with np.load(log) as archive:
        arrays = dict(archive)
    arrays["ratios"][:] = np.nan
    rewrite_rollouts(site.root / "one", 0, rows_of(log.with_suffix(".jsonl")), arrays)
    values = json.loads(asked(site.url, "/api/tokens?run=one&step=0&group=0&sample=0")[1])["values"]
    assert set(values["ratio"]) == {None}
    assert values["value"][0] == 0.5  # half of the siblings are correct


def test_it_starts_says_where_and_ends_with_ctrl_c(site) -> None:
    command = [sys.executable, "-m", "covey", "ui", str(site.root), "--no-open", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    assert url.startswith("http://127.0.0.1:")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


def test_a_line_comes_before_what_takes_long(site) -> None:
    """On a busy machine the address came after fifteen seconds of silence."""
    command = [sys.executable, "-m", "covey", "ui", str(site.root), "--no-open"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == f"pages of {site.root}: loading ...\n"
    os.killpg(process.pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert "http" not in out


def test_a_folder_that_is_not_there_is_refused(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "covey", "ui", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert done.returncode == 2 and "no such folder" in done.stderr and "Traceback" not in done.stderr


def test_a_completion_has_the_reason_of_its_end(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", rollout={"max_tokens": 7, "stop": ["."]})
    # The last token of the fourth has a letter after the stop string.
    group = made_group([1, 0, 0, 0], ["4", "four.", "4 and 4", "four.5"])
    cut = replace(group.completions[2], finish="length")
    log_step(folder, 0, [replace(group, completions=(*group.completions[:2], cut, group.completions[3]))])
    folder.close()
    ends = [c["ended"] for c in group_page(folder.path, 0, 0)["completions"]]
    assert ends == ["end token", "stop string '.'", "token limit (rollout.max_tokens 7)", "stop string '.'"]
    assert tokens.token_page(folder.path, 0, 0, 1)["row"]["ended"] == ends[1]
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "1.5"}}</tool_call>'
    turns = [{"role": role, "content": call} for role in ("assistant", "tool", "assistant")]
    row = {"finish": "stop", "completion": 2 * call, "turns": turns}
    limits = {"tools": {"max_calls": 1}}
    assert "rollout.tools.max_calls 1" in end_reason(row, limits)
    assert end_reason(row, {"tools": {"max_calls": 2}}) == "end token"
    # An answer after the last call that is allowed is no further call, and only its own text can end it.
    answered = {**row, "turns": [*turns[:2], {"role": "assistant", "content": "2"}]}
    assert end_reason(answered, {**limits, "stop": ["."]}) == "end token"
    failed = {**row, "environment_fault": "it hung"}
    assert end_reason(failed, {}) == "its environment failed: it hung"


# --- hints and settings ------------------------------------------------------------------------------


def test_every_metric_of_a_chart_or_tile_has_a_hint() -> None:
    charts = (STATIC / "charts.js").read_text()
    names = set(re.findall(r'known\("(?:held-out:)?([^"]+)"', charts))
    names |= set(re.findall(r'tile\("[^"]+", "([^"]+)"', (STATIC / "run.js").read_text()))
    names |= {"reward/math_answer/mean", "gradient_share/pass_rate_0.25_0.50"}  # of the charts by pattern
    names |= {"seconds/rollout", "tokens_per_second/update"}
    assert len(names) > 50
    assert names - set(hints(names)) == set()
    assert len(re.findall(r", /\^", charts)) == 4, "a new pattern: give an example of it above"


def test_a_run_comes_with_hints_on_its_metrics_and_settings(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", algorithm={"name": "grpo", "kl": {"coef": 0.1}})
    log_step(folder, 0, [made_group([1, 0], ["a", "b"])], **{"kl/start": 0.1, "user/mine": 1.0})
    folder.append("evals.jsonl", {"step": 1, "greedy": 0.5, "pass@4": 0.7, "reward": 0.5})
    folder.close()
    page = run_page("run", tmp_path / "run")
    assert {"reward/mean", "kl/start", "user/mine", "greedy", "pass@4", "seconds/rollout"} <= set(
        page["hints"]
    )
    assert page["hints"]["pass@4"].startswith("fraction of the held-out problems of which at least one of K")
    without = {row["setting"] for row in page["settings"] if not row["says"]}
    assert without <= {"stages", "lora"} | {s for s in without if s.startswith("algorithm.")}, without
    order = [row["setting"].partition(".")[0] for row in page["settings"] if not row["differs"]]
    assert order.index("model") < order.index("rollout") < order.index("train") < order.index("guards")


def test_runs_that_differ_in_nothing_but_the_seed_have_one_setup(tmp_path: Path) -> None:
    def setup(name: str, **settings: object) -> str:
        made_run(tmp_path / name, **settings).close()
        return next(r["setup"] for r in run_list(Runs(tmp_path))["runs"] if r["run"] == name)

    first = setup("a", seed=0)
    assert setup("b", seed=1) == first
    assert setup("c", seed=1, train={"steps": 9, "lr": 0.5}) != first
    # Stages start from models in the folders of their own seeds.
    stages = [
        setup(f"p{seed}/2-rl", seed=seed, model=str(tmp_path / f"p{seed}" / "1-sft" / "final"))
        for seed in (0, 1)
    ]
    assert stages[0] == stages[1] != first


# --- colours -----------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


PAIRS = dict(re.findall(r"--([\w-]+): light-dark\((#\w{6}, #\w{6})\)", (STATIC / "style.css").read_text()))
ON = [
    (text, ground)
    for text in ("ink", "muted", "accent", "up", "down", "good", "bad", "unsure")
    for ground in ("page", "card", "sunk")
]
ON += [("on-accent", "accent"), ("good", "good-wash"), ("bad", "bad-wash"), ("unsure", "unsure-wash")]


@pytest.mark.parametrize(("text", "ground"), ON)
def test_text_can_be_read_in_light_and_dark(text: str, ground: str) -> None:
    for a, b in zip(PAIRS[text].split(", "), PAIRS[ground].split(", "), strict=True):
        assert contrast(a, b) >= 4.5, (a, b)


def test_every_style_has_a_user_and_every_colour_is_defined() -> None:
    """oxlint reads the JavaScript; of the style sheet this much can be held without another tool."""
    sheet = re.sub(r"/\*.*?\*/", "", (STATIC / "style.css").read_text(), flags=re.DOTALL)
    code = "\n".join(p.read_text() for p in (*STATIC.glob("*.js"), STATIC / "index.html"))
    classes = set(re.findall(r"\.([a-zA-Z][\w-]*)", re.sub(r"\{[^{}]*\}", "", sheet)))
    of_library = {name for name in classes if name.startswith("u-")} | {"uplot"}
    written = set(re.findall(r"[\w-]+", code))
    assert classes - of_library - set(get_args(RunStatus)) <= written
    defined = set(re.findall(r"--([\w-]+)\"?:", sheet + code))
    assert set(re.findall(r"var\(--([\w-]+)", sheet + code)) <= defined


def test_the_wheel_carries_the_pages(tmp_path) -> None:
    """As far as that can be seen without building one: everything below `src/covey` goes in."""
    root = Path(covey.__file__).parent
    assert {p.name for p in STATIC.iterdir()} >= {"index.html", "main.js", "style.css", "vendor"}
    assert (STATIC / "vendor" / "uPlot.LICENSE").read_text().startswith("The MIT License")
    assert STATIC.is_relative_to(root) and not zipfile.is_zipfile(root)


def test_a_long_run_is_shown_in_few_points_and_no_spike_is_lost(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "long", train={"steps": 5000})
    for step in range(5000):
        spike = {2345: 99.0, 4100: -7.0}.get(step, step / 5000)
        folder.append("metrics.jsonl", {"step": step, "reward/mean": spike, "accuracy": 1 / 3})
    folder.close()
    found = run_page("long", tmp_path / "long")
    metrics = found["metrics"]
    assert len(metrics) <= 2 * MAX_POINTS + 2
    rewards = [m["reward/mean"] for m in metrics]
    assert (max(rewards), min(rewards)) == (99.0, -7.0)
    assert (metrics[0]["step"], metrics[-1]["step"]) == (0, 4999)
    assert [m["step"] for m in metrics] == sorted(m["step"] for m in metrics)
    assert len(json.dumps(found)) < 200_000


def test_a_page_that_is_opened_again_reads_only_what_is_new(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", train={"steps": 9})
    folder.append("metrics.jsonl", {"step": 0, "loss": 1.0})
    assert [m["step"] for m in run_page("run", tmp_path / "run")["metrics"]] == [0]
    folder.append("metrics.jsonl", {"step": 1, "loss": 2.0})
    found = run_page("run", tmp_path / "run")
    assert [m["loss"] for m in found["metrics"]] == [1.0, 2.0]
    assert found["at"]["metrics"] == (tmp_path / "run/metrics.jsonl").stat().st_size
    # A resume takes records back: the page begins again.
    (tmp_path / "run/metrics.jsonl").write_text(as_stream([{"step": 0, "loss": 3.0}]))
    assert [m["loss"] for m in run_page("run", tmp_path / "run")["metrics"]] == [3.0]
    folder.close()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 2500), parts=st.integers(1, 5))
def test_a_curve_has_the_extremes_of_its_stream(seed: int, count: int, parts: int) -> None:
    values = np.random.default_rng(seed).normal(size=count).tolist()
    curve = ThinnedCurve()
    records = [{"step": step, "x": value} for step, value in enumerate(values)]
    for part in np.array_split(np.arange(len(records)), parts):
        curve.add(records[i] for i in part)
    shown = curve.records()
    assert len(shown) <= 2 * MAX_POINTS + 2
    steps = [r["step"] for r in shown]
    assert steps == sorted(set(steps)) and (steps[0], steps[-1]) == (0, len(values) - 1)
    assert max(r["x"] for r in shown) == pytest.approx(max(values), rel=1e-5)
    assert min(r["x"] for r in shown) == pytest.approx(min(values), rel=1e-5)
    assert (shown[0]["x"], shown[-1]["x"]) == pytest.approx((values[0], values[-1]), rel=1e-5)


def test_a_message_with_two_lengths_is_refused_and_nothing_of_it_is_another_one(site) -> None:
    place = urlsplit(site.url)
    with socket.create_connection((place.hostname, place.port), timeout=20) as connection:
        connection.sendall(
            f"GET / HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n"
            f"\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode()
        )
        reply = b"".join(iter(lambda: connection.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({"name": "rloo", "kl": {"place": "reward", "coef": 0.1}}, "The KL in the reward"),
        ({"name": "reinforce_pp", "kl": None}, "compares with something other than the group"),
    ],
)
def test_a_dead_group_with_advantages_has_the_reason_of_its_own_algorithm(
    tmp_path: Path, algorithm: object, says: str
) -> None:
    folder = made_run(tmp_path / "run", algorithm=algorithm)
    log_step(folder, 0, [made_group([1.0, 1.0], ["4", "5"]), made_group([1.0, 0.0], ["4", "5"])])
    assert says in step_page(folder.path, 0)["advantage_reason"] in "\n".join(show_step(folder.path, 0)[1])
    assert says in group_page(folder.path, 0, 0)["advantage_reason"]
    assert group_page(folder.path, 0, 1)["advantage_reason"] == ""


def test_tokens_of_a_base_model_in_a_hubs_cache_have_their_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of that cache are links into its blobs: they were refused, and no token had a text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "blobs").mkdir()
    full_tokenizer().backend_tokenizer.save(str(tmp_path / "blobs" / "0a1b"))
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot" / "tokenizer.json"
    link.symlink_to(tmp_path / "blobs" / "0a1b")
    monkeypatch.setattr(tokens, "try_to_load_from_cache", lambda *_: str(link))
    folder = made_run(tmp_path / "run")
    log_step(folder, 0, [made_group([1, 0], ["four", "five"])])
    values = {"model": "some/model", "data": {"task": "sums"}, "output": str(tmp_path / "run")}
    write_own(folder.path, "config.yaml", resolved_yaml(load_config(values=values)))
    assert tokens.token_page(folder.path, 0, 0, 0)["pieces"]


def test_tokens_that_end_within_a_character_are_shown() -> None:
    tokenizer = build_tokenizer(["is it ש?"] * 3, 400).backend_tokenizer
    ids = tokenizer.encode("is it ש 🙂").ids
    for length in range(1, len(ids) + 1):
        pieces = tokens.token_pieces(tokenizer, ids[:length])
        assert len(pieces) == length
        assert "".join(pieces) == tokenizer.decode(ids[:length], skip_special_tokens=False)
    assert tokens.token_pieces(tokenizer, []) == []


def test_a_page_of_a_run_whose_settings_are_gone_names_them(tmp_path: Path) -> None:
    """The list had it a moment ago: the page said nothing, and the server had an error of its own."""
    folder = made_run(tmp_path / "run")
    log_step(folder, 0, [made_group([1, 0], ["four", "five"])])
    (tmp_path / "run" / "config.yaml").unlink()
    assert any(
        "config.yaml" in note and "missing" in note for note in run_page("run", tmp_path / "run")["notes"]
    )
