"""The evaluator of a run: it measures the policy on held-out problems now, or reads an earlier try's log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from covey.config.load import ResolvedConfig
from covey.rewards.scorer import Rewards
from covey.runs.estimates import Evaluation
from covey.runs.journal import Journal
from covey.sampling.base import Sampler
from covey.sampling.prompts import EncodedProblem
from covey.system.processes import on_rank_zero
from covey.training.evaluation import evaluate_by


@dataclass(frozen=True)
class Evaluator:
    """Measures a run's policy. The same problems are taken each time, so that two evaluations compare."""

    resolved: ResolvedConfig
    test_set: Sequence[EncodedProblem]
    sampler: Sampler
    rewards: Rewards
    journal: Journal
    on_sample: Callable[..., None]
    """Called with the number of finished completions, that of all, and ``what`` is being done."""

    @property
    def spare_problems(self) -> Sequence[EncodedProblem]:
        """Held-out problems that no evaluation during training uses, as many as one evaluation has."""
        count = self.resolved.config.eval.problems
        return self.test_set[count : 2 * count]

    def measure(self, problems: Sequence[EncodedProblem]) -> Evaluation:
        """Measure accuracy on some problems now."""
        self.journal.console.show_work("evaluating")
        with self.journal.clock("eval"):
            progress = partial(self.on_sample, what="evaluating")
            return evaluate_by(self.resolved, problems, self.sampler, self.rewards, progress)

    def at(self, step: int) -> Evaluation:
        """Return held-out accuracy at this step, measured and logged now or read from the log."""
        for record in on_rank_zero(lambda: self.journal.folder.read("evals.jsonl")):
            if record["step"] == step:
                return Evaluation.from_record(record)
        evaluation = self.measure(self.test_set[: self.resolved.config.eval.problems])
        self.journal.log_evaluation(step, evaluation)
        return evaluation
