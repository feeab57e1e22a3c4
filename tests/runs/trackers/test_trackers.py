"""Trackers: they get every number, and nothing that they do ends or changes a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import types
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.runs.trackers import three_steps
from tests.training.runs import fingerprint, start

from covey.runs import trackers
from covey.runs.trackers import TRACKER_PACKAGES, Tracking, check_tracker
from covey_verify.errors import ConfigError


class Kept:
    """A tracker that keeps everything."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Every tracker is this one."""
    tracker = Kept()
    monkeypatch.setattr(trackers, "check_tracker", lambda _: None)
    monkeypatch.setattr("covey.training.setup.check_tracker", lambda _: None)
    monkeypatch.setattr("covey.runs.journal.tracker_opener", lambda _: lambda *_: tracker)
    return tracker


def test_it_gets_metrics_times_and_evaluations(kept: Kept, tmp_path: Path) -> None:
    start(tmp_path / "run", tracker="wandb")
    assert kept.closed
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    by_step = [(step, values) for step, values in kept.seen if "reward/mean" in values]
    assert [step for step, _ in by_step] == [1, 2, 3, 4]
    for record, (_, values) in zip(metrics, by_step, strict=True):
        assert values["reward/mean"] == record["reward/mean"]
        assert "seconds/rollout" in values
    assert [s for s, v in kept.seen if "held_out/greedy" in v] == [0, 4]


