"""Which step of a run was the best on held-out problems. All of it is in `evals.jsonl`, which a resume cuts
back with the other logs: what is kept and said after a kill is what an undisturbed run keeps and says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from covey.estimates import Estimate, Evaluation, gains, incomparable, on_shared_problems


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run and the newest one, which may be the same."""

    step: int
    """Steps that were done by then."""
    evaluation: Evaluation
    newest: Evaluation
    count: int
    """How many evaluations it is the best of."""

    @property
    def fell(self) -> bool:
        """Whether less is correct now, sampled."""
        return self._change.value < 0

    @property
    def clear(self) -> bool:
        """Whether that is more than chance explains, by the paired 95 % interval."""
        return self._change.high < 0

    @property
    def _change(self) -> Estimate:
        return gains(self.evaluation, self.newest)["sampled"]

    def __str__(self) -> str:
        before, now = on_shared_problems(self.evaluation, self.newest)
        return (
            f"step {self.step}, {100 * before.pass_rate.mean():.0f} % sampled "
            f"({100 * now.pass_rate.mean():.0f} % now)"
        )


def best_of(records: Sequence[Mapping[str, object]]) -> Best | None:
    """The best of the evaluations since training began: by sampled accuracy, then greedy, then the reward.

    ``records`` are those of `evals.jsonl`. Of equals it is the first. Those that measured something else than
    the newest one are left out. None where nothing was measured. Raises CheckpointError for a damaged record.
    """
    found = [(int(str(r["step"])), Evaluation.from_record(r)) for r in records if r["step"]]
    if not found:
        return None
    newest = found[-1][1]
    known = [(step, e) for step, e in found if not incomparable(e, newest)]
    step, best = max(known, key=lambda one: _rank(one[1], newest))
    return Best(step, best, newest, len(known))


def _rank(evaluation: Evaluation, newest: Evaluation) -> tuple[float, float, float]:
    own, _ = on_shared_problems(evaluation, newest)
    scored = own.reward[~np.isnan(own.reward)]
    reward = float(scored.mean()) if len(scored) else -math.inf
    return float(own.pass_rate.mean()), float(own.greedy.mean()), reward
