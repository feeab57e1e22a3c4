"""Where a stop takes effect, what it says before, and when checkpoints are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.training.runs import FAST, fingerprint, start

from covey.config.load import load_config
from covey.errors import Stopped
from covey.models.kernels import build
from covey.runs.clock import Clock
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.pipeline import run_pipeline
from covey.training.progress import Progress

PIECES: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": {"coef": 0.01}},
    "train": {"steps": 3, "updates_per_batch": 2, "tokens_per_micro_batch": 60},
}


def asked_at(monkeypatch: pytest.MonkeyPatch, stop: StopSignal, step: int, updates: int) -> list[str]:
    """Ask for a stop in the first micro-batch after so many updates of a step; -> what is answered then."""
    answers: list[str] = []
    begins = Progress.micro_batch_begins

    def micro_batch_begins(progress: Progress) -> None:
        begins(progress)
        if progress.clock.phase == "update" and (progress.step, progress.updates_begun) == (step, updates):
            stop.request("stopped by the test")
            answers.append(progress.describe_stop("Ctrl-C again"))

    monkeypatch.setattr(Progress, "micro_batch_begins", micro_batch_begins)
    return answers


@pytest.mark.parametrize(("updates", "saved"), [(0, 1), (1, 2)], ids=["broken off", "finished"])
def test_a_stop_breaks_a_step_off_between_micro_batches_until_it_has_changed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int, saved: int
) -> None:
    """A step ran to its end, minutes with a real model, whatever had been computed of it."""
    start(tmp_path / "whole", **PIECES)
    stop = StopSignal()
    with monkeypatch.context() as patched:
        answers = asked_at(patched, stop, step=1, updates=updates)
        with pytest.raises(Stopped, match=f"saved after step {saved} of 3"):
            start(tmp_path / "parts", stop, **PIECES)
    what = "this step" if updates else "this micro-batch"
    assert answers[0].startswith(f"Stopping after {what}")
    start(tmp_path / "parts", **PIECES)
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "parts")


def test_a_stop_takes_effect_between_two_tokens(tmp_path: Path) -> None:
    """A completion of a real model takes a minute."""
    drawn: list[int] = []

    class Impatient(StopSignal):
        def check(self) -> None:
            drawn.append(len(drawn))
            if len(drawn) == 4:
                self.request("stopped by the test")
            super().check()

    settings = {"rollout": {"max_tokens": 2000, "stop": []}, "data": {"task": "last_digit"}}
    with pytest.raises(Stopped, match="saved after step 0"):
        start(tmp_path / "run", Impatient(), **settings)
    assert len(drawn) == 4


class Times:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    times = Times()
    for module in ("training.progress", "runs.clock"):
        monkeypatch.setattr(f"covey.{module}.time.monotonic", times)
    return times


def course_of(times: Times, steps: int = 10) -> Progress:
    """Two steps of 40 s: 20 s of sampling and 20 s of two updates; the first is saved, which took 4 s."""
    progress = Progress(Clock(), steps, updates_per_step=2)
    for step in (1, 2):
        progress.step_begins()
        with progress.clock("rollout"):
            times.now += 20
        with progress.clock("update"):
            for number in (0, 1):
                for _ in range(2):
                    progress.micro_batch_begins()
                    times.now += 5
                progress.update_begins(number)
        progress.step_ends(step)
        if step == 1:
            with progress.clock("save"):
                times.now += 4
            progress.checkpoint()
    return progress


def test_an_answer_says_when_the_run_ends_and_what_a_second_signal_loses(times: Times) -> None:
    progress = course_of(times)
    progress.step_begins()
    with progress.clock("rollout"):
        times.now += 15
        assert progress.describe_stop("Ctrl-C again") == (
            "Stopping now, and saving step 2 (about 4 s). Step 3 is repeated when the run continues (15 s). "
            "Ctrl-C again stops at once and loses 1 step (40 s)"
        )
        assert progress.describe_loss() == "lost, since step 1 was saved: 1 step (40 s)"
    with progress.clock("update"):
        progress.micro_batch_begins()
        times.now += 5
        progress.micro_batch_begins()
        assert progress.describe_stop("a second SIGTERM").startswith(
            "Stopping after this micro-batch, and saving step 2 (about 9 s)"
        )
        times.now += 5
        progress.update_begins(0)
        assert progress.describe_stop("Ctrl-C again") == (
            "Stopping after this step (about 14 s). Ctrl-C again stops at once and loses 2 steps (1 min 5 s)"
        )


def test_an_answer_says_where_waiting_costs_more_than_it_saves(times: Times) -> None:
    progress = course_of(times)
    progress.checkpoint()
    progress.step_begins()
    with progress.clock("update"):
        times.now += 3
        progress.update_begins(0)
        assert progress.describe_stop("Ctrl-C again") == (
            "Stopping after this step (about 21 s). "
            "Ctrl-C again stops at once and loses less than that: 1 step (3 s)"
        )
    progress.step_ends(3)
    progress.checkpoint()
    with progress.clock("eval"):
        times.now += 12
        assert progress.describe_stop("Ctrl-C again") == (
            "Stopping now. This evaluation is repeated when the run continues (12 s). "
            "Ctrl-C again loses nothing more"
        )


def test_the_time_left_has_the_evaluations_in_it(times: Times) -> None:
    """The evaluation before training counted as a part of the first step, and those to come not at all."""
    progress = Progress(Clock(), 5, updates_per_step=1)
    with progress.clock("eval"):
        times.now += 30
    assert progress.seconds_left(evaluations=2) is None
    progress.step_begins()
    times.now += 10
    progress.step_ends(1)
    assert progress.seconds_left(evaluations=2) == 4 * 10 + 2 * 30
    progress.step_begins()
    times.now += 4
    assert progress.seconds_left(evaluations=2) == 4 * 10 - 4 + 2 * 30


def test_checkpoints_are_written_by_minutes_too_and_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty steps of a real model are an hour of work."""
    rare = {"train": {"steps": 5, "save_every": 50, "keep": 9}}
    start(tmp_path / "rare", **rare)
    # Of the steps 1 to 4; after the last one there is a checkpoint anyway.
    minutes = iter([3.0, 10.0, 2.0, 11.0])
    monkeypatch.setattr(Progress, "unsaved_minutes", lambda _: next(minutes))
    start(tmp_path / "often", **rare)

    def checkpoints(name: str) -> list[str]:
        return sorted(p.name for p in (tmp_path / name / "checkpoints").iterdir())

    assert checkpoints("rare") == ["step_000005"]
    assert checkpoints("often") == ["step_000002", "step_000004", "step_000005"]
    assert fingerprint(tmp_path / "rare") == fingerprint(tmp_path / "often")
    by_steps = {"train": {**rare["train"], "save_minutes": 0}}
    monkeypatch.setattr(Progress, "unsaved_minutes", lambda _: 1e9)
    start(tmp_path / "by_steps", **by_steps)
    assert checkpoints("by_steps") == ["step_000005"]


def test_the_time_of_a_long_run_is_said_before_its_first_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if build.tested_kernels() is None:
        pytest.skip("needs gcc")
    resolved = load_config(values={**FAST, "output": tmp_path / "short"})
    run_pipeline(resolved, RunConsole(), StopSignal())
    assert "estimated time" not in capsys.readouterr().out
    monkeypatch.setattr("covey.training.time_estimate.MIN_PRINTED_SECONDS", 0.0)
    resolved = load_config(values={**FAST, "output": tmp_path / "long"})
    run_pipeline(resolved, RunConsole(), StopSignal())
    lines = capsys.readouterr().out.splitlines()
    (said,) = [n for n, line in enumerate(lines) if line.startswith("estimated time: at most about ")]
    assert "4 steps and 2 evaluations" in lines[said]