def test_a_tracker_that_fails_is_said_once_and_changes_no_bit(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(step: int, values: Mapping[str, float]) -> None:
        raise SystemExit(f"no space at step {step}")

    monkeypatch.setattr(kept, "log", broken)
    start(tmp_path / "tracked", tracker="mlflow")
    start(tmp_path / "alone")
    assert fingerprint(tmp_path / "tracked") == fingerprint(tmp_path / "alone")
    events = [json.loads(line) for line in (tmp_path / "tracked/events.jsonl").read_text().splitlines()]
    (event,) = [e for e in events if e["event"] == "tracker failed"]
    assert "no space at step 0" in event["because"]


def test_one_that_cannot_begin_or_hangs_does_not_hold_anything_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "MAX_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "MAX_QUEUED_RECORDS", 4)
    told: list[str] = []
    for_ever = threading.Event()
    hanging = Tracking(lambda: for_ever.wait() or Kept(), told.append)
    for step in range(10):
        hanging.log(step, {"a": 1.0})
    hanging.close()
    assert len(told) == 1
    for_ever.set()

    def cannot() -> Kept:
        raise OSError("no route to host")

    failing = Tracking(cannot, told.append)
    failing.thread.join()
    failing.log(0, {"a": 1.0})
    failing.close()
    assert told[1:] == ["OSError: no route to host"]


def test_numbers_that_are_none_are_left_out() -> None:
    tracker = Kept()
    tracking = Tracking(lambda: tracker, pytest.fail)
    tracking.log(3, {"a": float("nan"), "b": None, "c": 2, "d": float("inf")})
    tracking.close()
    assert tracker.seen == [(3, {"c": 2.0})]


def test_a_package_that_is_not_there_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    for name, package in TRACKER_PACKAGES.items():
        with pytest.raises(ConfigError, match=rf"needs {package}.*covey\[{name}\]"):
            check_tracker(name)
    check_tracker(None)


def test_each_file_speaks_its_packages_language(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fakes with the calls of the packages' documentation, as each file makes them."""
    calls: list[tuple[str, object]] = []

    def said(name: str):
        return lambda *a, **k: calls.append((name, (a, k)))

    writer = types.SimpleNamespace(add_scalar=said("scalar"), flush=lambda: None, close=said("finish"))
    settings = types.SimpleNamespace
    names = ("set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics", "end_run")
    fakes = {
        "wandb": {"init": said("init"), "log": said("log"), "finish": said("finish"), "Settings": settings},
        "trackio": {"init": said("init"), "log": said("log"), "finish": said("finish")},
        "mlflow": {name: said(name) for name in names},
        "tensorboardX": {"SummaryWriter": lambda *a, **k: calls.append(("init", (a, k))) or writer},
    }
    for name, package in TRACKER_PACKAGES.items():
        monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(**fakes[package]))
        monkeypatch.delitem(sys.modules, f"covey.runs.trackers.to_{name}", raising=False)
        calls.clear()
        (tmp_path / "run").mkdir(exist_ok=True)
        tracker = trackers.tracker_opener(name)(tmp_path / "run", {"train.lr": 1e-6}, 2)
        tracker.log(2, {"reward/mean": 0.5})
        tracker.close()
        assert "0.5" in str(calls)
        assert "2" in str(calls)
        assert calls[-1][0] in ("finish", "end_run")
        monkeypatch.delitem(sys.modules, f"covey.runs.trackers.to_{name}", raising=False)


NAMES = ("reward/mean", "reward/correlation/a/b", "held_out/pass@1", "held_out/maj@4", "reward/é r/mean")
"""Of metrics, with characters that some trackers do not take."""


def begun_with(monkeypatch: pytest.MonkeyPatch, name: str, runs: list[Path]) -> list[dict[str, object]]:
    """What a package is told when each of the runs begins; it refuses names as the real one does."""
    told: list[dict[str, object]] = []

    def begin(*_: object, **arguments: object) -> None:
        told.append(arguments)

    def log(values: Mapping[str, float], step: int) -> None:
        for one in values:
            assert name != "mlflow" or re.fullmatch(r"[/\w.\- :]+", one, re.ASCII), one
            assert name != "mlflow" or (os.path.normpath(one) == one and len(one) <= 250), one

    def params(values: Mapping[str, str]) -> None:
        assert len(values) <= 100
        log(dict.fromkeys(values, 0.0), 0)

    def nothing(*_: object, **__: object) -> None:
        pass

    fakes = {
        "wandb": {"init": begin, "log": log, "finish": nothing, "Settings": types.SimpleNamespace},
        "trackio": {"init": begin, "log": log, "finish": nothing},
        "mlflow": {"set_tracking_uri": nothing, "set_experiment": nothing, "start_run": begin}
        | {"log_params": params, "log_metrics": log, "end_run": nothing},
    }
    monkeypatch.setitem(sys.modules, TRACKER_PACKAGES[name], types.SimpleNamespace(**fakes[name]))
    monkeypatch.delitem(sys.modules, f"covey.runs.trackers.to_{name}", raising=False)
    for run in runs:
        run.mkdir(parents=True, exist_ok=True)
        failed: list[str] = []
        begun = partial(trackers.tracker_opener(name), run, {f"section.{i}": i for i in range(130)}, 0)
        tracking = Tracking(begun, failed.append)
        for step in range(3):
            tracking.log(step, dict.fromkeys((*NAMES, "reward//a/../b", "x" * 300), 0.5))
        tracking.close()
        assert failed == []
    monkeypatch.delitem(sys.modules, f"covey.runs.trackers.to_{name}", raising=False)
    return told


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_runs_that_are_called_alike_are_not_one(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a, b = tmp_path / "a/runs/x", tmp_path / "b/runs/x"
    first, other, again = begun_with(monkeypatch, name, [a, b, a])
    assert first == again  # a resume
    assert first != other
    shutil.rmtree(a)
    (anew,) = begun_with(monkeypatch, name, [a])
    assert anew != first
    shutil.copytree(a, tmp_path / "copy/runs/x")
    (copied,) = begun_with(monkeypatch, name, [tmp_path / "copy/runs/x"])
    assert copied != anew


def steps_in(name: str, place: Path) -> list[int]:
    """For each run that a tracker has written below a folder how many steps of `reward/mean` it holds."""
    if name == "mlflow":
        return [len(p.read_text().splitlines()) for p in place.rglob("metrics/reward/mean")]
    if name == "trackio":
        (file,) = place.rglob("*.db")
        with closing(sqlite3.connect(file)) as database:
            rows = database.execute("select run_name, metrics from metrics").fetchall()
        return list(Counter(run for run, values in rows if "reward/mean" in str(values)).values())
    if name == "wandb":
        return [min(3, p.read_bytes().count(b"reward/mean")) for p in place.rglob("*.wandb")]  # and a summary
    return [p.read_bytes().count(b"reward/mean") for p in place.rglob("events.*")]


@pytest.mark.parametrize("name", TRACKER_PACKAGES)
def test_the_real_package_writes_without_a_network(name: str, tmp_path: Path) -> None:
    if find_spec(TRACKER_PACKAGES[name]) is None:
        pytest.skip(f"{TRACKER_PACKAGES[name]} is not installed: pip install 'covey[{name}]'")
    place = {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(tmp_path),
        "http_proxy": "http://127.0.0.1:9",
    }
    place |= {"https_proxy": place["http_proxy"], "HF_HUB_OFFLINE": "1"}
    runs = [str(tmp_path / "a/runs/x"), str(tmp_path / "b/runs/x")]
    done = subprocess.run(
        [sys.executable, three_steps.__file__, name, "|".join(NAMES), *runs],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout.strip().splitlines()[-1] == "[]", done.stdout + done.stderr
    assert steps_in(name, tmp_path) == [3, 3]
