"""Diagnostics: metrics of a step's tokens and groups, computed outside the loss, without gradient.

``token_stats`` reads a micro-batch, ``token_metrics`` sums up a step, ``group_metrics`` reads
the scored groups. Log-probs, entropy and KL are in nats. docs/metrics.md
says what each metric means.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from covey.objective.algorithms import Algorithm
from covey.objective.axis_function import differentiating
from covey.objective.loss import token_terms, user_functions_in_loss
from covey.objective.signs import known_mean, mixes_scripts
from covey.objective.texts import answers_inside, text_metrics
from covey.types import Group

if TYPE_CHECKING:
    from torch import Tensor

    from covey.objective.data import LossInputs
    from covey.objective.loss import Loss

PASS_RATE_BUCKETS = 4


@dataclass(frozen=True)
class TokenStats:
    """Statistics of a micro-batch's update, on the CPU; values by token are (N, L), valid on the mask."""

    loss: Tensor
    """(), like the next two: the micro-batch's part of the step's loss."""
    policy_loss: Tensor
    kl_loss: Tensor
    mask: Tensor
    """bool: the trained tokens."""
    ratio: Tensor
    advantage: Tensor
    coefficient: Tensor
    """See ``gradient_coefficient``."""
    correction: Tensor | None
    """The product of the importance corrections, where the algorithm has any."""
    entropy: Tensor | None
    mismatch: Tensor | None
    """Log-prob of the trainer minus log-prob of the sampler."""
    ref_log_ratio: Tensor | None
    weight: Tensor
    """(N,): the factor of each completion's tokens in the reduction."""
    origin: Tensor | None = None
    """(N,) int64: numbers of these completions in the rollout batch."""


def gradient_coefficient(algorithm: Algorithm, inputs: LossInputs) -> Tensor:
    """-d(policy loss) / d(log pi) of each token, before the reduction. (N, T).

    On-policy this is the advantage; it is 0 where the clip rule, a mask or a token weight stops the gradient.
    """
    logprobs = inputs.logprobs.detach().requires_grad_()
    with torch.enable_grad():
        value = token_terms(algorithm, replace(inputs, logprobs=logprobs)).value
        with differentiating(user_functions_in_loss(algorithm)):
            return -torch.autograd.grad(value.sum(), logprobs)[0]


@torch.no_grad()
def token_stats(algorithm: Algorithm, inputs: LossInputs, loss: Loss) -> TokenStats:
    """Return the statistics of a micro-batch's update."""

    def host(values: Tensor) -> Tensor:
        return values.detach().float().cpu()

    return TokenStats(
        loss=host(loss.total),
        policy_loss=host(loss.policy),
        kl_loss=host(loss.kl),
        mask=inputs.mask.cpu(),
        ratio=host(loss.tokens.ratio),
        advantage=host(inputs.advantages),
        coefficient=host(gradient_coefficient(algorithm, inputs)),
        correction=None if loss.tokens.correction is None else host(loss.tokens.correction),
        entropy=None if inputs.entropy is None else host(inputs.entropy),
        mismatch=None if inputs.sampler_logprobs is None else host(inputs.mismatch),
        ref_log_ratio=None if inputs.ref_logprobs is None else host(inputs.ref_log_ratio),
        weight=host(loss.weight),
    )


def token_record(stats: Sequence[TokenStats], lengths: Sequence[int]) -> dict[str, np.ndarray]:
    """Return statistics of a step's tokens, one completion after another, NaN where no update read one.

    ``applied`` sums up -d(policy loss) / d(log pi) over the updates, the reduction's weight included;
    ``ratios``, ``entropies`` and ``ref_log_ratios`` hold the last update's values.
    """
    # Completion i is flat[ends[i] - lengths[i] : ends[i]].
    ends = np.cumsum(lengths, dtype=np.int64)
    arrays: dict[str, np.ndarray] = {}
    for s in stats:
        assert s.origin is not None, "completions are numbered when the rollout batch is collated"
        trained = s.mask.numpy()
        starts = (ends - lengths)[s.origin.numpy()]
        # Flat places of the trained tokens, in the order in which boolean indexing lists them.
        places = (starts[:, None] + np.arange(trained.shape[1]))[trained]
        values = {"ratios": s.ratio, "entropies": s.entropy, "ref_log_ratios": s.ref_log_ratio}
        values["applied"] = s.coefficient * s.weight[:, None]
        for name, rows in values.items():
            if rows is None:
                continue
            flat = arrays.setdefault(name, np.full(ends[-1], np.nan, np.float32))
            # ``applied`` adds up over the updates; the others overwrite.
            before = np.nan_to_num(flat[places]) if name == "applied" else 0.0
            flat[places] = before + rows.numpy()[trained]
    return arrays


