"""Stages that make examples for later ones: they sample completions and select the useful ones.

Nothing is trained here: the loop samples, scores and logs, and the examples are selected from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing

import numpy as np

from covey.config.schema import Config
from covey.objective.algorithms import PRESETS
from covey.objective.diagnostics import group_metrics, score_metrics
from covey.runs.atomic import write_file
from covey.runs.examples import (
    ExampleRow,
    as_jsonl,
    correct_examples,
    mostly_truncated,
    preference_pairs,
    sampled_groups,
)
from covey.system.text import percent
from covey.tasks.source import EXAMPLES_FILE
from covey.training.memory import memory_measured
from covey.training.metrics import as_text
from covey.training.run import Run
from covey.types import Problem
from covey_verify.errors import DataError


def sample_completions(run: Run) -> None:
    """Sample and score ``train.steps`` rounds of problems, and log every group."""
    config = run.resolved.config
    journal = run.journal
    # A preset that compares nothing and filters nothing.
    with closing(run.rollouts(algorithm=PRESETS["reinforce"])) as rollouts:
        for step in range(run.state.step, config.train.steps):
            run.begin_step()
            with journal.clock("rollout"):
                rollout_batch = next(rollouts)
            # The rollout log has a column for advantages; here there are none.
            no_advantages = [
                np.zeros(len(c.tokens)) for group in rollout_batch.groups for c in group.completions
            ]
            journal.log_completions(step + 1, rollout_batch, no_advantages)
            run.advance(step + 1, rollout_batch.position)
            groups = rollout_batch.all_groups
            metrics = {
                **group_metrics(groups),
                **score_metrics(groups, rollout_batch.scoring.logged),
                **rollout_batch.metrics,
            }
            journal.log(step + 1, metrics, memory_measured(run))
            facts = {
                "reward": as_text(metrics["reward/mean"], ".3f"),
                "correct": percent(metrics["accuracy"]),
            }
            journal.console.step(step + 1, metrics["reward/mean"], facts)
            if run.end_step(metrics):
                break


def write_examples(run: Run) -> list[ExampleRow]:
    """Write the examples that the method selects. Raises DataError if there are none."""
    config = run.resolved.config
    folder = run.journal.folder.path
    problems = {p.problem.id: p.problem for p in run.train_set}
    rows = SELECTIONS[config.method](run, problems)
    completions = config.train.steps * config.rollout.completions_per_step
    if not rows:
        why = mostly_truncated(sampled_groups(folder)) or _why_none(config)
        raise DataError(
            f"{folder}: none of {completions} sampled completions is kept: {why}. Earlier stages remain"
        )
    write_file(folder / EXAMPLES_FILE, as_jsonl(rows))
    run.journal.say(f"kept {len(rows)} examples from {completions} completions: {folder / EXAMPLES_FILE}")
    return rows


def _why_none(config: Config) -> str:
    if config.method == "pairs":
        return (
            f"no group has completions whose rewards differ by more than {config.keep.margin:g} "
            "(keep.margin). Sample more completions per problem (rollout.group_size), raise "
            "rollout.temperature, or train longer first"
        )
    return (
        "none is correct and passes keep.least. Train longer before this stage, sample more completions per "
        "problem (rollout.group_size), or lower keep.least"
    )


def _pairs(run: Run, problems: Mapping[str, Problem]) -> list[ExampleRow]:
    return preference_pairs(sampled_groups(run.journal.folder.path), run.resolved.config.keep, problems)


def _correct(run: Run, problems: Mapping[str, Problem]) -> list[ExampleRow]:
    groups = sampled_groups(run.journal.folder.path)
    return correct_examples(groups, run.rewards.verdict.name, run.resolved.config.keep, problems)


SELECTIONS: Mapping[str, Callable[[Run, Mapping[str, Problem]], list[ExampleRow]]] = {
    "pairs": _pairs,
    "rejection_sampling": _correct,
}
"""method -> the function that selects its examples from the sampled completions."""
