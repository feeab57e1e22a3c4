"""Stages that make examples for later ones: they sample from the model and keep the useful completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from covey.config.schema import Config
from covey.objective.algorithms import PRESETS
from covey.objective.diagnostics import group_metrics, score_metrics
from covey.runs.atomic import write_file
from covey.runs.harvest import ExampleRow, as_jsonl, kept_of, mostly_truncated, pairs_of, sampled_groups
from covey.tasks.source import EXAMPLES
from covey.training.metrics import as_text
from covey.training.run import Run
from covey.types import Problem
from covey_verify.errors import DataError


def train(run: Run) -> None:
    """Sample and score ``train.steps`` rounds of problems, every group kept and logged."""
    config = run.loaded.config
    journal = run.journal
    plain = PRESETS["reinforce"]  # compares nothing and filters nothing
    rollouts = run.rollouts(algorithm=plain)
    for step in range(run.state.step, config.train.steps):
        run.begin_step()
        with journal.clock("rollout"):
            rollout = next(rollouts)
        # The rollout log has advantages; here there are none.
        nothing = [np.zeros(len(c.tokens)) for g in rollout.groups for c in g.completions]
        journal.sampled(step, rollout, nothing)
        run.advance(step + 1, rollout.position)
        groups = rollout.all_groups
        metrics = {**group_metrics(groups), **score_metrics(groups, rollout.scoring.logged)}
        journal.log(step, {**metrics, **rollout.metrics})
        facts = {
            "reward": as_text(metrics["reward/mean"], ".3f"),
            "correct": f"{100 * metrics['accuracy']:.0f} %",
        }
        journal.console.step(step + 1, metrics["reward/mean"], facts)
        run.evaluate_and_save()


def write_examples(run: Run) -> list[ExampleRow]:
    """Write the examples that a collecting stage keeps. Raises DataError if there are none."""
    config = run.loaded.config
    folder = run.journal.folder.path
    problems = {p.problem.id: p.problem for p in run.train_set}
    rows = KEEPS[config.method](run, problems)
    completions = config.train.steps * config.rollout.prompts_per_step * config.rollout.group_size
    if not rows:
        why = mostly_truncated(sampled_groups(folder)) or _why(config)
        raise DataError(
            f"{folder}: none of {completions} sampled completions is kept: {why}. Earlier stages remain"
        )
    write_file(folder / EXAMPLES, as_jsonl(rows))
    run.journal.say(f"kept {len(rows)} examples from {completions} completions: {folder / EXAMPLES}")
    return rows


def _why(config: Config) -> str:
    if config.method == "pairs":
        return (
            f"no group has completions whose rewards differ by more than {config.keep.margin:g} "
            "(keep.margin). Sample more of each problem (rollout.group_size), hotter, or train more before"
        )
    return (
        "none is correct and passes keep.least. Train more before this stage, sample more of each problem "
        "(rollout.group_size), or ask for less"
    )


def _pairs(run: Run, problems: Mapping[str, Problem]) -> list[ExampleRow]:
    return pairs_of(sampled_groups(run.journal.folder.path), run.loaded.config.keep, problems)


def _correct(run: Run, problems: Mapping[str, Problem]) -> list[ExampleRow]:
    groups = sampled_groups(run.journal.folder.path)
    keep = run.loaded.config.keep
    return kept_of(groups, run.rewards.verdict.name, keep, problems)


KEEPS: Mapping[str, Callable[[Run, Mapping[str, Problem]], list[ExampleRow]]] = {
    "pairs": _pairs,
    "rejection_sampling": _correct,
}
"""method -> the function that selects its examples from the sampled completions."""
