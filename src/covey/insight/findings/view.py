"""The view of a run that rules get: means over its first and last steps, evaluations and settings."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import chain
from statistics import median

from covey.insight.conclusion import conclusion_word
from covey.insight.evidence import Records, errors_needed, known_values, noise
from covey.insight.findings.settings import SettingOf, unknown
from covey.runs.estimates import Evaluation, gains

WINDOW = 5
WIDEST = 20
"""Least and largest width of a mean, in steps; between them it is a fifth of the run."""


class RunView:
    """Means of metrics, early and late. NaN if a metric was not logged, so that no comparison holds."""

    def __init__(
        self,
        metrics: Records,
        evals: Sequence[Evaluation] = (),
        setting: SettingOf = unknown,
        patient: bool = True,
        steps: int | None = None,
        tried: Collection[str] = (),
    ) -> None:
        """``patient``: rules wait for as many steps as they need to be sure.

        ``steps``: the number of steps, if ``metrics`` has only the first and the last WIDEST of them.
        ``tried``: config lines that no finding names again.
        """
        self.steps = len(metrics) if steps is None else steps
        width = width_of(self.steps)
        self.first = metrics[:width]
        self.last = metrics[-width:]
        self.beginning = metrics[:WIDEST]
        """The first WIDEST steps: all steps of a shorter run."""
        # Number of steps that are in both windows of a short run.
        overlap = max(0, len(self.beginning) + len(self.last) - self.steps)
        self.apart: tuple[Records, Records] = (self.beginning, self.last[overlap:])
        """The first and the last known steps, without overlap."""
        self.evals = evals
        self.setting = setting
        self.patient = patient
        self.tried = tried
        self.read: dict[str, float] = {}
        """Late means that a rule has read: its evidence. `find` empties it before each rule."""

    def early(self, name: str) -> float:
        """Return the mean over the first steps."""
        return mean_of(self.first, name)

    def late(self, name: str) -> float:
        """Return the mean over the last steps."""
        value = self.read[name] = mean_of(self.last, name)
        return value

    def least(self, name: str) -> float:
        """Return the mean over the last steps minus its uncertainty; NaN if fewer than three have it."""
        is_measured = len(known_values(self.last, name)) > 2
        return self.late(name) - self._uncertainty(name, len(self.last)) if is_measured else math.nan

    def usual(self, name: str) -> float:
        """Return the median over the last steps, for metrics with outliers."""
        value = self.read[name] = median(known_values(self.last, name) or [math.nan])
        return value

    def rise(self, name: str) -> float:
        """Return the late mean minus the early mean."""
        return self.late(name) - self.early(name)

    def after(self, steps: int) -> bool:
        """Whether the run has ``steps`` steps, or rules do not wait (``patient``)."""
        return self.steps >= steps or not self.patient

    def is_falling(self, name: str) -> bool:
        """Whether a bad value improves by itself: it is more than a tenth lower than in the first steps."""
        return self.late(name) < 0.9 * self.early(name)

    def rose(self, name: str, by: float) -> bool:
        """Whether a metric rose by more than ``by``, and by more than chance explains in all looks so far."""
        return self.rise(name) > max(by, self._change_uncertainty(name))

    def fell(self, name: str, by: float) -> bool:
        """Whether a metric fell by more than ``by``, and by more than chance explains in all looks so far."""
        return self.rise(name) < -max(by, self._change_uncertainty(name))

    def outlook(self, name: str) -> tuple[float, float]:
        """Return the lowest and highest change of a metric by the end of the run, if its pace continues.

        The interval is as wide as chance allows so far: a few steps of few groups say nothing yet about a run
        of hundreds of steps.
        """
        planned = self.setting("train.steps")
        steps = max(self.steps, planned) if isinstance(planned, int) else self.steps
        # The two windows lie about steps - width apart; this extends their difference to the whole run.
        extension = steps / max(1, self.steps - len(self.last))
        rise = self.rise(name)
        uncertainty = self._change_uncertainty(name)
        return extension * (rise - uncertainty), extension * (rise + uncertainty)

    def whole(self, name: str) -> tuple[float, float]:
        """Return the mean over all known steps, and its uncertainty."""
        steps = [r for window in self.apart for r in window]
        return mean_of(steps, name), self._uncertainty(name, len(known_values(steps, name)))

    def _change_uncertainty(self, name: str) -> float:
        return self._uncertainty(name, len(self.first), len(self.last))

    def _uncertainty(self, name: str, *windows: int) -> float:
        step_noise = noise(self.apart, name)
        if not step_noise.variance:
            return 0.0
        # Overlapping windows count as one look (``evidence``).
        looks = 1 + self.steps / WINDOW
        return step_noise.error(*windows) * errors_needed(step_noise.freedom, looks)

    def names(self, prefix: str, suffix: str = "") -> dict[str, float]:
        """Return late means of all metrics with this prefix and suffix, by the part of the name between."""
        pattern = re.compile(f"{re.escape(prefix)}(.+){re.escape(suffix)}")
        matches = (pattern.fullmatch(name) for name in self._logged)
        return {match[1]: self.late(match[0]) for match in matches if match}

    @cached_property
    def _logged(self) -> Iterable[str]:
        """The names of the metrics of the last steps: a run has a hundred, and many rules search them."""
        return dict.fromkeys(chain.from_iterable(self.last))

    @property
    def reward_means(self) -> dict[str, float]:
        """The late mean of each reward function."""
        return {name: mean for name, mean in self.names("reward/", "/mean").items() if "/" not in name}

    @property
    def accuracy_gain(self) -> float:
        """The gain of sampled accuracy: on held-out problems if measured twice, else in training."""
        if len(self.evals) > 1:
            return gains(self.evals[0], self.evals[-1])["sampled"].value
        return self.rise("accuracy")

    @property
    def _verdicts(self) -> list[str]:
        """The metric of the verdict's mean; if the verdict is unknown, the metrics of all rewards."""
        verdict = self.evals[-1].verdict if self.evals else ""
        rewards = list(self.reward_means)
        if verdict in rewards:
            rewards = [verdict]
        return [f"reward/{name}/mean" for name in rewards]

    @property
    def verdict_is_graded(self) -> bool:
        """Whether the verdict gives other values than 0 and 1."""
        means = self._verdicts
        return bool(means) and not any(self.same(mean, "accuracy") for mean in means)

    @property
    def fallen_metric(self) -> str:
        """The metric that shows fewer correct answers than at first, beyond chance; empty if none does.

        It is accuracy, unless held-out problems contradict it, or the mean of a graded verdict.
        """
        if self.fell("accuracy", 0.02) and not self.held_out_did_not_fall:
            return "accuracy"
        means = self._verdicts
        graded = len(means) == 1 and self.verdict_is_graded and self.fell(means[0], 0.02)
        return means[0] if graded else ""

    @property
    def grades_rose(self) -> bool:
        """Whether the verdict is graded, and the grades are clearly higher than at first.

        Grades may rise without ever crossing .5. Then accuracy does not show that the model learns.
        """
        means = self._verdicts
        if not self.verdict_is_graded or (len(means) == 1 and self.fell(means[0], 0.0)):
            return False
        rises = self.rise("reward/mean") > 0.3 * self.early("reward/std")
        if len(self.evals) < 2:
            return rises
        held_out = gains(self.evals[0], self.evals[-1])["reward"]
        return held_out.low > 0 or (rises and held_out.value > 0)

    @property
    def other_reward_rose(self) -> bool:
        """Whether a reward other than the verdict is clearly higher than at first."""
        means = [f"reward/{name}/mean" for name in self.reward_means]
        return len(means) > 1 and any(self.rose(m, 0.1) for m in means if not self.same(m, "accuracy"))

    @property
    def paid_more_for_fewer_solved(self) -> bool:
        """Whether held-out problems earn clearly more than at first, although fewer of them are solved."""
        return self.got_worse and gains(self.evals[0], self.evals[-1])["reward"].low > 0

    @property
    def held_out_did_not_fall(self) -> bool:
        """Whether held-out problems were measured twice, and no fewer of them are solved than at first."""
        return len(self.evals) > 1 and gains(self.evals[0], self.evals[-1])["sampled"].value >= 0

    @property
    def got_worse(self) -> bool:
        """Whether the last two evaluations (the last one if there are no more) solve fewer held-out problems
        than the first, beyond chance in all evaluations so far.
        """
        looks = len(self.evals) - 1
        judged = [
            conclusion_word(self.evals[0], later, errors_needed(math.inf, looks))
            for later in self.evals[1:][-2:]
        ]
        return bool(judged) and all(word == "got worse" for word in judged)

    def same(self, name: str, reference: str) -> bool:
        """Whether two metrics agree, at first and now."""
        # Completions that could not be scored leave a small difference between a verdict and accuracy.
        return all(abs(mean(name) - mean(reference)) < 0.02 for mean in (self.early, self.late))


def width_of(steps: int) -> int:
    """Return the number of steps in the means of a run of so many steps."""
    return max(WINDOW, min(WIDEST, steps // 5))


def mean_of(records: Records, name: str) -> float:
    """Return the mean of a metric over the steps that have it; NaN if none has."""
    values = known_values(records, name)
    return sum(values) / len(values) if values else math.nan
