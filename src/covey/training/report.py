"""What a training step leaves behind: metrics, times, the rollout log, a line on the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from covey.batching import Batch
from covey.objective.diagnostics import Observation, gradient_shares, group_metrics, token_metrics
from covey.rewards.canaries import verdict_metrics
from covey.rollout import RolloutBatch
from covey.training.optimizer import learning_rate
from covey.training.run import Run


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
        "optimizer/grad_norm": float(np.mean(applied)) if applied else 0.0,
        "optimizer/updates": float(len(norms)),
        "optimizer/skipped": float(len(norms) - len(applied)),
        "optimizer/lr": learning_rate(step, run.loaded.config.train),
    }
    if run.algorithm.kl is not None:
        metrics["kl/coef"] = run.state.kl_coef
    if run.algorithm.entropy is not None:
        metrics["entropy/coef"] = run.state.entropy_coef
    run.folder.write_rollouts(step, sampled.groups, advantages, sampled.rejected)
    run.clock.add("reward", sampled.reward_seconds)
    run.clock.count("rollout", sum(len(c.tokens) for g in groups for c in g.completions))
    run.clock.count("update", int(batch.mask.sum()) * run.loaded.config.train.inner_epochs)
    times = run.log(step, metrics)
    run.console.step(step + 1, metrics["reward/mean"], facts(metrics, times))
    return metrics


def facts(metrics: Mapping[str, float], times: Mapping[str, float]) -> dict[str, str]:
    """What the console shows of a step."""
    return {
        "reward": f"{metrics['reward/mean']:.3f}",
        "right": f"{100 * metrics['accuracy']:.0f} %",
        "dead groups": f"{100 * metrics['groups/dead']:.0f} %",
        "cut": f"{100 * metrics['length/truncated']:.0f} %",
        "entropy": f"{metrics.get('entropy', float('nan')):.2f}",
        "tokens/s": f"{times.get('tokens_per_second/rollout', 0.0):,.0f}",
    }
