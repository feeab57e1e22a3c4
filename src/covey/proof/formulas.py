"""The formulas of every axis, once more, for one group or one completion at a time.

A completion is a row of T sampled tokens, without padding. ``Row`` holds what is known of it; every function
takes the rows it speaks about and the settings of its axis, as a config spells them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

AxisSettings = Mapping[str, Any]
"""As config.yaml and config.json spell them out."""
FAR = 20.0
"""Log-ratios are bounded here, as the documentation of the ratios says."""


@dataclass
class Row:
    """One completion of a recorded run, and what the shadow has found out about it."""

    prompt: list[int]
    tokens: list[int]
    drawn: list[int]
    """The places of its T tokens among ``tokens``; the others were inserted, and are only read."""
    sampled: Tensor
    """(T,) float64: log-probs as the sampler recorded them."""
    reward: float
    """NaN: no reward function could judge."""
    components: Mapping[str, float]
    """Each reward function's value; NaN where it does not apply."""
    weights: Mapping[str, float]
    truncated: bool
    steps: Sequence[tuple[int, int, float]] | None = None
    """(first token, one after the last, value) of each reasoning step."""
    kept: Sequence[Sequence[int]] | None = None
    """(T,) lists of the tokens that top-p or top-k had left to draw from; None: all."""
    greedy: float | None = None
    """Reward of the greedy completion to the same prompt."""
    group: int = 0
    trained: bool = True
    noise: Tensor = field(default_factory=lambda: torch.zeros(0))
    old: Tensor = field(default_factory=lambda: torch.zeros(0))
    old_entropy: Tensor = field(default_factory=lambda: torch.zeros(0))
    collision: Tensor = field(default_factory=lambda: torch.zeros(0))
    reference: Tensor = field(default_factory=lambda: torch.zeros(0))
    advantage: Tensor = field(default_factory=lambda: torch.zeros(0))
    marked: Tensor = field(default_factory=lambda: torch.zeros(0))


# --- advantages: the judged completions of one group -> a number or (T,) for each ------------------


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; exactly the value itself where all are equal."""
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


def deviation(values: Sequence[float], ddof: int) -> float:
    """The standard deviation with ``len - ddof`` in the denominator; 0 for one value."""
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / max(len(values) - ddof, 1))


def zscores(values: Sequence[float], ddof: int, eps: float) -> list[float]:
    """(v - mean) / (std + eps); 0 where that is 0 / 0."""
    spread = deviation(values, ddof) + eps
    return [(v - mean(values)) / spread if spread else 0.0 for v in values]


def sibling_zscores(values: Sequence[float], eps: float) -> list[float]:
    """(v - mean of the others) / (their sample std + eps), undivided where they are all equal."""
    scores = []
    for i, v in enumerate(values):
        others = [*values[:i], *values[i + 1 :]]
        spread = deviation(others, 1) if others else 0.0
        gain = v - mean(others) if others else 0.0
        scores.append(gain / (spread + eps) if spread > 0 else gain)
    return scores


def by_component(rows: Sequence[Row], score: Callable[[list[float]], list[float]]) -> list[float]:
    """Every reward function's values scored on their own, then summed by weight."""
    totals = [0.0] * len(rows)
    for name, weight in rows[0].weights.items():
        known = [i for i, row in enumerate(rows) if not math.isnan(row.components[name])]
        scored = score([rows[i].components[name] for i in known]) if known else []
        for i, value in zip(known, scored, strict=True):
            totals[i] += weight * value
    return totals


def _length_weighted(rows: Sequence[Row], rewards: Sequence[float]) -> list[float]:
    """r - sum |y| r / sum |y| over trained tokens. OPO."""
    lengths = [len(row.drawn) * row.trained for row in rows]
    baseline = math.fsum(n * r for n, r in zip(lengths, rewards, strict=True)) / max(sum(lengths), 1)
    if not sum(lengths):
        baseline = mean(rewards)
    return [r - baseline for r in rewards] if len(set(rewards)) > 1 else [0.0] * len(rows)


def _mean_normalized(rewards: Sequence[float], eps: float) -> list[float]:
    """(r - mean) / (mean + eps), 0 where the mean is not positive. MaxRL."""
    centre = mean(rewards)
    return [(r - centre) / (centre + eps) if centre > 0 else 0.0 for r in rewards]


