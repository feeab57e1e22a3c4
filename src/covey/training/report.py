"""What a training step leaves behind: metrics, times, the rollout log, a line on the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from covey.batching import Batch, off_centre
from covey.objective.diagnostics import (
    Observation,
    gradient_shares,
    group_metrics,
    sampled_entropy,
    token_metrics,
)
from covey.rewards.canaries import verdict_metrics
from covey.rollout import RolloutBatch
from covey.training.optimizer import learning_rate
from covey.training.run import Run
from covey.types import Group

OFF_CENTRE = "advantages do not sum to zero"


def report_step(
    run: Run,
    step: int,
    sampled: RolloutBatch,
    batch: Batch,
    observed: Sequence[Observation],
    norms: Sequence[float],
) -> dict[str, float]:
    """Log a step everywhere; returns its metrics."""
    groups = [*sampled.groups, *sampled.rejected]
    advantages = [row[: len(t)].numpy() for row, t in zip(batch.advantages, batch.tokens, strict=True)]
    applied = [n for n in norms if np.isfinite(n)]
    metrics = {
        **group_metrics(groups),
        **verdict_metrics(groups, run.rewards.take_logged()),
        **gradient_shares(sampled.groups, np.array([np.abs(a).sum() for a in advantages])),
        **token_metrics(observed, run.algorithm),
        **sampled.metrics,
        "entropy/sampled": sampled_entropy(groups),
        "update/coverage": covered(batch, groups, run.algorithm.skips_idle),
        "optimizer/grad_norm": float(np.mean(applied)) if applied else 0.0,
        "optimizer/updates": float(len(norms)),
        "optimizer/skipped": float(len(norms) - len(applied)),
        "optimizer/lr": learning_rate(step, run.loaded.config.train),
    }
    if run.algorithm.kl is not None:
        metrics["kl/coef"] = run.state.kl_coef
    if run.algorithm.entropy is not None:
        metrics["entropy/coef"] = run.state.entropy_coef
    note_off_centre(run, batch, sampled.groups, step)
    run.folder.write_rollouts(step, sampled.groups, advantages, sampled.rejected)
    run.clock.add("reward", sampled.reward_seconds)
    run.clock.count("rollout", sum(len(c.tokens) for g in groups for c in g.completions))
    run.clock.count("update", int(batch.mask.sum()) * run.loaded.config.train.inner_epochs)
    times = run.log(step, metrics)
    run.console.step(step + 1, metrics["reward/mean"], facts(metrics, times))
    return metrics


def note_off_centre(run: Run, batch: Batch, groups: Sequence[Group], step: int) -> None:
    """Say once in a run that a user's own estimator gives a group advantages that do not sum to zero."""
    algorithm = run.algorithm
    later = algorithm.whiten is not None or (algorithm.kl is not None and algorithm.kl.place == "reward")
    found = off_centre(batch, groups) if algorithm.advantage.own and not later else None
    if found is None or any(e["event"] == OFF_CENTRE for e in run.folder.read("events.jsonl")):
        return
    group, total = found
    run.console.say(
        f"algorithm.advantage {algorithm.advantage.name}: the advantages of a group do not sum to 0 "
        f"(problem {group.problem.id}: {total:.3g}). Without a baseline of the group every answer is pushed "
        "the same way; if that is meant, nothing is wrong",
        "yellow",
    )
    run.event(step, OFF_CENTRE, problem=group.problem.id, sum=total)


def covered(batch: Batch, groups: Sequence[Group], skips_idle: bool) -> float:
    """Share of the sampled tokens that went through the update, and so into its metrics."""
    busy = batch.advantages.any(-1) if skips_idle else batch.mask.any(-1)
    tokens = sum(len(c.tokens) for g in groups for c in g.completions)
    return float((batch.mask & busy[:, None]).sum()) / max(tokens, 1)


def facts(metrics: Mapping[str, float], times: Mapping[str, float]) -> dict[str, str]:
    """What the console shows of a step."""
    return {
        "reward": f"{metrics['reward/mean']:.3f}",
        "right": f"{100 * metrics['accuracy']:.0f} %",
        "dead groups": f"{100 * metrics['groups/dead']:.0f} %",
        "cut": f"{100 * metrics['length/truncated']:.0f} %",
        "entropy": f"{metrics['entropy/sampled']:.2f}",
        "tokens/s": f"{times.get('tokens_per_second/rollout', 0.0):,.0f}",
    }
