"""A second implementation of the advantage formulas, for one group or completion at a time.

A completion is a row of T sampled tokens, without padding. ``ShadowRow`` holds its data. Every function
takes the rows that it needs and the settings of its axis, as a config spells them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor

AxisSettings = Mapping[str, Any]
"""Settings as config.yaml and config.json spell them out."""
NOT_YET = torch.zeros(0)
"""The value of what the shadow has not computed yet."""


@dataclass
class ShadowRow:
    """One completion of a recorded run, with the values that the shadow computes for it."""

    prompt: list[int]
    tokens: list[int]
    drawn: list[int]
    """Indices of its T sampled tokens in ``tokens``; the others were inserted, and are only read."""
    sampled: Tensor
    """(T,) float64 log-probs, as the sampler recorded them."""
    reward: float
    """The reward; NaN if no function could score."""
    components: Mapping[str, float]
    """Each reward function's value; NaN where it does not apply."""
    weights: Mapping[str, float]
    truncated: bool
    steps: Mapping[str, Sequence[tuple[int, int, float]]] = field(default_factory=dict)
    """(first token, one after the last, value) of each reasoning step, by the function that judged them."""
    kept: Sequence[Sequence[int]] | None = None
    """(T,) lists of the tokens that top-p or top-k had left to draw from; None: all."""
    greedy: float | None = None
    """Reward of the greedy completion to the same prompt."""
    running: float = 0.0
    """Running mean of rewards before this completion."""
    segments: Sequence[tuple[int, float]] = ()
    """(last token, value after it) of each segment but the last."""
    correct: bool = False
    siblings: Sequence[tuple[float, float]] = ()
    """(sign of the advantage, mean log-ratio) of the other completions of its group, now."""
    group: int = 0
    trained: bool = True
    noise: Tensor = NOT_YET
    old: Tensor = NOT_YET
    old_entropy: Tensor = NOT_YET
    collision: Tensor = NOT_YET
    reference: Tensor = NOT_YET
    advantage: Tensor = NOT_YET
    selected: Tensor = NOT_YET
    token_rewards: Tensor = NOT_YET
    kl_costs: Tensor = NOT_YET
    values: Tensor = NOT_YET
    targets: Tensor = NOT_YET


# --- advantages: the judged completions of one group -> a number or (T,) for each ------------------


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; if all values are equal, exactly that value."""
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


def level(values: Sequence[float]) -> float:
    """Return the mean of a batch; exactly 0 if it is only the rounding of centred groups."""
    found = mean(values)
    return found if abs(found) > 1e-14 * max(map(abs, values)) else 0.0


def deviation(values: Sequence[float], ddof: int) -> float:
    """Return the standard deviation with ``len - ddof`` in the denominator; 0 for one value."""
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / max(len(values) - ddof, 1))


def zscores(values: Sequence[float], ddof: int, eps: float, base: float | None = None) -> list[float]:
    """(v - mean) / (std + eps); 0 where that is 0 / 0. One value that keeps a base of 0 has a std of 1."""
    centre = mean(values) if base is None else base
    alone = len(values) == 1 and base == 0.0
    spread = (1.0 if alone else deviation(values, ddof)) + eps
    return [(v - centre) / spread if spread else 0.0 for v in values]


def sibling_zscores(values: Sequence[float], eps: float) -> list[float]:
    """(v - mean of the others) / (their sample std + eps), undivided where they are all equal."""
    scores = []
    for i, v in enumerate(values):
        others = [*values[:i], *values[i + 1 :]]
        spread = deviation(others, 1) if others else 0.0
        gain = v - mean(others) if others else 0.0
        scores.append(gain / (spread + eps) if spread > 0 else gain)
    return scores


def by_component(rows: Sequence[ShadowRow], score: Callable[[list[float]], list[float]]) -> list[float]:
    """Score each reward function's values on their own, then sum them by weight."""
    totals = [0.0] * len(rows)
    for name, weight in rows[0].weights.items():
        known = [i for i, row in enumerate(rows) if not math.isnan(row.components[name])]
        scored = score([rows[i].components[name] for i in known]) if known else []
        for i, value in zip(known, scored, strict=True):
            totals[i] += weight * value
    return totals


def _length_weighted(rows: Sequence[ShadowRow], rewards: Sequence[float]) -> list[float]:
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


