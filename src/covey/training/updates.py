"""Updates: they apply an accumulated gradient, or keep its batch aside if the gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from covey.errors import GuardStop
from covey.learner.batching import Batch
from covey.learner.schedule import learning_rate
from covey.models.sharded import local_part
from covey.system.processes import run_on_all
from covey.training.guards import count_skipped_update
from covey.training.run import AnyLearner, Run


def apply_update(
    run: Run, learner: AnyLearner, step: int, minibatch: Batch, losses: Sequence[float], number: int = 0
) -> float:
    """Apply a learner's accumulated gradient, the step's ``number``-th, and return its norm.

    If it or the loss is not finite nothing is applied, the batch is kept, and NaN is returned. Raises
    GuardStop after ``guards.bad_updates`` of these in a row.
    """
    if run.progress.between_steps:
        run_on_all(run.monitor.safe_point)
    # A test may have planned faults; without any, these calls do nothing.
    faults = run.options.faults
    run.progress.update_begins(number)
    faults.in_gradient(learner.optimizer.masters)
    loss = math.nan if faults.hit("loss.nan") else math.fsum(losses)
    # An infinite loss can have a finite gradient; neither is applied.
    norm = learner.step(learning_rate(step, learner.train, number)) if math.isfinite(loss) else math.nan
    faults.in_weights([local_part(m.detach()) for m in learner.optimizer.masters[:1]])
    is_finite = math.isfinite(norm)
    if not is_finite:
        _set_aside(run, learner, step, minibatch, loss)
    memory, stop = count_skipped_update(is_finite, run.state.guards, run.resolved.config.guards, step + 1)
    run.state = replace(run.state, guards=memory, updates=run.learner.version)
    if stop is not None:
        raise GuardStop(stop.why)
    return norm if is_finite else math.nan


def _set_aside(run: Run, learner: AnyLearner, step: int, minibatch: Batch, loss: float) -> None:
    """Keep the batch of an update that is not applied, log it, and drop its gradient."""
    name = f"step_{step + 1:06d}_{run.state.guards.bad_updates}"
    record = {
        "step": step + 1,
        "loss": str(loss),
        "optimizer_step": learner.version,
        # Has to be read before the gradient is dropped below.
        "parameters": learner.nonfinite_parameters(),
    }
    run.journal.save_skipped_update(name, minibatch, record)
    run.journal.log_event(step + 1, "update skipped", loss=loss, batch=name)
    learner.clear()
