"""Who is let in, what is answered, and that colours can be read."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

import covey
from covey.ui.records import Runs, listed_runs, run_page, run_state
from covey.ui.server import STATIC
from tests.fakes import rewrite_rollouts, rows_of
from tests.ui.conftest import TOKEN


def asked(url: str, path: str, host: str | None = None, cookie: str = TOKEN, method: str = "GET"):
    port = urlsplit(url).port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    if cookie:
        connection.putheader("Cookie", f"covey_{port}={cookie}")
    connection.endheaders()
    try:
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def test_only_the_holder_of_the_token_is_let_in(site) -> None:
    assert asked(site.url, "/api/runs", cookie="")[0].status == 403
    assert asked(site.url, "/api/runs", cookie="wrong")[0].status == 403
    assert asked(site.url, "/static/main.js", cookie="")[0].status == 403
    assert asked(site.url, "/api/runs")[0].status == 200
    response, _ = asked(site.url, f"/?token={TOKEN}", cookie="")
    assert response.status == 303 and response.headers["location"] == "/"
    assert "httponly" in response.headers["set-cookie"].lower()


def test_other_hosts_and_other_methods_are_refused(site) -> None:
    for host in ("evil.example", "127.0.0.1", "localhost.evil.example:80"):
        assert asked(site.url, "/api/runs", host=host)[0].status == 421
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert asked(site.url, "/api/runs", method=method)[0].status == 405


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
    assert listed_runs(Runs(site.root))[0]["done"] == 3
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


def test_a_folder_that_is_not_there_is_refused(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "covey", "ui", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert done.returncode == 2 and "no such folder" in done.stderr and "Traceback" not in done.stderr


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


def test_the_wheel_carries_the_pages(tmp_path) -> None:
    """As far as that can be seen without building one: everything below `src/covey` goes in."""
    root = Path(covey.__file__).parent
    assert {p.name for p in STATIC.iterdir()} >= {"index.html", "main.js", "style.css", "vendor"}
    assert (STATIC / "vendor" / "uPlot.LICENSE").read_text().startswith("The MIT License")
    assert STATIC.is_relative_to(root) and not zipfile.is_zipfile(root)
