"""The loss and the metrics of rows under a model's present weights, without an update and without a run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from covey.config.load import ResolvedConfig
from covey.config.methods import METHODS
from covey.learner.objectives import PolicyObjective
from covey.learner.old_logprobs import OldLogprobs
from covey.objective.diagnostics import group_metrics, score_metrics, token_metrics
from covey.rollouts.batch import Position
from covey.rollouts.loop import Rollouts
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.examples_loop import sum_of_parts
from covey.training.pipeline import LESSONS
from covey.training.rl import prepare
from covey.training.run import Run
from covey.training.setup import set_up


def measure(loaded: ResolvedConfig, step: int = 0) -> dict[str, float]:
    """Return the metrics of a config's training rows, all of them at once, as of a training step.

    A method that samples draws a group for every row; the draws follow from ``step``. Raises CoveyError.
    """
    with ExitStack() as around:
        folder = Path(around.enter_context(TemporaryDirectory()))
        config = loaded.config.model_copy(update={"output": folder / "run"})
        run = set_up(replace(loaded, config=config), RunConsole(quiet=True), StopSignal())
        around.callback(run.journal.close)
        return _of_groups(run, step) if config.method == "rl" else _of_examples(run)


def _of_examples(run: Run) -> dict[str, float]:
    loop = METHODS[run.loaded.config.method].loop
    assert loop is not None, "the method learns"
    lesson = LESSONS[loop](run)
    return sum_of_parts(run.learner.measure(*lesson(range(len(run.train_set)))))


def _of_groups(run: Run, step: int) -> dict[str, float]:
    config = run.loaded.config
    algorithm = run.loaded.algorithm
    rollout_settings = config.rollout.model_copy(update={"prompts_per_step": len(run.train_set)})
    parts = (run.train_set, run.sampler, run.rewards, rollout_settings, algorithm, config.seed)
    rollout = next(Rollouts(*parts).after(step, Position(), run.on_sample))
    groups = rollout.all_groups
    found = {**group_metrics(groups), **score_metrics(groups, rollout.scoring.logged), **rollout.metrics}
    if config.rollout.group_size == 1:
        return {**found, "loss": 0.0}  # a completion without siblings has no advantage
    now = run.state.coefficients
    batch = prepare(groups, run.loaded, OldLogprobs.RECOMPUTED, now, run.learner, critic=None)
    objective = PolicyObjective(algorithm, config.rollout.temperature, config.rollout.max_tokens, now)
    seen = run.learner.measure(batch, objective)
    return {**found, **token_metrics(seen, algorithm), "loss": sum(float(stats.loss) for stats in seen)}
