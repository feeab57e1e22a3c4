"""The loss and metrics of rows under a model's current weights, without an update and without a run."""

from __future__ import annotations

from dataclasses import replace

from covey.config.load import ResolvedConfig
from covey.config.methods import METHODS
from covey.learner.objectives import PolicyObjective
from covey.learner.old_logprobs import OldLogprobs
from covey.objective.diagnostics import group_metrics, score_metrics, token_metrics
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.examples_loop import sum_of_parts
from covey.training.options import RunOptions
from covey.training.pipeline import STEP_BUILDERS
from covey.training.rl import prepare
from covey.training.run import Run
from covey.training.setup import scratch_run


def measure_rows(resolved: ResolvedConfig, step: int = 0) -> dict[str, float]:
    """Return the metrics of a config's training rows, computed as in one step with all of them.

    A method that samples draws a group for each row, with random numbers keyed by ``step``. Raises
    CoveyError.
    """
    with scratch_run(resolved, RunConsole(quiet=True), StopSignal(), RunOptions(trains=False)) as run:
        run.state = replace(run.state, step=step)
        return _measure_groups(run) if resolved.config.method == "rl" else _measure_examples(run)


def _measure_examples(run: Run) -> dict[str, float]:
    loop = METHODS[run.resolved.config.method].loop
    assert loop is not None, "a trainer's method has a loop"
    build_step = STEP_BUILDERS[loop](run)
    return sum_of_parts(run.learner.measure(*build_step(range(len(run.train_set)))))


def _measure_groups(run: Run) -> dict[str, float]:
    config = run.resolved.config
    algorithm = run.resolved.algorithm
    all_rows = config.rollout.model_copy(update={"prompts_per_step": len(run.train_set)})
    rollout_batch = next(run.rollouts(all_rows))
    groups = rollout_batch.all_groups
    scores = score_metrics(groups, rollout_batch.scoring.logged)
    metrics = {**group_metrics(groups), **scores, **rollout_batch.metrics}
    if config.rollout.group_size == 1:
        return {**metrics, "loss": 0.0}  # a completion without siblings has no advantage
    batch = prepare(run, groups, OldLogprobs.RECOMPUTED)
    objective = PolicyObjective.of(algorithm, config.rollout, run.state.coefficients)
    token_stats = run.learner.measure(batch, objective)
    return {
        **metrics,
        **token_metrics(token_stats, algorithm),
        "loss": sum(float(stats.loss) for stats in token_stats),
    }