def _process_zscore(rows: Sequence[Row], s: AxisSettings) -> list[Tensor]:
    """All step rewards of the group z-scored together, then credited to the tokens of the steps."""
    values = [value for row in rows for _, _, value in row.steps or ()]
    scores = iter(zscores(values, s["ddof"], s["eps"]) if values else ())
    advantages = []
    for row in rows:
        own = [next(scores) for _ in row.steps or ()]
        advantage, start = torch.zeros(len(row.tokens), dtype=torch.float64), 0
        for k, (_, end, _) in enumerate(row.steps or ()):
            worst = max(j for j, v in enumerate(own) if v == min(own))
            credit = {
                "own_step": own[k],
                "sum_to_go": math.fsum(own[k:]),
                "min_form": min(own) if k <= worst else 0.0,
            }
            advantage[start:end] = credit[s["credit"]]
            start = end
        advantages.append(advantage[row.drawn])
    return advantages


def _prefix_tree(rows: Sequence[Row], rewards: Sequence[float], outcome: float) -> list[Tensor]:
    """V(prefix with the token) - V(prefix before), V the mean reward of the completions sharing it."""

    def value(prefix: list[int]) -> float:
        shared = zip(rows, rewards, strict=True)
        return mean([r for row, r in shared if row.tokens[: len(prefix)] == prefix])

    advantages = []
    for row, reward in zip(rows, rewards, strict=True):
        values = [value(row.tokens[:t]) for t in range(len(row.tokens) + 1)]
        whole = outcome * (reward - mean(rewards))
        gains = torch.tensor([b - a + whole for a, b in pairwise(values)]).double()
        advantages.append(gains[row.drawn])
    return advantages


def _optimal_token_baseline(rows: Sequence[Row], rewards: Sequence[float]) -> list[Tensor]:
    """r - sum_i r_i W_it / sum_i W_it, W the summed squared norm of the score of the tokens so far."""
    energies = []
    for row in rows:
        energy = (1 - 2 * row.old.exp() + row.collision).clamp(min=0).cumsum(0) * row.trained
        energies.append(dict(zip(row.drawn, energy.tolist(), strict=True)))
    shifted = [r - mean(rewards) for r in rewards]
    advantages = []
    for row, own in zip(rows, shifted, strict=True):
        advantage = torch.zeros(len(row.drawn), dtype=torch.float64)
        for place, t in enumerate(row.drawn):
            there = [i for i, other in enumerate(rows) if other.trained and t in energies[i]]
            total = math.fsum(energies[i][t] for i in there)
            pulled = math.fsum(shifted[i] * energies[i][t] for i in there)
            advantage[place] = own - (pulled / max(total, 1e-12) if len(there) > 1 else 0.0)
        advantages.append(advantage)
    return advantages


def advantages(
    name: str, rows: Sequence[Row], rewards: Sequence[float], s: AxisSettings
) -> Sequence[float | Tensor]:
    """One group's advantages under the estimator of that name. Raises KeyError for an unknown one."""
    size = len(rows)
    table: Mapping[str, Callable[[], Sequence[float | Tensor]]] = {
        "reward": lambda: list(rewards),
        "group_centered": lambda: [r - mean(rewards) for r in rewards],
        "group_zscore": lambda: zscores(rewards, s["ddof"], s["eps"]),
        "leave_one_out": lambda: [(r - mean(rewards)) * size / max(size - 1, 1) for r in rewards],
        "leave_one_out_zscore": lambda: sibling_zscores(rewards, s["eps"]),
        "length_weighted": lambda: _length_weighted(rows, rewards),
        "mean_normalized": lambda: _mean_normalized(rewards, s["eps"]),
        "greedy_baseline": lambda: [0.0 if math.isnan(g := row.greedy or 0.0) else r - g
                                    for row, r in zip(rows, rewards, strict=True)],
        "component_zscore": lambda: by_component(rows, lambda v: zscores(v, s["ddof"], s["eps"])),
        "component_leave_one_out": lambda: by_component(rows, lambda v: sibling_zscores(v, s["eps"])),
        "process_zscore": lambda: _process_zscore(rows, s),
        "prefix_tree": lambda: _prefix_tree(rows, rewards, s["outcome"]),
        "optimal_token_baseline": lambda: _optimal_token_baseline(rows, rewards),
    }  # fmt: skip
    return table[name]()


