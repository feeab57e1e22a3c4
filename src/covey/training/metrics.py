"""The report of a training step: its metrics, its notes, and its line on the console."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from covey.config.load import ResolvedConfig
from covey.learner.advantage import off_centre
from covey.learner.batching import Batch, by_completion
from covey.learner.schedule import learning_rate
from covey.objective.algorithms import Algorithm
from covey.objective.controllers import Coefficients
from covey.objective.diagnostics import (
    TokenStats,
    gradient_shares,
    group_metrics,
    sampled_entropy,
    score_metrics,
    token_metrics,
    token_record,
    value_metrics,
)
from covey.objective.signs import gradient_signs, group_signs
from covey.rollouts.batch import RolloutBatch
from covey.runs.journal import Journal
from covey.system.console import PanelCompletion
from covey.system.text import percent
from covey.types import Group
from covey_verify.extract import last_text

OFF_CENTRE = "advantages do not sum to zero"


@dataclass(frozen=True)
class StepUpdates:
    """The results of a training step's optimizer steps."""

    version_before: int
    """Optimizer steps before this step."""
    stats: Sequence[TokenStats]
    """Statistics of the policy's micro-batches."""
    norms: Sequence[float]
    """Norms of the policy's gradients."""
    value_norms: Sequence[float]
    """Norms of the gradients of a critic that is updated separately."""


class CompletedStep(NamedTuple):
    """A training step after its last update."""

    number: int
    """Counted from 1."""
    rollout_batch: RolloutBatch
    batch: Batch
    updates: StepUpdates


def step_metrics(
    step: CompletedStep, resolved: ResolvedConfig, coefficients: Coefficients
) -> dict[str, float]:
    """Return everything that is logged of a step, by name; the config alone determines it."""
    number, rollout_batch, batch, updates = step
    algorithm = resolved.algorithm
    # Filtered groups count in the metrics of sampling, not in those of the gradient.
    groups = rollout_batch.all_groups
    advantages = by_completion(batch, batch.advantages)
    critic = batch.value_targets
    # NaN marks updates that were skipped.
    applied_norms = [n for n in updates.norms if np.isfinite(n)]
    metrics = {
        **group_metrics(groups),
        **score_metrics(groups, rollout_batch.scoring.logged),
        **group_signs(groups),
        **gradient_shares(rollout_batch.groups, np.array([np.abs(a).sum() for a in advantages])),
        **gradient_signs(rollout_batch.groups, advantages),
        **token_metrics(updates.stats, algorithm),
        **(value_metrics(critic.values, critic.returns, batch.mask) if critic is not None else {}),
        **rollout_batch.metrics,
        "entropy/sampled": sampled_entropy(groups),
        "update/coverage": update_coverage(batch, groups, algorithm.skips_idle),
        "optimizer/grad_norm": float(np.mean(applied_norms)) if applied_norms else math.nan,
        "optimizer/updates": float(len(updates.norms)),
        "optimizer/skipped": float(len(updates.norms) - len(applied_norms)),
        "optimizer/lr": learning_rate(number - 1, resolved.config.train),
    }
    if updates.value_norms:
        metrics["value/grad_norm"] = float(np.mean(updates.value_norms))
    if algorithm.kl is not None:
        metrics["kl/coef"] = coefficients.kl
    if algorithm.entropy is not None:
        metrics["entropy/coef"] = coefficients.entropy
    return metrics


def report_step(
    journal: Journal,
    step: CompletedStep,
    metrics: Mapping[str, float],
    memory: Mapping[str, int],
    resolved: ResolvedConfig,
) -> None:
    """Log a step and show it on the console; ``memory``: bytes by component."""
    number, rollout_batch, batch, updates = step
    _note_off_centre(journal, resolved.algorithm, batch, rollout_batch.groups, number)
    token_values = token_record(updates.stats, [len(tokens) for tokens in batch.tokens])
    journal.log_rollouts(number, rollout_batch, batch, token_values, resolved.config.train.inner_epochs)
    times = journal.log(number, metrics, memory)
    console = journal.console
    console.examples = extremes(rollout_batch.all_groups)
    console.step(number, metrics["reward/mean"], console_facts(metrics, times), unhealthy_facts(metrics))


