"""What a step looked like, in numbers: computed beside the loss, never in it, without gradient.

``observe`` reads the terms of a micro-batch, ``token_metrics`` sums up a step's observations,
``group_metrics`` reads the scored groups. Log-probs, entropy and KL are in nats. docs/metrics.md
says what each metric means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from covey.objective.algorithms import Algorithm
from covey.objective.loss import policy_values
from covey.types import Group

if TYPE_CHECKING:
    from torch import Tensor

    from covey.objective.loss import Loss, Terms

Observation = Mapping[str, "Tensor"]
REFLECTION = {
    "doubt": re.compile(r"\b(?:wait|hmm+|hold on)\b", re.IGNORECASE),
    "check": re.compile(r"\b(?:let me (?:check|verify|re)|double-check)", re.IGNORECASE),
    "alternative": re.compile(r"\b(?:alternatively|another way|on second thought)\b", re.IGNORECASE),
    "correction": re.compile(r"\b(?:actually|i made a mistake|that's wrong)\b", re.IGNORECASE),
}
PASS_RATE_BUCKETS = 4


def push(algorithm: Algorithm, terms: Terms) -> Tensor:
    """-d(policy loss) / d(log pi) of each token before the reduction: how hard it is pushed. (N, T).

    On-policy this is the advantage; 0 where the clip rule, a mask or a multiplier silences it.
    """
    logprobs = terms.logprobs.detach().requires_grad_()
    with torch.enable_grad():
        free = replace(terms, logprobs=logprobs)
        values = policy_values(algorithm, replace(free, ratio=algorithm.ratio(free)))
        return -torch.autograd.grad(values.sum(), logprobs)[0]


@torch.no_grad()
def observe(algorithm: Algorithm, terms: Terms, loss: Loss) -> Observation:
    """The trained tokens' values, flat on the CPU, and the loss parts of one micro-batch."""
    keep = terms.mask
    values = {
        "ratio": algorithm.ratio(terms)[keep],
        "advantage": terms.advantages[keep],
        "push": push(algorithm, terms)[keep],
        "weight": algorithm.weight(terms)[keep] if algorithm.weight else None,
        "entropy": terms.entropy[keep] if terms.entropy is not None else None,
        "gap": terms.gap[keep] if terms.sampler_logprobs is not None else None,
        "kl": terms.difference[keep] if terms.ref_logprobs is not None else None,
        "kl_completion": terms.difference.sum(-1) if terms.ref_logprobs is not None else None,
        "loss": loss.total[None],
        "policy_loss": loss.policy[None],
        "kl_loss": loss.kl[None],
    }
    return {name: v.detach().float().cpu() for name, v in values.items() if v is not None}


def token_metrics(observations: Sequence[Observation], algorithm: Algorithm) -> dict[str, float]:
    """Loss, ratio, clipping, KL, entropy and the sampler's disagreement over a training step."""
    if not observations:
        return {}
    every = {name: torch.cat([o[name] for o in observations]) for name in observations[0]}
    ratio, advantage = every["ratio"], every["advantage"]
    metrics = {name: float(every[name].sum()) for name in ("loss", "policy_loss", "kl_loss")}
    if not len(ratio):
        return metrics
    metrics["ratio/mean"] = float(ratio.mean())
    for name, share in (("q01", 0.01), ("q50", 0.5), ("q99", 0.99)):
        metrics[f"ratio/{name}"] = float(np.quantile(ratio.numpy(), share))
    settings = algorithm.surrogate.all_settings
    if "clip_low" in settings:
        low, high = ratio < 1 - settings["clip_low"], ratio > 1 + settings["clip_high"]
        metrics["clip/low"] = float((low & (advantage < 0)).float().mean())
        metrics["clip/high"] = float((high & (advantage > 0)).float().mean())
    metrics["clip/silent"] = float(((every["push"] == 0) & (advantage != 0)).float().mean())
    if "weight" in every:
        metrics["weight/mean"] = float(every["weight"].mean())
        metrics["weight/zero"] = float((every["weight"] == 0).float().mean())
    metrics["entropy"] = float(every["entropy"].mean()) if "entropy" in every else float("nan")
    if "gap" in every:
        metrics["sampler_gap/mean"] = float(every["gap"].abs().mean())
        metrics["sampler_gap/max"] = float(every["gap"].abs().max())
    if "kl" in every:
        metrics["kl/token_k1"] = float(every["kl"].mean())
        metrics["kl/token_k3"] = float(((-every["kl"]).expm1() + every["kl"]).mean())
        metrics["kl/completion_k1"] = float(every["kl_completion"].mean())
    return metrics


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, dead groups, lengths, truncation and texts of a step's groups."""
    rewards = np.concatenate([g.rewards for g in groups])
    right = np.concatenate([g.correct for g in groups])
    lengths = np.array([len(c.tokens) for g in groups for c in g.completions])
    cut = np.array([c.finish == "length" for g in groups for c in g.completions])
    dead = [g for g in groups if g.dead]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/unscorable": float(np.isnan(rewards).mean()),
        "groups/count": float(len(groups)),
        "groups/dead": len(dead) / len(groups),
        "groups/dead_right": sum(bool(g.correct.all()) for g in dead) / len(groups),
        "groups/dead_wrong": sum(bool(g.scorable.any()) and not g.correct.any() for g in dead) / len(groups),
        "groups/dead_unscorable": sum(not g.scorable.any() for g in dead) / len(groups),
        "groups/effective_completions": float(sum(len(g.completions) for g in groups if not g.dead)),
        "accuracy": float(right.mean()),
        "length/mean": float(lengths.mean()),
        "length/right": _mean(lengths[right]),
        "length/wrong": _mean(lengths[~right]),
        "length/truncated": float(cut.mean()),
    }
    components = {name: np.concatenate([g.components[name] for g in groups]) for name in groups[0].components}
    for name, values in components.items():
        metrics[f"reward/{name}/mean"] = _mean(values)
        metrics[f"reward/{name}/std"] = _std(values)
    texts = [c.text for g in groups for c in g.completions]
    return metrics | correlations(components) | text_metrics(texts, right)