def whitened(name: str, rows: Sequence[Row], s: AxisSettings) -> list[Tensor]:
    """The second step, over the trained completions of the whole batch."""
    own = [float(row.advantage.mean()) for row in rows]
    tokens = torch.cat([row.advantage for row in rows]).tolist()
    if name == "batch_centered":
        return [row.advantage - mean(own) for row in rows]
    if name == "batch_std":
        spread = deviation([row.reward for row in rows] if s["of"] == "rewards" else own, s["ddof"])
        return [row.advantage / ((spread + s["eps"]) or 1.0) for row in rows]
    if name == "sample_zscore":
        spread = deviation(own, s["ddof"]) + s["eps"]
        return [(row.advantage - mean(own)) / (spread or 1.0) for row in rows]
    if name == "token_zscore":
        spread = math.sqrt(deviation(tokens, s["ddof"]) ** 2 + s["eps"])
        return [(row.advantage - mean(tokens)) / (spread or 1.0) for row in rows]
    if name == "valid_group_scale":
        alive = {row.group for row in rows if bool(row.advantage.any())}
        factor = len(rows) / max(sum(row.group in alive for row in rows), 1)
        return [row.advantage * factor for row in rows]
    raise KeyError(name)


# --- the loss of one completion: (T,) in, (T,) out ------------------------------------------------


def ratio(name: str, logprobs: Tensor, row: Row, s: AxisSettings) -> Tensor:
    """pi / pi_old, at the level of the axis."""
    moved = (logprobs - row.old).clamp(-FAR, FAR)
    if name == "on_policy":
        return (logprobs - logprobs.detach()).exp()
    if name == "token":
        return moved.exp()
    if name == "response":
        return moved.sum().clamp(-FAR, FAR).exp().expand_as(moved)
    if name == "geometric_clipped":
        bound = s["clip_log"]
        moved = torch.where(row.advantage > 0, moved.clamp(max=bound), moved.clamp(min=-bound))
        return moved.mean().exp().expand_as(moved)
    mean_ratio = moved.mean().exp().expand_as(moved)
    if name == "sequence":
        return mean_ratio
    if name == "sequence_token":
        return mean_ratio.detach() * logprobs.exp() / logprobs.detach().exp()
    raise KeyError(name)


def surrogate(name: str, rho: Tensor, logprobs: Tensor, row: Row, s: AxisSettings) -> Tensor:
    """The loss of each token before weights; what is under .detach() is a weight on log pi."""
    advantage, up = row.advantage, row.advantage > 0
    if name == "unclipped":
        return -rho * advantage
    if name == "clip":
        gain = torch.minimum(rho * advantage, rho.clamp(1 - s["clip_low"], 1 + s["clip_high"]) * advantage)
        if s["dual_clip"] is not None:
            gain = torch.where(advantage < 0, torch.maximum(gain, s["dual_clip"] * advantage), gain)
        return -gain
    if name == "cispo":
        return -rho.detach().clamp(s["floor"], s["cap"]) * advantage * logprobs
    if name == "sapo":
        tau = torch.where(up, s["tau_up"], s["tau_down"]).double()
        return -4 / tau * torch.sigmoid(tau * (rho - 1)) * advantage
    if name == "vespo":
        k = torch.where(advantage >= 0, s["k_up"], s["k_down"]).double()
        lam = torch.where(advantage >= 0, s["lam_up"], s["lam_down"]).double()
        return -(rho.detach() ** k * (lam * (1 - rho.detach())).exp()) * advantage * logprobs
    if name == "kl_on_selected":
        moved = (logprobs - row.old).clamp(-FAR, FAR)
        return -rho * advantage + s["coef"] * moved.abs() * row.marked
    now, before = logprobs.detach().exp(), row.old.exp()
    weight = (now / before).clamp(max=s["cap"])
    if name == "divergence_mask_tv":
        outward = (now - before) * advantage.sign() > s["threshold"]
    elif name == "divergence_mask_kl":
        p, q = before.clamp(max=1 - 1e-6), now.clamp(max=1 - 1e-6)
        distance = p * (before / now).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        outward = ((q - p) * advantage > 0) & (distance > s["threshold"])
    else:
        raise KeyError(name)
    return -torch.where(outward, 0.0, weight) * advantage * logprobs


def divergence(name: str, d: Tensor) -> Tensor:
    """Estimators of KL(pi || ref) from d = log pi - log ref."""
    bounded = d.clamp(min=-FAR)
    table = {"k1": d, "k2": d**2 / 2, "k3": (-bounded).exp() - 1 + bounded, "absolute": d.abs()}
    return table[name]