def _note_off_centre(
    journal: Journal, algorithm: Algorithm, batch: Batch, groups: Sequence[Group], step: int
) -> None:
    """Warn once in a run if the advantages of a user's own estimator do not sum to zero in a group."""
    # Whitening, or a KL in the reward, shifts the sum afterwards; the estimator is not to blame.
    shifts_later = algorithm.whiten is not None or (
        algorithm.kl is not None and algorithm.kl.place == "reward"
    )
    if shifts_later or not algorithm.advantage.written_by_user:
        return
    uncentred = off_centre(batch, groups)
    if uncentred is None or journal.has_event(OFF_CENTRE):
        return
    group, total = uncentred
    journal.say(
        f"algorithm.advantage {algorithm.advantage.name}: the advantages of a group do not sum to 0 (problem "
        f"{group.problem.id}: {total:.3g}). Without a baseline every completion of a group is reinforced. "
        "Ignore this if it is intended",
        "yellow",
    )
    journal.log_event(step, OFF_CENTRE, problem=group.problem.id, sum=total)


def update_coverage(batch: Batch, groups: Sequence[Group], skips_idle: bool) -> float:
    """Return the fraction of sampled tokens that went through the update, and so into its metrics."""
    tokens = sum(c.length for g in groups for c in g.completions)
    return float((batch.mask & batch.has_gradient(skips_idle)[:, None]).sum()) / max(tokens, 1)


def extremes(groups: Sequence[Group]) -> tuple[str, PanelCompletion, PanelCompletion] | None:
    """Return prompt, best and worst completion of the group whose rewards differ the most."""
    scored = [g for g in groups if g.scorable.any()]
    if not scored:
        return None
    group = max(scored, key=lambda g: float(np.nanmax(g.rewards) - np.nanmin(g.rewards)))
    best = int(np.nanargmax(group.rewards))
    worst = int(np.nanargmin(group.rewards))
    panels = [PanelCompletion(float(group.rewards[i]), group.completions[i].text) for i in (best, worst)]
    return last_text(group.problem.prompt), panels[0], panels[1]


UNHEALTHY: Mapping[str, tuple[str, float, float]] = {
    "dead groups": ("groups/dead", 0.5, 0.8),
    "truncated": ("length/truncated", 0.1, 0.5),
}
"""Fact -> its metric and the values above which it is yellow and red; docs/metrics.md gives the reasons."""
MIN_HEALTHY_ENTROPY = 0.05


def unhealthy_facts(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the style of each fact that is not healthy."""
    facts = {
        fact: "red" if metrics[name] > bad else "yellow"
        for fact, (name, poor, bad) in UNHEALTHY.items()
        if metrics[name] > poor
    }
    return facts | ({"entropy": "yellow"} if metrics["entropy/sampled"] < MIN_HEALTHY_ENTROPY else {})


def console_facts(metrics: Mapping[str, float], times: Mapping[str, float]) -> dict[str, str]:
    """Return the facts that the console shows of a step."""
    return {
        "reward": as_text(metrics["reward/mean"], ".3f"),
        "correct": percent(metrics["accuracy"]),
        "dead groups": percent(metrics["groups/dead"]),
        "truncated": percent(metrics["length/truncated"]),
        "entropy": as_text(metrics["entropy/sampled"], ".2f"),
        "tokens/s": f"{times.get('tokens_per_second/rollout', 0.0):,.0f}",
    }


def as_text(value: float, form: str) -> str:
    """Format a number for the console; "none" for NaN, the mean of nothing."""
    return "none" if math.isnan(value) else format(value, form)
