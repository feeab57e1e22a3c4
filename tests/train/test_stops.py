"""Where a stop takes effect, what it says before, and when checkpoints are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.train.test_runs import FAST, fingerprint, start

from covey.config.load import load_config
from covey.errors import Stopped
from covey.models.kernels import build
from covey.runs.clock import Clock
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.course import Course
from covey.training.pipeline import run_pipeline

PIECES: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": {"coef": 0.01}},
    "train": {"steps": 3, "updates_per_batch": 2, "tokens_per_micro_batch": 60},
}


def asked_at(monkeypatch: pytest.MonkeyPatch, stop: StopSignal, step: int, updates: int) -> list[str]:
    """Ask for a stop in the first micro-batch after so many updates of a step; -> what is answered then."""
    answers: list[str] = []
    begins = Course.micro_batch_begins

    def micro_batch_begins(course: Course) -> None:
        begins(course)
        if course.clock.phase == "update" and (course.step, course.updated) == (step, updates):
            stop.request("stopped by the test")
            answers.append(course.outlook("Ctrl-C again"))

    monkeypatch.setattr(Course, "micro_batch_begins", micro_batch_begins)
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
    for module in ("training.course", "runs.clock"):
        monkeypatch.setattr(f"covey.{module}.time.monotonic", times)
    return times


def course_of(times: Times, steps: int = 10) -> Course:
    """Two steps of 40 s: 20 s of sampling and 20 s of two updates; the first is saved, which took 4 s."""
    course = Course(Clock(), steps, updates=2)
    for step in (1, 2):
        course.step_begins()
        with course.clock("rollout"):
            times.now += 20
        with course.clock("update"):
            for number in (0, 1):
                for _ in range(2):
                    course.micro_batch_begins()
                    times.now += 5
                course.update_begins(number)
        course.step_ends(step)
        if step == 1:
            with course.clock("save"):
                times.now += 4
            course.checkpoint()
    return course


def test_an_answer_says_when_the_run_ends_and_what_a_second_signal_loses(times: Times) -> None:
    course = course_of(times)
    course.step_begins()
    with course.clock("rollout"):
        times.now += 15
        assert course.outlook("Ctrl-C again") == (
            "Stopping now, and saving step 2 (about 4 s). Step 3 is repeated when the run continues (15 s). "
            "Ctrl-C again stops at once and loses 1 step (40 s)"
        )
    with course.clock("update"):
        course.micro_batch_begins()
        times.now += 5
        course.micro_batch_begins()
        assert course.outlook("a second SIGTERM").startswith(
            "Stopping after this micro-batch, and saving step 2 (about 9 s)"
        )
        times.now += 5
        course.update_begins(0)
        assert course.outlook("Ctrl-C again") == (
            "Stopping after this step (about 14 s). Ctrl-C again stops at once and loses 2 steps (1 min 5 s)"
        )


def test_an_answer_says_where_waiting_costs_more_than_it_saves(times: Times) -> None:
    course = course_of(times)
    course.checkpoint()
    course.step_begins()
    with course.clock("update"):
        times.now += 3
        course.update_begins(0)
        assert course.outlook("Ctrl-C again") == (
            "Stopping after this step (about 21 s). "
            "Ctrl-C again stops at once and loses less than that: 1 step (3 s)"
        )
    course.step_ends(3)
    course.checkpoint()
    with course.clock("eval"):
        times.now += 12
        assert course.outlook("Ctrl-C again") == (
            "Stopping now. This evaluation is repeated when the run continues (12 s). "
            "Ctrl-C again loses nothing more"
        )


def test_the_time_left_has_the_evaluations_in_it(times: Times) -> None:
    """The evaluation before training counted as a part of the first step, and those to come not at all."""
    course = Course(Clock(), 5, updates=1)
    with course.clock("eval"):
        times.now += 30
    assert course.left(evaluations=2) is None
    course.step_begins()
    times.now += 10
    course.step_ends(1)
    assert course.left(evaluations=2) == 4 * 10 + 2 * 30
    course.step_begins()
    times.now += 4
    assert course.left(evaluations=2) == 4 * 10 - 4 + 2 * 30


def test_checkpoints_are_written_by_minutes_too_and_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty steps of a real model are an hour of work."""
    rare = {"train": {"steps": 5, "save_every": 50, "keep": 9}}
    start(tmp_path / "rare", **rare)
    # Of the steps 1 to 4; after the last one there is a checkpoint anyway.
    minutes = iter([3.0, 10.0, 2.0, 11.0])
    monkeypatch.setattr(Course, "unsaved_minutes", lambda _: next(minutes))
    start(tmp_path / "often", **rare)

    def checkpoints(name: str) -> list[str]:
        return sorted(p.name for p in (tmp_path / name / "checkpoints").iterdir())

    assert checkpoints("rare") == ["step_000005"]
    assert checkpoints("often") == ["step_000002", "step_000004", "step_000005"]
    assert fingerprint(tmp_path / "rare") == fingerprint(tmp_path / "often")
    by_steps = {"train": {**rare["train"], "save_minutes": 0}}
    monkeypatch.setattr(Course, "unsaved_minutes", lambda _: 1e9)
    start(tmp_path / "by_steps", **by_steps)
    assert checkpoints("by_steps") == ["step_000005"]


def test_the_time_of_a_long_run_is_said_before_its_first_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if build.tested_kernels() is None:
        pytest.skip("needs gcc")
    loaded = load_config(values={**FAST, "output": tmp_path / "short"})
    run_pipeline(loaded, RunConsole(), StopSignal())
    assert "estimated time" not in capsys.readouterr().out
    monkeypatch.setattr("covey.training.hours.WORTH_A_LINE", 0.0)
    loaded = load_config(values={**FAST, "output": tmp_path / "long"})
    run_pipeline(loaded, RunConsole(), StopSignal())
    lines = capsys.readouterr().out.splitlines()
    (said,) = [n for n, line in enumerate(lines) if line.startswith("estimated time: at most about ")]
    assert "4 steps and 2 evaluations" in lines[said]
