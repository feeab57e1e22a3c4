"""The report of a training step: its metrics, its notes, and its line on the console."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def step_metrics(
    step: int,
    rollout_batch: RolloutBatch,
    batch: Batch,
    outcome: StepUpdates,
    resolved: ResolvedConfig,
    coefficients: Coefficients,
) -> dict[str, float]:
    """Return everything that is logged of a step, by name; the config alone determines it."""
    algorithm = resolved.algorithm
    # Filtered groups count in the metrics of sampling, not in those of the gradient.
    groups = rollout_batch.all_groups
    advantages = by_completion(batch, batch.advantages)
    critic = batch.value_targets
    # NaN marks updates that were skipped.
    applied = [n for n in outcome.norms if np.isfinite(n)]
    metrics = {
        **group_metrics(groups),
        **score_metrics(groups, rollout_batch.scoring.logged),
        **group_signs(groups),
        **gradient_shares(rollout_batch.groups, np.array([np.abs(a).sum() for a in advantages])),
        **gradient_signs(rollout_batch.groups, advantages),
        **token_metrics(outcome.stats, algorithm),
        **(value_metrics(critic.values, critic.returns, batch.mask) if critic is not None else {}),
        **rollout_batch.metrics,
        "entropy/sampled": sampled_entropy(groups),
        "update/coverage": update_coverage(batch, groups, algorithm.skips_idle),
        "optimizer/grad_norm": float(np.mean(applied)) if applied else math.nan,
        "optimizer/updates": float(len(outcome.norms)),
        "optimizer/skipped": float(len(outcome.norms) - len(applied)),
        "optimizer/lr": learning_rate(step, resolved.config.train),
    }
    if outcome.value_norms:
        metrics["value/grad_norm"] = float(np.mean(outcome.value_norms))
    if algorithm.kl is not None:
        metrics["kl/coef"] = coefficients.kl
    if algorithm.entropy is not None:
        metrics["entropy/coef"] = coefficients.entropy
    return metrics


def report_step(
    journal: Journal,
    step: int,
    rollout_batch: RolloutBatch,
    batch: Batch,
    outcome: StepUpdates,
    metrics: Mapping[str, float],
    memory: Mapping[str, int],
    resolved: ResolvedConfig,
) -> None:
    """Log a step and show it on the console."""
    _note_off_centre(journal, resolved.algorithm, batch, rollout_batch.groups, step)
    tokens_of_step = token_record(outcome.stats, [len(tokens) for tokens in batch.tokens])
    journal.log_rollouts(step, rollout_batch, batch, tokens_of_step, resolved.config.train.inner_epochs)
    times = journal.log(step, metrics, memory)
    console = journal.console
    console.examples = extremes(rollout_batch.all_groups)
    console.step(step + 1, metrics["reward/mean"], console_facts(metrics, times), unhealthy_facts(metrics))


def _note_off_centre(
    journal: Journal, algorithm: Algorithm, batch: Batch, groups: Sequence[Group], step: int
) -> None:
    """Warn once in a run if the advantages of a user's own estimator do not sum to zero in a group."""
    # Whitening, or a KL in the reward, shifts the sum afterwards; the estimator is not to blame.
    shifted_later = algorithm.whiten is not None or (
        algorithm.kl is not None and algorithm.kl.place == "reward"
    )
    uncentred = (
        off_centre(batch, groups) if algorithm.advantage.written_by_user and not shifted_later else None
    )
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
    shown = [PanelCompletion(float(group.rewards[i]), group.completions[i].text) for i in (best, worst)]
    return last_text(group.problem.prompt), shown[0], shown[1]


UNHEALTHY: Mapping[str, tuple[str, float, float]] = {
    "dead groups": ("groups/dead", 0.5, 0.8),
    "truncated": ("length/truncated", 0.1, 0.5),
}
"""Fact -> its metric and the values above which it is yellow and red; docs/metrics.md gives the reasons."""
LOW_ENTROPY = 0.05


def unhealthy_facts(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the style of each fact that is not healthy."""
    facts = {
        fact: "red" if metrics[name] > bad else "yellow"
        for fact, (name, poor, bad) in UNHEALTHY.items()
        if metrics[name] > poor
    }
    return facts | ({"entropy": "yellow"} if metrics["entropy/sampled"] < LOW_ENTROPY else {})


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