def token_metrics(stats: Sequence[TokenStats], algorithm: Algorithm) -> dict[str, float]:
    """Return loss, ratio, clipping, KL, entropy and mismatch metrics over a training step's micro-batches."""
    if not stats:
        return {}

    def trained_values(name: str) -> Tensor:
        """Return the values of all trained tokens; none if the algorithm has no such values."""
        parts = [NONE]
        for s in stats:
            values = getattr(s, name)
            if values is not None:
                parts.append(values[s.mask])
        return torch.cat(parts)

    # Micro-batch losses are parts of the step's loss, so they are summed, not averaged.
    parts = ("loss", "policy_loss", "kl_loss")
    metrics = {name: float(torch.stack([getattr(s, name) for s in stats]).sum()) for name in parts}
    ratio = trained_values("ratio")
    if not len(ratio):
        return metrics
    entropy = trained_values("entropy")
    metrics |= _ratio_metrics(ratio)
    metrics |= _clip_metrics(ratio, trained_values("advantage"), trained_values("coefficient"), algorithm)
    metrics |= _correction_metrics(trained_values("correction"), trained_values("mismatch"))
    metrics["entropy"] = float(entropy.mean()) if len(entropy) else math.nan
    return metrics | _reference_metrics(trained_values("ref_log_ratio"), stats)


NONE = torch.zeros(0)


def _ratio_metrics(ratio: Tensor) -> dict[str, float]:
    # E[rho]^2 / E[rho^2]: the effective fraction of the sample (Kish), 1 on-policy.
    squares = ratio.double().square().mean()
    effective = float(ratio.double().mean().square() / squares) if squares else 0.0
    levels = {"q01": 0.01, "q50": 0.5, "q99": 0.99}
    quantiles = {f"ratio/{name}": float(np.quantile(ratio.numpy(), level)) for name, level in levels.items()}
    return {"ratio/mean": float(ratio.mean()), "ratio/effective_sample": effective, **quantiles}