def _process_zscore(rows: Sequence[ShadowRow], s: AxisSettings) -> list[Tensor]:
    """Z-score each function's values, or all its step rewards, and add them by weight to their tokens."""
    advantages = [torch.zeros(len(row.tokens), dtype=torch.float64) for row in rows]
    for name, weight in rows[0].weights.items():
        if name in rows[0].steps:
            values = [value for row in rows for _, _, value in row.steps[name]]
            # One flat list over all rows' steps, handed out again in the same order.
            scores = iter(zscores(values, s["ddof"], s["eps"]) if values else ())
            for row, advantage in zip(rows, advantages, strict=True):
                own = [next(scores) for _ in row.steps[name]]
                for k, (start, end, _) in enumerate(row.steps[name]):
                    advantage[start:end] += weight * _step_credit(own, k, s["credit"])
        else:
            known = [i for i, row in enumerate(rows) if not math.isnan(row.components[name])]
            values = [rows[i].components[name] for i in known]
            for i, score in zip(known, zscores(values, s["ddof"], s["eps"]) if values else (), strict=True):
                advantages[i] += weight * score
    return [advantage[row.drawn] for row, advantage in zip(rows, advantages, strict=True)]


def _step_credit(scores: Sequence[float], k: int, how: str) -> float:
    """Return the credit of the tokens of step ``k`` from a completion's scored steps."""
    # The last of equally bad steps.
    worst = max(j for j, v in enumerate(scores) if v == min(scores))
    options = {
        "own_step": scores[k],
        "sum_to_go": math.fsum(scores[k:]),
        "min_form": min(scores) if k <= worst else 0.0,
    }
    return options[how]


def _prefix_tree(rows: Sequence[ShadowRow], rewards: Sequence[float], outcome: float) -> list[Tensor]:
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


def _optimal_token_baseline(rows: Sequence[ShadowRow], rewards: Sequence[float]) -> list[Tensor]:
    """r - sum_i r_i W_it / sum_i W_it, W the summed squared norm of the score of the tokens so far."""
    energies = []
    for row in rows:
        # |grad log p|^2 by the logits: 1 - 2 p(token) + sum_v p(v)^2, summed up to each token.
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


def _segment_difference(rows: Sequence[ShadowRow], rewards: Sequence[float]) -> list[Tensor]:
    """Return for each token the gain of its segment: the value after it minus the value before it."""
    found = []
    for row, reward in zip(rows, rewards, strict=True):
        ends = [*(end for end, _ in row.segments), len(row.tokens) - 1]
        values = [mean(rewards), *(value for _, value in row.segments), reward]
        mine = [next(k for k, end in enumerate(ends) if place <= end) for place in row.drawn]
        found.append(torch.tensor([values[k + 1] - values[k] for k in mine], dtype=torch.float64))
    return found


def _length_penalized(rows: Sequence[ShadowRow], rewards: Sequence[float], weight: float) -> list[float]:
    """r - weight * mean(r) * |y| / max |y|, centred."""
    lengths = [len(row.drawn) * row.trained for row in rows]
    short = [r - weight * mean(rewards) * n / max(*lengths, 1) for r, n in zip(rewards, lengths, strict=True)]
    return [s - mean(short) for s in short]


def _greedy_baseline(rows: Sequence[ShadowRow], rewards: Sequence[float]) -> list[float]:
    """r - the greedy completion's reward; 0 where that could not be scored. ReMax."""
    baselines = [row.greedy or 0.0 for row in rows]
    return [0.0 if math.isnan(b) else r - b for r, b in zip(rewards, baselines, strict=True)]


def _pass_at_k(rewards: Sequence[float], k: int, eps: float) -> list[float]:
    """Enumerate all sets of k: the mean best reward of the sets with a completion, minus that of all sets."""
    sets = list(combinations(range(len(rewards)), min(k, len(rewards))))
    best = [max(rewards[i] for i in members) for members in sets]
    spread = deviation(best, 0)
    gains = [
        mean([b for b, members in zip(best, sets, strict=True) if i in members]) - mean(best)
        for i in range(len(rewards))
    ]
    return [g / (spread + eps) if spread else 0.0 for g in gains]


def _process_leave_one_out(rows: Sequence[ShadowRow], gamma: float) -> list[Tensor]:
    """Sum over functions the rewards minus those of the other completions, discounted by step. PRIME."""
    advantages = [torch.zeros(len(row.tokens), dtype=torch.float64) for row in rows]
    for name, weight in rows[0].weights.items():
        by_step = name in rows[0].steps
        given = [
            [value for _, _, value in row.steps[name]] if by_step else [row.components[name]] for row in rows
        ]
        known = [i for i, g in enumerate(given) if g and not any(map(math.isnan, g))]
        for i in known:
            others = [mean(given[j]) for j in known if j != i]
            left = [v - (mean(others) if others else mean(given[i])) for v in given[i]]
            spans = rows[i].steps[name] if by_step else [(0, len(rows[i].tokens), 0.0)]
            for n, (start, end, _) in enumerate(spans):
                togo = math.fsum(gamma**m * value for m, value in enumerate(left[n:]))
                advantages[i][start:end] += weight * togo
    return [advantage[row.drawn] for row, advantage in zip(rows, advantages, strict=True)]


