"""The loop over given examples; imitation, preferences and reward models differ in their loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from covey.learner.batching import Batch, MicroBatch, given_batch
from covey.learner.learner import Objective, Requirements
from covey.learner.schedule import learning_rate
from covey.models.logprobs import TokenOutputs
from covey.rng import key, permutation
from covey.runs.journal import Journal
from covey.system.processes import run_on_all
from covey.training.memory import memory_measured
from covey.training.run import Run
from covey.training.updates import apply_update

MetricParts = Mapping[str, float]
"""A micro-batch's part of each metric of its step; parts add up. One of them is `loss`."""
StepBuilder = Callable[[Sequence[int]], tuple[Batch, Objective[MetricParts]]]
"""Builds the batch of some examples, given by number, and its objective, before the update.

Held-out examples are numbered after those that are trained on.
"""


def train(step_builder_of: Callable[[Run], StepBuilder], run: Run) -> None:
    """Run the remaining steps on given examples; ``step_builder_of`` makes the run's step builder."""
    config = run.resolved.config
    learner = run.learner
    journal = run.journal
    build_step = step_builder_of(run)
    for step in range(run.state.step, config.train.steps):
        # A stop request that reaches one process stops all at the same step.
        run_on_all(run.monitor.safe_point)
        run.begin_step()
        rows = batch_rows(len(run.train_set), config.train.batch_size, step, config.seed)
        journal.console.show_work("updating")
        with journal.clock("update"):
            batch, objective = build_step(rows)
            parts = learner.forward_backward(batch, objective)
            norm = apply_update(run, learner, step, batch, [s["loss"] for s in parts])
        run.sampler.sync(learner)
        run.advance(step + 1)
        journal.clock.count("update", int(batch.mask.sum()))
        metrics = {
            **sum_of_parts(parts),
            "optimizer/grad_norm": norm,
            "optimizer/skipped": float(not math.isfinite(norm)),
            "optimizer/lr": learning_rate(step, config.train),
            **(held_out(run, build_step) if measures_after(step + 1, run) else {}),
        }
        _report_step(journal, step + 1, metrics, memory_measured(run))
        if run.end_step(metrics):
            break


ON_CONSOLE = ("loss", "preference/accuracy", "preference/margin")
"""Metrics shown on the console."""


def _report_step(
    journal: Journal, step: int, metrics: Mapping[str, float], memory: Mapping[str, int]
) -> None:
    """Log a step and show it on the console; ``memory``: bytes by component."""
    times = journal.log(step, metrics, memory)
    rate = f"{times.get('tokens_per_second/update', 0.0):,.0f}"
    values = {name.rpartition("/")[2]: f"{metrics[name]:.3f}" for name in ON_CONSOLE if name in metrics}
    journal.console.step(step, metrics["loss"], {**values, "tokens/s": rate})


def sum_of_parts(parts: Sequence[MetricParts]) -> dict[str, float]:
    """Add up the metrics of a step from the parts of its micro-batches."""
    return {name: math.fsum(s[name] for s in parts) for name in parts[0]} if parts else {"loss": 0.0}


def measures_after(step: int, run: Run) -> bool:
    """Whether the held-out examples are evaluated after ``step`` steps."""
    config = run.resolved.config
    return bool(run.held_out) and (step == config.train.steps or config.eval.is_due(step))


def held_out(run: Run, build_step: StepBuilder) -> dict[str, float]:
    """Evaluate the held-out examples: mean metrics over one batch, so that each example counts equally."""
    first = len(run.train_set)
    with run.journal.clock("eval"):
        parts = run.learner.measure(*build_step(range(first, first + len(run.held_out))))
    return {f"held_out/{name}": value for name, value in sum_of_parts(parts).items()}


def imitation(run: Run) -> StepBuilder:
    """Return the step builder for the answers of a data file, or for a task's solutions."""

    def build_step(rows: Sequence[int]) -> tuple[Batch, Objective[MetricParts]]:
        return given_batch([run.train_set[i] for i in rows]), NegativeLogLikelihood()

    return build_step


class NegativeLogLikelihood:
    """-mean log pi of the trained answer tokens of an optimizer step."""

    requires = Requirements()

    def __call__(self, micro: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, MetricParts]:
        """Return a micro-batch's part of the loss, and its value for the log."""
        logprobs = micro.packed.unpack(outputs.logprobs)
        mask = micro.rows.mask.to(logprobs.device)
        # Divided by the step's tokens, so that micro-batches add up to the mean.
        loss = -logprobs[mask].sum() / micro.totals.tokens
        return loss, {"loss": float(loss.detach())}


def batch_rows(count: int, size: int, step: int, seed: int) -> list[int]:
    """Return the row numbers of a step's batch, from permutations that follow one another without a break."""
    rows: list[int] = []
    for position in range(step * size, (step + 1) * size):
        epoch, index = divmod(position, count)
        # At the start of the batch and of every epoch; both follow from the step, so a resume needs no
        # state.
        if not rows or index == 0:
            order = permutation(key(seed, "order", epoch), count)
        rows.append(int(order[index]))
    return rows
