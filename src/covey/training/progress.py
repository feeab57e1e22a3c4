"""The progress of a run in time: what is left, and what a stop waits for and loses."""

from __future__ import annotations

import time
from typing import NamedTuple

from covey.runs.clock import Clock
from covey.system.text import duration

MIN_MENTIONED_SECONDS = 1.0
"""Seconds of work below which a loss is not mentioned."""


class StopForecast(NamedTuple):
    """The end of a run that was asked to stop."""

    after: str
    seconds: float
    """Seconds until then; 0 if that is not known."""


class Progress:
    """Notes when steps, updates and checkpoints of a run began and ended. Other threads may ask it."""

    def __init__(self, clock: Clock, steps: int, updates_per_step: int) -> None:
        """``steps``: number of steps of the run. ``updates_per_step``: optimizer steps in each."""
        self.clock = clock
        self.steps = steps
        self.updates_per_step = updates_per_step
        self.between_steps = True
        """Whether the last step is complete, its logs included, so that the run may end here."""
        self.begin(0, saved=False)

    def begin(self, step: int, saved: bool) -> None:
        """Note that the run begins, or continues from a checkpoint (``saved``), after ``step`` steps."""
        self.step = step
        self.saved_step = step if saved else None
        self.updates_begun = 0
        self.micro_batch_seconds = 0.0
        self.steps_this_process = 0
        self.seconds_this_process = 0.0
        self.saved_time = self.step_time = self.micro_batch_time = time.monotonic()

    @property
    def step_under_way(self) -> int:
        """Number of the step that runs, counted from 1; of the last one while or after it is evaluated."""
        return min(self.step + (self.clock.phase != "eval"), self.steps)

    def step_begins(self) -> None:
        """Note that a step begins."""
        self.step_time = time.monotonic()
        self.updates_begun = 0

    def micro_batch_begins(self) -> None:
        """Note that a micro-batch begins, of an update or of its preparation."""
        moment = time.monotonic()
        # Only if the previous micro-batch was of the same phase.
        if self.micro_batch_time > self.clock.since:
            self.micro_batch_seconds = moment - self.micro_batch_time
        self.micro_batch_time = moment

    def update_begins(self, number: int) -> None:
        """Note that the optimizer makes its ``number``-th step: from now on the step has to be finished."""
        self.between_steps = False
        self.updates_begun = number + 1

    def logging_begins(self) -> None:
        """Note that a step's results are being logged: no stop takes effect until all of them are."""
        self.between_steps = False

    def step_ends(self, step: int) -> None:
        """Note that a step is complete and logged, ``step`` in all."""
        moment = time.monotonic()
        if step != self.step:
            self.steps_this_process += 1
            self.seconds_this_process += moment - self.step_time
        self.between_steps = True
        self.step = step
        self.step_time = moment

    def checkpoint(self) -> None:
        """Note that everything up to the last whole step is saved."""
        self.saved_step = self.step
        self.saved_time = time.monotonic()

    def unsaved_minutes(self) -> float:
        """Return the minutes since the last checkpoint, or since this process began."""
        return (time.monotonic() - self.saved_time) / 60

    def seconds_left(self, evaluations: int) -> float | None:
        """Return the seconds left for the remaining steps and ``evaluations``; None before the first step."""
        moment = time.monotonic()
        steps_begun = self.steps_this_process + (not self.between_steps)
        if not steps_begun:
            return None
        spent = moment - self.step_time  # in this step, or in what follows it
        mean = (self.seconds_this_process + (0.0 if self.between_steps else spent)) / steps_begun
        seconds = mean * (self.steps - self.step - (not self.between_steps))
        evaluation = self.clock.last.get("eval", 0.0)
        if self.clock.phase == "eval":
            seconds += max(0.0, evaluation - spent)
        elif self.between_steps and self.step < self.steps:
            seconds -= min(mean, spent)
        return seconds + evaluations * evaluation

    def updating_left(self) -> float:
        """Return the seconds left of the current update; 0 if they are not known."""
        spent = time.monotonic() - self.clock.since
        expected = self.clock.last.get("update", 0.0)
        if self.updates_begun:
            expected = expected or spent / self.updates_begun * self.updates_per_step
        return max(0.0, expected - spent)

    def describe_stop(self, again: str) -> str:
        """Return what a stop does now: when the run ends, what is repeated, what a second signal loses."""
        if self.clock.phase == "final":
            return (
                f"The model is being written, then the run ends. {again} stops at once; the same command "
                "then writes it"
            )
        moment = time.monotonic()
        ending = self._stop_forecast()
        estimate = f" (about {duration(ending.seconds)})" if ending.seconds >= MIN_MENTIONED_SECONDS else ""
        sentences = [f"stopping {ending.after}{estimate}"]
        what = "this evaluation" if self.clock.phase == "eval" else f"step {self.step_under_way}"
        under_way = self.between_steps and self.clock.phase in ("rollout", "prepare", "update", "eval")
        if under_way and moment - self.step_time >= MIN_MENTIONED_SECONDS:
            sentences.append(
                f"{what} is repeated when the run continues ({duration(moment - self.step_time)})"
            )
        unsaved = self._unsaved_seconds()
        sentences.append(self._second_signal(again, unsaved, ending.seconds))
        return ". ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)

    def _stop_forecast(self) -> StopForecast:
        """Return where the run will end, judged by the times of earlier steps."""
        saved = self.between_steps and self.saved_step == self.step
        saving = 0.0 if saved else self.clock.last.get("save", 0.0)
        phase = self.clock.phase
        if self.between_steps:
            in_micro_batches = phase in ("prepare", "update")
            after = "after this micro-batch" if in_micro_batches else "now"
            save_clause = "" if saved else f", and saving step {self.step}"
            return StopForecast(f"{after}{save_clause}", saving + in_micro_batches * self.micro_batch_seconds)
        spent = time.monotonic() - self.clock.since
        other = max(0.0, self.clock.last.get(phase, 0.0) - spent) if phase else 0.0
        left = self.updating_left() if phase == "update" else other
        return StopForecast("after this step", left + saving)

    def describe_loss(self) -> str:
        """Return what the run loses if it ends at once: what came after its last checkpoint."""
        if self.clock.phase == "final":
            return "the model is not written, and all steps are saved"
        lost = self._lost_work()
        if not lost:
            return "nothing is lost"
        if self.saved_step is None:
            return f"lost, as there is no checkpoint yet: {lost}"
        return f"lost, since step {self.saved_step} was saved: {lost}"

    def _unsaved_seconds(self) -> float:
        return (self.step_time if self.between_steps else time.monotonic()) - self.saved_time

    def _lost_work(self) -> str:
        """Return the steps since the last checkpoint, with their time; empty if all of them are saved."""
        if self.between_steps and self.saved_step == self.step:
            return ""
        steps = self.step - (self.saved_step or 0) + (not self.between_steps)
        work = f"{steps} step{'s' * (steps != 1)}" if steps else "what came before the first step"
        return f"{work} ({duration(self._unsaved_seconds())})"

    def _second_signal(self, again: str, lost: float, waiting: float) -> str:
        work = self._lost_work() if lost >= MIN_MENTIONED_SECONDS else ""
        if not work:
            return f"{again} loses nothing more"
        less = "less than that: " if lost < waiting else ""
        return f"{again} stops at once and loses {less}{work}"