def _clip_metrics(
    ratio: Tensor, advantage: Tensor, coefficient: Tensor, algorithm: Algorithm
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    settings = algorithm.surrogate.all_settings
    if "clip_low" in settings:
        # A token is clipped only where the ratio has moved in the direction that its advantage favours.
        low = ratio < 1 - settings["clip_low"]
        high = ratio > 1 + settings["clip_high"]
        metrics["clip/low"] = float((low & (advantage < 0)).float().mean())
        metrics["clip/high"] = float((high & (advantage > 0)).float().mean())
    metrics["clip/zero_gradient"] = float(((coefficient == 0) & (advantage != 0)).float().mean())
    return metrics


def _correction_metrics(correction: Tensor, mismatch: Tensor) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if len(correction):
        metrics["correction/mean"] = float(correction.mean())
        metrics["correction/zero"] = float((correction == 0).float().mean())
    if len(mismatch):
        metrics["mismatch/mean"] = float(mismatch.abs().mean())
        metrics["mismatch/max"] = float(mismatch.abs().max())
    return metrics


def _reference_metrics(log_ratio: Tensor, stats: Sequence[TokenStats]) -> dict[str, float]:
    if not len(log_ratio):
        return {}
    # Off the mask the log-ratio is 0, so this sums the trained tokens of each completion.
    by_completion = [s.ref_log_ratio.sum(-1) for s in stats if s.ref_log_ratio is not None]
    return {
        "kl/token_k1": float(log_ratio.mean()),
        "kl/token_k3": float(((-log_ratio).expm1() + log_ratio).mean()),
        "kl/completion_k1": float(torch.cat(by_completion).mean()),
    }


def value_metrics(values: Tensor | None, returns: Tensor | None, mask: Tensor) -> dict[str, float]:
    """Measure how well a critic's values predict the return, overall and by quarter of a completion.

    The explained variance is 1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for any constant, below 0 for
    a critic that is worse than a constant. (N, T) each.
    """
    if values is None or returns is None or not mask.any():
        return {}
    # 0 to 3, by the token's rank among the trained tokens of its completion.
    quarter = (4 * (mask.cumsum(-1) - 1) / mask.sum(-1, keepdim=True).clamp(min=1)).long()
    metrics = {"value/mean": float(values[mask].double().mean())}
    # The whole completion first, under the plain name, then its quarters.
    quarters = {f"/quarter_{q + 1}": mask & (quarter == q) for q in range(4)}
    for name, where in {"": mask, **quarters}.items():
        predicted = values[where].double()
        due = returns[where].double()
        if len(due) > 1:
            spread = float(due.var(correction=0))
            metrics[f"value/error{name}"] = float((due - predicted).square().mean().sqrt())
            if spread > 0:
                metrics[f"value/explained_variance{name}"] = (
                    1 - float((due - predicted).var(correction=0)) / spread
                )
    return metrics


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of the rewards, dead groups, lengths, truncation and texts of a step's groups."""
    correct = np.concatenate([g.correct for g in groups])
    texts = [c.text for g in groups for c in g.completions]
    # By group, because completions of one problem are not independent.
    mixed = [np.array([mixes_scripts(c.text) for c in g.completions], float) for g in groups]
    return {
        **_spread("reward", [g.rewards for g in groups]),
        "reward/unscored": float(np.isnan(np.concatenate([g.rewards for g in groups])).mean()),
        **_dead_groups(groups),
        "accuracy": float(correct.mean()),
        "accuracy/stderr": standard_error([g.correct.astype(float) for g in groups]),
        **_lengths(groups, correct),
        **_components(groups),
        **step_spread(groups),
        **answers_inside(groups),
        **text_metrics(texts, correct),
        "text/mixed_scripts/stderr": standard_error(mixed),
    }


def _spread(name: str, by_group: Sequence[np.ndarray]) -> dict[str, float]:
    """Return mean, standard deviation and standard error of values, (n,) for each group."""
    values = np.concatenate(by_group)
    return {
        f"{name}/mean": known_mean(values),
        f"{name}/std": _std(values),
        f"{name}/stderr": standard_error(by_group),
    }


def _dead_groups(groups: Sequence[Group]) -> dict[str, float]:
    dead = [g for g in groups if g.dead]
    # The three kinds of dead group: all correct, judged but none correct, not judged at all.
    all_correct = sum(bool(g.correct.all()) for g in dead)
    none_correct = sum(bool(g.scorable.any()) and not g.correct.any() for g in dead)
    unscored = sum(not g.scorable.any() for g in dead)
    return {
        "groups/count": float(len(groups)),
        "groups/dead": len(dead) / len(groups),
        "groups/dead_correct": all_correct / len(groups),
        "groups/dead_incorrect": none_correct / len(groups),
        "groups/dead_unscored": unscored / len(groups),
        "groups/effective_completions": float(sum(len(g.completions) for g in groups if not g.dead)),
    }


def _lengths(groups: Sequence[Group], correct: np.ndarray) -> dict[str, float]:
    lengths = np.array([c.length for g in groups for c in g.completions])
    truncated = np.array([c.finish == "length" for g in groups for c in g.completions])
    return {
        "length/mean": float(lengths.mean()),
        "length/correct": known_mean(lengths[correct]),
        "length/incorrect": known_mean(lengths[~correct]),
        "length/truncated": float(truncated.mean()),
    }


def _components(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of each reward function, and how its values agree with the verdict's and others'."""
    metrics: dict[str, float] = {}
    values: dict[str, np.ndarray] = {}
    components = groups[0].components
    for name, first in components.items():
        by_group = [g.components[name].values for g in groups]
        values[name] = np.concatenate(by_group)
        metrics |= _spread(f"reward/{name}", by_group)
        agree = verdict_agreement(groups, name)
        # A single reward, and the verdict itself, would only be compared with themselves.
        if len(components) > 1 and not first.verdict and not math.isnan(agree):
            metrics[f"reward/{name}/agreement"] = agree
    return metrics | correlations(values)


def step_spread(groups: Sequence[Group]) -> dict[str, float]:
    """Measure how evenly completions are split into judged reasoning steps; empty without steps.

    The longest step's fraction of a completion is 1 where it was not split at all.
    """
    counts = []
    sizes = []
    longest = []
    components = [component for group in groups for component in group.components.values()]
    judged = [steps for component in components for steps in component.steps if steps.ends]
    for steps in judged:  # of one completion under one function
        # Ends are the last tokens of steps, so the first step starts after -1.
        lengths = np.diff(steps.ends, prepend=-1)
        counts.append(len(lengths))
        sizes.extend(lengths.tolist())
        longest.append(lengths.max() / lengths.sum())
    if not counts:
        return {}
    return {
        "steps/count": float(np.mean(counts)),
        "steps/tokens": float(np.mean(sizes)),
        "steps/longest": float(np.mean(longest)),
        "steps/unsplit": float(np.mean(np.array(counts) == 1)),
    }


def verdict_agreement(groups: Sequence[Group], name: str) -> float:
    """Return the fraction of pairs (correct, incorrect) of a problem that a reward ranks in this order.

    Ties count half; NaN where there are no such pairs. At 0.5 the reward is unrelated to the verdict.
    """
    ranked = list[np.ndarray]()
    for group in groups:
        values = group.components[name].values
        scored = ~np.isnan(values)
        of_correct = values[scored & group.correct]
        of_incorrect = values[scored & ~group.correct]
        # (correct, incorrect): every pair of the group.
        difference = of_correct[:, None] - of_incorrect[None, :]
        ranked.append(((difference > 0) + 0.5 * (difference == 0)).ravel())
    every = np.concatenate(ranked)
    return float(every.mean()) if len(every) else math.nan


def score_metrics(groups: Sequence[Group], logged: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return fractions of each reward's statuses other than `ok`, means of its metrics and of users' logs."""
    metrics: dict[str, float] = {}
    for name in groups[0].components:
        scores = [score for group in groups for score in group.components[name].scores]
        statuses = Counter(s.status for s in scores if s.status != "ok")
        metrics |= {f"reward/{name}/{status}": n / len(scores) for status, n in sorted(statuses.items())}
        for metric in sorted({m for s in scores for m in s.metrics}):
            values = [s.metrics[metric] for s in scores if metric in s.metrics]
            metrics[f"reward/{name}/{metric}"] = float(np.mean(values))
    return metrics | {f"user/{name}": float(np.mean(v)) for name, v in sorted(logged.items()) if v}


def sampled_entropy(groups: Sequence[Group]) -> float:
    """Return the mean of -log p over all sampled tokens: an unbiased estimate of the sampling entropy.

    It needs no forward pass, so completions without advantage count too. NaN where none was sampled.
    """
    logprobs = np.concatenate([c.logprobs[c.drawn_mask] for g in groups for c in g.completions])
    # 0.0 - x and not -x, which would be -0.0 for a deterministic sampler.
    return 0.0 - float(logprobs.mean(dtype=np.float64)) if len(logprobs) else math.nan


def correlations(components: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return Pearson's r of every two rewards over the completions that both scored, if both vary.

    Near 1 two rewards measure the same and their weights add up; below 0 one is earned at the other's cost.
    """
    correlations = {}
    for (a, x), (b, y) in combinations(sorted(components.items()), 2):
        both = ~(np.isnan(x) | np.isnan(y))
        if both.any() and np.ptp(x[both]) > 0 and np.ptp(y[both]) > 0:
            correlations[f"reward/correlation/{a}/{b}"] = float(np.corrcoef(x[both], y[both])[0, 1])
    return correlations


def gradient_shares(groups: Sequence[Group], mass: np.ndarray) -> dict[str, float]:
    """Return the fractions of ``mass`` in groups of each range of pass rates; they sum to 1.

    ``mass`` (N,) is the summed absolute advantage of each completion's tokens.
    """
    if not mass.sum() > 0:
        return {}
    rates = np.concatenate([np.full(len(g.completions), g.pass_rate) for g in groups])
    # A pass rate of 1 belongs to the last bucket.
    bucket = np.minimum((rates * PASS_RATE_BUCKETS).astype(int), PASS_RATE_BUCKETS - 1)
    shares = np.bincount(bucket, weights=mass, minlength=PASS_RATE_BUCKETS) / mass.sum()
    bounds = [b / PASS_RATE_BUCKETS for b in range(PASS_RATE_BUCKETS + 1)]
    names = [f"gradient_share/pass_rate_{a:.2f}_{b:.2f}" for a, b in pairwise(bounds)]
    return dict(zip(names, shares.tolist(), strict=True))


def standard_error(by_group: Sequence[np.ndarray]) -> float:
    """Return the standard error of the mean over all completions, clustered by problem.

    ``by_group`` holds (n,) values for each group, NaN where unknown. NaN for fewer than two groups.
    """
    groups = [values[~np.isnan(values)] for values in by_group]
    groups = [values for values in groups if len(values)]
    count = len(groups)
    if count < 2:
        return math.nan
    every = np.concatenate(groups)
    # Cluster-robust: residuals are summed within a group and squared between groups.
    residuals = np.array([float((values - every.mean()).sum()) for values in groups])
    return float(np.sqrt(count / (count - 1) * (residuals**2).sum())) / len(every)


def _std(values: np.ndarray) -> float:
    return float(np.nanstd(values)) if np.isfinite(values).any() else math.nan