def sampled_entropy(groups: Sequence[Group]) -> float:
    """-log p of the sampled tokens, mean over all of them: the entropy they were drawn with, unbiased.

    It needs no forward pass, so that completions without advantage count too.
    """
    drawn = np.concatenate([c.logprobs for g in groups for c in g.completions])
    return 0.0 - float(drawn.mean(dtype=np.float64)) if len(drawn) else 0.0


def correlations(components: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Pearson's r of every two rewards over the completions both judged, where both vary.

    Near 1 two rewards say the same, and their weights add up; below 0 each is paid at the other's cost.
    """
    found = {}
    for (a, x), (b, y) in combinations(sorted(components.items()), 2):
        known = ~(np.isnan(x) | np.isnan(y))
        if known.any() and np.ptp(x[known]) > 0 and np.ptp(y[known]) > 0:
            found[f"reward/correlation/{a}/{b}"] = float(np.corrcoef(x[known], y[known])[0, 1])
    return found


def gradient_shares(groups: Sequence[Group], mass: np.ndarray) -> dict[str, float]:
    """How the gradient is spread over groups by their pass rate: shares of ``mass`` that sum to 1.

    ``mass`` (N,) is the summed absolute advantage of each completion's tokens.
    """
    if not mass.sum() > 0:
        return {}
    rates = np.concatenate([np.full(len(g.completions), g.pass_rate) for g in groups])
    bucket = np.minimum((rates * PASS_RATE_BUCKETS).astype(int), PASS_RATE_BUCKETS - 1)
    shares = np.bincount(bucket, weights=mass, minlength=PASS_RATE_BUCKETS) / mass.sum()
    bounds = [b / PASS_RATE_BUCKETS for b in range(PASS_RATE_BUCKETS + 1)]
    names = [f"gradient_share/pass_rate_{a:.2f}_{b:.2f}" for a, b in pairwise(bounds)]
    return dict(zip(names, shares.tolist(), strict=True))


def text_metrics(texts: Sequence[str], right: np.ndarray) -> dict[str, float]:
    """Cheap signs of how the model writes: reflection, script mixing, repetition, duplicates.

    ``right`` (N,) bool splits the signs of reflection by whether the answer was right.
    """
    signs = {k: np.array([len(p.findall(t)) for t in texts]) for k, p in REFLECTION.items()}
    every = np.sum(list(signs.values()), axis=0)
    return {
        "text/reflection": _mean(every),
        "text/reflection/right": _mean(every[right]),
        "text/reflection/wrong": _mean(every[~right]),
        **{f"text/reflection/{kind}": _mean(found) for kind, found in signs.items()},
        "text/mixed_scripts": _mean(np.array([_mixes_scripts(t) for t in texts])),
        "text/repetition": _mean(np.array([_repetition(t) for t in texts])),
        "text/duplicates": 1 - len(set(texts)) / max(len(texts), 1),
    }


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)] if len(values) else values
    return float(known.mean()) if len(known) else 0.0


def _std(values: np.ndarray) -> float:
    return float(np.nanstd(values)) if np.isfinite(values).any() else 0.0


def _mixes_scripts(text: str) -> bool:
    latin = bool(re.search(r"[a-zA-Z]{2}", text))
    other = bool(re.search(r"[\u0400-\u04ff\u0590-\u06ff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]", text))
    return latin and other


def _repetition(text: str) -> float:
    """Share of four-word windows that occurred before."""
    words = text.split()
    windows = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1 - len(set(windows)) / len(windows) if windows else 0.0