def correction(name: str, logprobs: Tensor, row: Row, s: AxisSettings) -> Tensor:
    """The importance correction for a sampler that disagrees with the trainer. Detached."""
    gap = (row.old - row.sampled).clamp(-FAR, FAR)
    level = gap.sum().expand_as(gap).clamp(-FAR, FAR) if s.get("level") == "sequence" else gap
    if name == "truncated":
        return level.exp().clamp(max=s["cap"])
    if name == "masked":
        return torch.where((level.exp() >= s["low"]) & (level.exp() <= s["high"]), level.exp(), 0.0)
    if name == "decoupled":
        return gap.exp()
    if name == "geometric_mask":
        inside = s["low"] <= float(gap.mean().exp()) <= s["high"]
        return torch.full_like(gap, float(inside))
    if name == "off_policy_mask":
        moved = (logprobs.detach() - row.old).clamp(-FAR, FAR)
        drop = float(-(gap + moved).mean()) > s["delta"] and float(row.advantage.sum()) < 0
        return torch.full_like(gap, float(not drop))
    raise KeyError(name)


def multiplier(name: str, logprobs: Tensor, row: Row, s: AxisSettings) -> Tensor:
    """Factors on the policy term of each token. Detached."""
    if name == "selected_only":
        return row.marked.double()
    if name == "unselected_only":
        return 1 - row.marked.double()
    if name == "unlikely_only":
        return (row.old.exp() < s["below"]).double()
    if name == "future_influence":
        moved = (logprobs.detach() - row.old).clamp(-FAR, FAR)
        decay, running, later = 0.5 ** (1 / s["half_life"]), 0.0, row.drawn[-1]
        influence = torch.zeros_like(moved)
        for t in reversed(range(len(moved))):
            own, distance = float(moved[t]), later - row.drawn[t]
            later = row.drawn[t]
            running = decay**distance * running + (own if math.exp(own) <= s["outlier"] else 0.0)
            factor = min(max(math.exp(running), s["low"]), s["high"])
            risky = float(row.advantage[t]) < 0 and math.exp(own) > s["safety"]
            influence[t] = min(factor, 1.0) if risky else factor
        return influence
    raise KeyError(name)


def marks(name: str, rows: Sequence[Row], s: AxisSettings) -> list[Tensor]:
    """Which tokens of an optimizer step are singled out, from what was known when it began."""
    if name == "top_entropy":
        return _largest([row.old_entropy for row in rows], None, s["share"])
    logprobs, advantage = (torch.cat([getattr(row, x) for row in rows]) for x in ("old", "advantage"))
    every = [(row.advantage - advantage.mean()) * (row.old - logprobs.mean()) for row in rows]
    if name == "top_covariance":
        return _largest(every, None, s["share"])
    if name == "random_covariant":
        band = [(c >= s["low"]) & (c <= s["high"]) for c in every]
        return _largest([row.noise for row in rows], band, s["share"])
    raise KeyError(name)


def _largest(values: Sequence[Tensor], among: Sequence[Tensor] | None, share: float) -> list[Tensor]:
    """The ``share`` of all tokens with the largest values, at least one; equal ones at the border all.

    Siblings have the same entropy at their first token; float64 may part them in the sixteenth digit.
    """
    among = among or [torch.ones_like(v, dtype=torch.bool) for v in values]
    candidates = sorted(torch.cat([v[a] for v, a in zip(values, among, strict=True)]).tolist(), reverse=True)
    count = min(max(round(share * sum(map(len, values))), int(share > 0)), len(candidates))
    if count == 0:
        return [torch.zeros_like(a) for a in among]
    return [a & (v >= candidates[count - 1] - 1e-9) for v, a in zip(values, among, strict=True)]


def token_weight(name: str, row: Row, step: Sequence[Row], max_tokens: int, s: AxisSettings) -> float:
    """How much one token of this completion weighs in the loss of the optimizer step."""
    trained = [r for r in step if r.trained]
    if name == "token_mean":
        return 1 / sum(len(r.drawn) for r in trained)
    if name == "sequence_mean":
        return 1 / (len(trained) * len(row.drawn))
    if name == "sequence_sum":
        return 1 / len(trained)
    if name == "constant_length":
        return 1 / (len(trained) * (s["length"] or max_tokens))
    if name == "prompt_mean":
        siblings = sum(len(r.drawn) for r in trained if r.group == row.group)
        return 1 / (len({r.group for r in trained}) * siblings)
    raise KeyError(name)