def gae_of_row(row: ShadowRow, gamma: float, lam: float) -> Tensor:
    """A_t = sum_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), V = 0 after the end."""
    following = torch.cat([row.values[1:], torch.zeros(1, dtype=torch.float64)])
    errors = row.token_rewards + gamma * following - row.values
    powers = (gamma * lam) ** torch.arange(len(errors), dtype=torch.float64)
    return torch.stack([(errors[t:] * powers[: len(errors) - t]).sum() for t in range(len(errors))])


def discounted(rewards: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of the tokens' rewards from each token on. (T,) -> (T,)."""
    size = len(rewards)
    powers = gamma ** torch.arange(size, dtype=torch.float64)
    return torch.stack([(rewards[t:] * powers[: size - t]).sum() for t in range(size)])


def _lambda(row: ShadowRow, s: AxisSettings) -> float:
    """Return VAPO's lambda, which depends on the length, or the configured one."""
    adaptive = s["length_adaptive"]
    return max(0.0, 1 - 1 / (adaptive * len(row.drawn))) if adaptive else float(s["lam"])


def advantages(
    name: str, rows: Sequence[ShadowRow], rewards: Sequence[float], s: AxisSettings
) -> Sequence[float | Tensor]:
    """Return one group's advantages under the estimator ``name``. Raises KeyError for an unknown one."""
    size = len(rows)
    kept = s.get("single") == "reward"
    base = 0.0 if kept and size == 1 else mean(rewards)
    # Lambdas, because only the chosen estimator has its settings in `s`.
    table: Mapping[str, Callable[[], Sequence[float | Tensor]]] = {
        "reward": lambda: list(rewards),
        "running_baseline": lambda: [r - row.running for row, r in zip(rows, rewards, strict=True)],
        "length_penalized": lambda: _length_penalized(rows, rewards, s["weight"]),
        "segment_difference": lambda: _segment_difference(rows, rewards),
        "discounted_return": lambda: [discounted(row.token_rewards, s["gamma"]) for row in rows],
        "group_centered": lambda: [r - base for r in rewards],
        "group_zscore": lambda: zscores(rewards, s["ddof"], s["eps"], base),
        "leave_one_out": lambda: [(r - base) * size / max(size - 1, 1) for r in rewards],
        "leave_one_out_zscore": lambda: sibling_zscores(rewards, s["eps"]),
        "length_weighted": lambda: list(rewards) if kept and size == 1 else _length_weighted(rows, rewards),
        "mean_normalized": lambda: _mean_normalized(rewards, s["eps"]),
        "greedy_baseline": lambda: _greedy_baseline(rows, rewards),
        "component_zscore": lambda: by_component(
            rows, lambda v: zscores(v, s["ddof"], s["eps"], 0.0 if kept and len(v) == 1 else None)),
        "component_leave_one_out": lambda: by_component(rows, lambda v: sibling_zscores(v, s["eps"])),
        "process_zscore": lambda: _process_zscore(rows, s),
        "pass_at_k": lambda: _pass_at_k(rewards, s["k"], s["eps"]),
        "process_leave_one_out": lambda: _process_leave_one_out(rows, s["gamma"]),
        "gae": lambda: [gae_of_row(row, s["gamma"], _lambda(row, s)) for row in rows],
        "prefix_tree": lambda: _prefix_tree(rows, rewards, s["outcome"]),
        "optimal_token_baseline": lambda: _optimal_token_baseline(rows, rewards),
    }  # fmt: skip
    return table[name]()


def whitened(name: str, rows: Sequence[ShadowRow], s: AxisSettings) -> list[Tensor]:
    """Normalize the advantages over the trained completions of the whole batch."""
    own = [float(row.advantage.mean()) for row in rows]
    tokens = torch.cat([row.advantage for row in rows]).tolist()
    if name == "batch_centered":
        return [row.advantage - level(own) for row in rows]
    if name == "batch_std":
        spread = deviation([row.reward for row in rows] if s["of"] == "rewards" else own, s["ddof"])
        return [row.advantage / ((spread + s["eps"]) or 1.0) for row in rows]
    if name == "sample_zscore":
        spread = deviation(own, s["ddof"]) + s["eps"]
        return [(row.advantage - level(own)) / (spread or 1.0) for row in rows]
    if name == "token_zscore":
        spread = math.sqrt(max(deviation(tokens, s["ddof"]) ** 2 + s["eps"], s["floor"]))
        return [(row.advantage - level(tokens)) / (spread or 1.0) for row in rows]
    if name == "valid_group_scale":
        alive = {row.group for row in rows if bool(row.advantage.any())}
        counted = [row.reward != 0 if s["of"] == "rewards" else row.group in alive for row in rows]
        factor = len(rows) / max(sum(counted), 1)
        return [row.advantage * factor for row in rows]
    raise KeyError(name)
