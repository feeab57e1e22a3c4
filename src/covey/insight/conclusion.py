"""The conclusion on a run by held-out problems: one of four words, and a sentence with the evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from covey.runs.estimates import Estimate, Evaluation, gains, on_shared_problems, why_incomparable
from covey.runs.reader import conclusion_record
from covey.system.text import duration, percent

Word = Literal["learned", "did not learn", "got worse", "cannot tell"]
MIN_GAIN = 0.05
"""An interval within this distance of zero is evidence of no learning."""
ACCURACIES = ("greedy", "sampled")
ONE_CLAIM = 2.2414
"""Standard errors at which one of two tests, greedy and sampled, gives a false alarm in 5 % of runs
(Bonferroni)."""


@dataclass(frozen=True)
class Conclusion:
    """The conclusion on a run from its held-out problems."""

    word: Word
    sentence: str

    @property
    def failed(self) -> bool:
        """Whether the run has not helped: it did not learn, or got worse."""
        return self.word in ("did not learn", "got worse")


def conclude_run(
    before: Evaluation, after: Evaluation, seconds: float, errors: float = ONE_CLAIM
) -> Conclusion:
    """Compare accuracy, greedy and sampled, and reward, paired by held-out problem.

    ``errors``: the standard errors by which a change must differ from 0. Accuracy decides. If it cannot tell,
    because it is 0 or 1 throughout or its intervals are wide, the reward decides.
    """
    if reason := why_incomparable(before, after):
        return Conclusion("cannot tell", f"cannot tell: {reason}")
    before, after = on_shared_problems(before, after)
    changes = gains(before, after, errors)
    up = [name for name in ACCURACIES if changes[name].low > 0]
    down = [name for name in ACCURACIES if changes[name].high < 0]
    word, reason = _by_accuracy(up, down) if up or down else _by_reward(before, after, changes)
    sentence = (
        f"{word}: {course(before, after)}, on {len(after.greedy)} held-out problems in {duration(seconds)}"
    )
    return Conclusion(word, sentence + reason)


def recorded_conclusion(
    stage: Path, evals: Sequence[Mapping[str, object]], seconds: float
) -> Conclusion | None:
    """Return the conclusion that a run recorded at its end; until then, that from its ``evals``.

    The recorded one includes the measurement that is repeated at the end. None if there were fewer than
    two evaluations. Raises CheckpointError if the result is damaged.
    """
    recorded = conclusion_record(stage)
    if recorded is not None:
        return Conclusion(recorded.get("word", "cannot tell"), str(recorded.get("sentence", "")))
    if len(evals) < 2:
        return None
    return conclude_run(Evaluation.from_record(evals[0]), Evaluation.from_record(evals[-1]), seconds)


def conclusion_word(before: Evaluation, after: Evaluation, errors: float = ONE_CLAIM) -> Word:
    """Return the word of the conclusion alone, for a bound that may be wider than that of one claim."""
    return conclude_run(before, after, 0.0, max(errors, ONE_CLAIM)).word


def _by_accuracy(up: list[str], down: list[str]) -> tuple[Word, str]:
    if up and down:
        return "cannot tell", f"; {up[0]} accuracy rose and {down[0]} accuracy fell"
    return ("learned" if up else "got worse"), ""


def _by_reward(before: Evaluation, after: Evaluation, changes: Mapping[str, Estimate]) -> tuple[Word, str]:
    """Judge by the reward, if neither accuracy has clearly changed."""
    reward = changes["reward"]
    # Both ends of both intervals are near 0: not only no proof of a change, but proof of none that matters.
    is_still = all(max(-changes[n].low, changes[n].high) < MIN_GAIN for n in ACCURACIES)
    if reward.high < 0:
        return "got worse", f"; the reward fell by {-reward}"
    if reward.low > 0 and (_is_saturated(before, after) or not is_still):
        return "learned", f"; the reward rose by {reward}, accuracy alone could not tell"
    if reward.low > 0:
        return "did not learn", f"; the reward rose by {reward}, but not with correct answers"
    if is_still:
        return "did not learn", ""
    return "cannot tell", (
        f"; the change, {points(changes['greedy'])}, may be chance: evaluate on more problems or train longer"
    )


def _is_saturated(before: Evaluation, after: Evaluation) -> bool:
    """Whether all answers are correct, or all incorrect, before and after: accuracy cannot show a change."""
    rates = np.concatenate([a for e in (before, after) for a in (e.greedy, e.pass_rate)])
    return bool((rates == rates[0]).all() and rates[0] in (0, 1))


def course(before: Evaluation, after: Evaluation) -> str:
    """Describe the change in words; the reward only if it differs from sampled accuracy."""
    before, after = on_shared_problems(before, after)
    old = before.summary()
    new = after.summary()
    accuracies = (
        f"{percent(old['greedy'].value)} -> {new['greedy']} greedy, "
        f"{percent(old['pass@1'].value)} -> {new['pass@1']} sampled"
    )
    unknown = np.isnan(before.reward).all()
    if unknown or all(np.array_equal(e.reward, e.pass_rate) for e in (before, after)):
        return accuracies
    return f"{accuracies}, reward {old['reward'].value:.3g} -> {new['reward']}"


def points(gain: Estimate) -> str:
    """Return a difference of fractions as percentage points with its interval."""
    if math.isnan(gain.value):
        return "not known"
    value, low, high = (100 * v for v in (gain.value, gain.low, gain.high))
    return f"{value:+.0f} points [{low:+.0f}, {high:+.0f}]"
