"""The step of a run that was best on held-out problems.

It reads only `evals.jsonl`, which a resume truncates with the other logs. So an interrupted run keeps and
reports the same step as an undisturbed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from covey.runs.estimates import Estimate, Evaluation, gains, on_shared_problems, why_incomparable
from covey.system.text import percent


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation of a run, with the newest one, which may be the same."""

    step: int
    """Number of steps done at the best evaluation."""
    evaluation: Evaluation
    newest: Evaluation
    count: int
    """Number of evaluations that were compared."""

    @property
    def is_worse_now(self) -> bool:
        """Whether sampled accuracy is lower now than at the best evaluation."""
        return self._change.value < 0

    @property
    def is_significant(self) -> bool:
        """Whether the fall is larger than chance explains, by the paired 95 % interval."""
        return self._change.high < 0

    @property
    def _change(self) -> Estimate:
        return gains(self.evaluation, self.newest)["sampled"]

    def __str__(self) -> str:
        best, newest = on_shared_problems(self.evaluation, self.newest)
        return (
            f"step {self.step}, {percent(best.pass_rate.mean())} sampled "
            f"({percent(newest.pass_rate.mean())} now)"
        )


def best_evaluation(records: Sequence[Mapping[str, object]]) -> BestEvaluation | None:
    """Return the best evaluation since training began: by sampled accuracy, then greedy, then reward.

    ``records`` are those of `evals.jsonl`. Evaluations of other problems or of another verdict than the
    newest are left out. Among equal ones the first is the best. None if nothing was measured. Raises
    CheckpointError for a damaged record.
    """
    # Step 0 is the model before training, which no checkpoint holds.
    evaluations = [(int(str(r["step"])), Evaluation.from_record(r)) for r in records if r["step"]]
    if not evaluations:
        return None
    newest = evaluations[-1][1]
    comparable = [(step, e) for step, e in evaluations if not why_incomparable(e, newest)]
    step, best = max(comparable, key=lambda pair: _rank(pair[1], newest))
    return BestEvaluation(step, best, newest, len(comparable))


def _rank(evaluation: Evaluation, newest: Evaluation) -> tuple[float, float, float]:
    # A curriculum or --eval.problems may change the set: ranks are comparable on shared problems only.
    shared, _ = on_shared_problems(evaluation, newest)
    scored = shared.reward[~np.isnan(shared.reward)]
    reward = float(scored.mean()) if len(scored) else -math.inf
    return float(shared.pass_rate.mean()), float(shared.greedy.mean()), reward
