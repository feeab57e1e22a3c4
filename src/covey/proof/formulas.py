"""A second implementation of the advantage formulas, for one group or completion at a time.

A completion is a row of T sampled tokens, without padding. ``ShadowRow`` holds its data. Every function
takes the rows that it needs and the settings of its axis by their names in a config.
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
    positions: list[int]
    """Indices of its T sampled tokens in ``tokens``; the others were inserted, and are only read."""
    sampled: Tensor
    """(T,) float64 log-probs that the sampler recorded."""
    reward: float
    """The reward; NaN if no function could score."""
    components: Mapping[str, float]
    """Each reward function's value; NaN where it does not apply."""
    weights: Mapping[str, float]
    truncated: bool
    steps: Mapping[str, Sequence[tuple[int, int, float]]] = field(default_factory=dict)
    """(first token, one after the last, value) of each reasoning step, by the function that judged them."""
    allowed: Sequence[Sequence[int]] | None = None
    """For each token of ``tokens``, the ids that top-p or top-k allowed; None: all."""
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


@dataclass(frozen=True)
class JudgedGroup:
    """The judged completions of one prompt: what an estimator reads."""

    rows: Sequence[ShadowRow]
    rewards: Sequence[float]
    settings: AxisSettings
    """Settings of the estimator."""

    @property
    def keeps_reward(self) -> bool:
        """Whether its only completion keeps its reward, which the mean would cancel."""
        return len(self.rows) == 1 and self.settings.get("single") == "reward"

    @property
    def baseline(self) -> float:
        """The mean reward, or 0."""
        return 0.0 if self.keeps_reward else mean(self.rewards)


# --- advantages: the judged completions of one group -> a number or (T,) for each ------------------


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; if all values are equal, exactly that value."""
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


def level(values: Sequence[float]) -> float:
    """Return the mean of a batch; exactly 0 if it is only the rounding of centred groups."""
    centre = mean(values)
    return centre if abs(centre) > 1e-14 * max(map(abs, values)) else 0.0


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
        applies = [i for i, row in enumerate(rows) if not math.isnan(row.components[name])]
        scores = score([rows[i].components[name] for i in applies]) if applies else []
        for i, value in zip(applies, scores, strict=True):
            totals[i] += weight * value
    return totals


def _reward(group: JudgedGroup) -> list[float]:
    """r."""
    return list(group.rewards)


def _running_baseline(group: JudgedGroup) -> list[float]:
    """r - the running mean before the completion."""
    return [r - row.running for row, r in zip(group.rows, group.rewards, strict=True)]


def _group_centered(group: JudgedGroup) -> list[float]:
    """r - mean. Dr. GRPO."""
    return [r - group.baseline for r in group.rewards]


def _group_zscore(group: JudgedGroup) -> list[float]:
    """(r - mean) / (std + eps). GRPO."""
    return zscores(group.rewards, group.settings["ddof"], group.settings["eps"], group.baseline)


def _leave_one_out(group: JudgedGroup) -> list[float]:
    """r - the mean of the others, which is (r - mean) G / (G - 1). RLOO."""
    size = len(group.rows)
    return [(r - group.baseline) * size / max(size - 1, 1) for r in group.rewards]


def _leave_one_out_zscore(group: JudgedGroup) -> list[float]:
    """(r - mean of the others) / (their std + eps)."""
    return sibling_zscores(group.rewards, group.settings["eps"])


def _component_zscore(group: JudgedGroup) -> list[float]:
    """Z-score each reward function's values. GDPO."""
    s = group.settings

    def score(values: list[float]) -> list[float]:
        # A function may have judged one completion only, of a group of several.
        alone = s.get("single") == "reward" and len(values) == 1
        return zscores(values, s["ddof"], s["eps"], 0.0 if alone else None)

    return by_component(group.rows, score)


def _component_leave_one_out(group: JudgedGroup) -> list[float]:
    """Compare each reward function's values with its values for the other completions."""
    return by_component(group.rows, lambda values: sibling_zscores(values, group.settings["eps"]))


def _length_weighted(group: JudgedGroup) -> list[float]:
    """r - sum |y| r / sum |y| over trained tokens. OPO."""
    rows = group.rows
    rewards = group.rewards
    if group.keeps_reward:
        return list(rewards)
    lengths = [len(row.positions) * row.trained for row in rows]
    baseline = math.fsum(n * r for n, r in zip(lengths, rewards, strict=True)) / max(sum(lengths), 1)
    if not sum(lengths):
        baseline = mean(rewards)
    return [r - baseline for r in rewards] if len(set(rewards)) > 1 else [0.0] * len(rows)


def _mean_normalized(group: JudgedGroup) -> list[float]:
    """(r - mean) / (mean + eps), 0 where the mean is not positive. MaxRL."""
    centre = mean(group.rewards)
    eps = group.settings["eps"]
    return [(r - centre) / (centre + eps) if centre > 0 else 0.0 for r in group.rewards]


def _process_zscore(group: JudgedGroup) -> list[Tensor]:
    """Z-score each function's values, or all its step rewards, and add them by weight to their tokens."""
    rows = group.rows
    s = group.settings
    advantages = [torch.zeros(len(row.tokens), dtype=torch.float64) for row in rows]
    for name, weight in rows[0].weights.items():
        if name in rows[0].steps:
            values = [value for row in rows for _, _, value in row.steps[name]]
            # One flat list over all rows' steps, handed out again in the same order.
            scores = iter(zscores(values, s["ddof"], s["eps"]) if values else ())
            for row, advantage in zip(rows, advantages, strict=True):
                of_row = [next(scores) for _ in row.steps[name]]
                for k, (start, end, _) in enumerate(row.steps[name]):
                    advantage[start:end] += weight * _step_credit(of_row, k, s["credit"])
        else:
            applies = [i for i, row in enumerate(rows) if not math.isnan(row.components[name])]
            values = [rows[i].components[name] for i in applies]
            of_rows = zscores(values, s["ddof"], s["eps"]) if values else []
            for i, score in zip(applies, of_rows, strict=True):
                advantages[i] += weight * score
    return [advantage[row.positions] for row, advantage in zip(rows, advantages, strict=True)]


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


def _prefix_tree(group: JudgedGroup) -> list[Tensor]:
    """V(prefix with the token) - V(prefix before), V the mean reward of the completions sharing it."""
    rows = group.rows
    rewards = group.rewards

    def value(prefix: list[int]) -> float:
        shared = zip(rows, rewards, strict=True)
        return mean([r for row, r in shared if row.tokens[: len(prefix)] == prefix])

    advantages = []
    for row, reward in zip(rows, rewards, strict=True):
        values = [value(row.tokens[:t]) for t in range(len(row.tokens) + 1)]
        whole = group.settings["outcome"] * (reward - mean(rewards))
        gains = torch.tensor([b - a + whole for a, b in pairwise(values)]).double()
        advantages.append(gains[row.positions])
    return advantages


def _optimal_token_baseline(group: JudgedGroup) -> list[Tensor]:
    """r - sum_i r_i W_it / sum_i W_it, W the summed squared norm of the score of the tokens so far."""
    rows = group.rows
    energies = []
    for row in rows:
        # |grad log p|^2 by the logits: 1 - 2 p(token) + sum_v p(v)^2, summed up to each token.
        energy = (1 - 2 * row.old.exp() + row.collision).clamp(min=0).cumsum(0) * row.trained
        energies.append(dict(zip(row.positions, energy.tolist(), strict=True)))
    shifted = [r - mean(group.rewards) for r in group.rewards]
    advantages = []
    for row, reward in zip(rows, shifted, strict=True):
        advantage = torch.zeros(len(row.positions), dtype=torch.float64)
        for n, t in enumerate(row.positions):
            reach = [i for i, other in enumerate(rows) if other.trained and t in energies[i]]
            baseline = 0.0  # the group's mean, where only one completion reaches the token
            if len(reach) > 1:
                total = math.fsum(energies[i][t] for i in reach)
                baseline = math.fsum(shifted[i] * energies[i][t] for i in reach) / max(total, 1e-12)
            advantage[n] = reward - baseline
        advantages.append(advantage)
    return advantages


def _segment_difference(group: JudgedGroup) -> list[Tensor]:
    """Return for each token the gain of its segment: the value after it minus the value before it."""
    advantages = []
    for row, reward in zip(group.rows, group.rewards, strict=True):
        ends = [*(end for end, _ in row.segments), len(row.tokens) - 1]
        values = [mean(group.rewards), *(value for _, value in row.segments), reward]
        segments = [next(k for k, end in enumerate(ends) if t <= end) for t in row.positions]
        gains = [values[k + 1] - values[k] for k in segments]
        advantages.append(torch.tensor(gains, dtype=torch.float64))
    return advantages


def _length_penalized(group: JudgedGroup) -> list[float]:
    """r - weight * mean(r) * |y| / max |y|, centred."""
    rewards = group.rewards
    weight = group.settings["weight"]
    lengths = [len(row.positions) * row.trained for row in group.rows]
    short = [r - weight * mean(rewards) * n / max(*lengths, 1) for r, n in zip(rewards, lengths, strict=True)]
    return [s - mean(short) for s in short]


def _greedy_baseline(group: JudgedGroup) -> list[float]:
    """r - the greedy completion's reward; 0 where that could not be scored. ReMax."""
    baselines = [row.greedy or 0.0 for row in group.rows]
    return [0.0 if math.isnan(b) else r - b for r, b in zip(group.rewards, baselines, strict=True)]


def _pass_at_k(group: JudgedGroup) -> list[float]:
    """Enumerate all sets of k: mean best reward of the sets with a completion, minus the mean of all sets."""
    rewards = group.rewards
    sets = list(combinations(range(len(rewards)), min(group.settings["k"], len(rewards))))
    best = [max(rewards[i] for i in members) for members in sets]
    spread = deviation(best, 0)
    gains = [
        mean([b for b, members in zip(best, sets, strict=True) if i in members]) - mean(best)
        for i in range(len(rewards))
    ]
    return [g / (spread + group.settings["eps"]) if spread else 0.0 for g in gains]


def _process_leave_one_out(group: JudgedGroup) -> list[Tensor]:
    """Sum over functions the rewards minus the other completions' rewards, discounted by step. PRIME."""
    rows = group.rows
    gamma = group.settings["gamma"]
    advantages = [torch.zeros(len(row.tokens), dtype=torch.float64) for row in rows]
    for name, weight in rows[0].weights.items():
        by_step = name in rows[0].steps
        rewards = [
            [value for _, _, value in row.steps[name]] if by_step else [row.components[name]] for row in rows
        ]
        scored = [i for i, values in enumerate(rewards) if values and not any(map(math.isnan, values))]
        for i in scored:
            others = [mean(rewards[j]) for j in scored if j != i]
            baseline = mean(others) if others else mean(rewards[i])
            gains = [value - baseline for value in rewards[i]]
            spans = rows[i].steps[name] if by_step else [(0, len(rows[i].tokens), 0.0)]
            for n, (start, end, _) in enumerate(spans):
                to_go = math.fsum(gamma**m * gain for m, gain in enumerate(gains[n:]))
                advantages[i][start:end] += weight * to_go
    return [advantage[row.positions] for row, advantage in zip(rows, advantages, strict=True)]


def gae_of_row(row: ShadowRow, gamma: float, lam: float) -> Tensor:
    """A_t = sum_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), V = 0 after the end."""
    following = torch.cat([row.values[1:], torch.zeros(1, dtype=torch.float64)])
    errors = row.token_rewards + gamma * following - row.values
    powers = (gamma * lam) ** torch.arange(len(errors), dtype=torch.float64)
    return torch.stack([(errors[t:] * powers[: len(errors) - t]).sum() for t in range(len(errors))])


def discounted_sums(rewards: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of the tokens' rewards from each token on. (T,) -> (T,)."""
    size = len(rewards)
    powers = gamma ** torch.arange(size, dtype=torch.float64)
    return torch.stack([(rewards[t:] * powers[: size - t]).sum() for t in range(size)])


def _discounted_return(group: JudgedGroup) -> list[Tensor]:
    """Return the discounted sum of the tokens' rewards from each token on."""
    return [discounted_sums(row.token_rewards, group.settings["gamma"]) for row in group.rows]


def _gae(group: JudgedGroup) -> list[Tensor]:
    """GAE; VAPO's lambda is 1 - 1 / (length_adaptive |y|)."""
    s = group.settings
    advantages = []
    for row in group.rows:
        lam = float(s["lam"])
        if s["length_adaptive"]:
            lam = max(0.0, 1 - 1 / (s["length_adaptive"] * len(row.positions)))
        advantages.append(gae_of_row(row, s["gamma"], lam))
    return advantages


ESTIMATORS: Mapping[str, Callable[[JudgedGroup], Sequence[float | Tensor]]] = {
    "reward": _reward,
    "running_baseline": _running_baseline,
    "group_centered": _group_centered,
    "group_zscore": _group_zscore,
    "leave_one_out": _leave_one_out,
    "leave_one_out_zscore": _leave_one_out_zscore,
    "component_zscore": _component_zscore,
    "component_leave_one_out": _component_leave_one_out,
    "length_weighted": _length_weighted,
    "length_penalized": _length_penalized,
    "mean_normalized": _mean_normalized,
    "greedy_baseline": _greedy_baseline,
    "pass_at_k": _pass_at_k,
    "process_zscore": _process_zscore,
    "process_leave_one_out": _process_leave_one_out,
    "prefix_tree": _prefix_tree,
    "optimal_token_baseline": _optimal_token_baseline,
    "segment_difference": _segment_difference,
    "discounted_return": _discounted_return,
    "gae": _gae,
}
"""The estimators of ``algorithm.advantage``, one group at a time."""


def _row_means(rows: Sequence[ShadowRow]) -> list[float]:
    return [float(row.advantage.mean()) for row in rows]


def _batch_centered(rows: Sequence[ShadowRow], _: AxisSettings) -> list[Tensor]:
    mean = level(_row_means(rows))
    return [row.advantage - mean for row in rows]


def _batch_std(rows: Sequence[ShadowRow], s: AxisSettings) -> list[Tensor]:
    values = [row.reward for row in rows] if s["of"] == "rewards" else _row_means(rows)
    spread = deviation(values, s["ddof"]) + s["eps"]
    return [row.advantage / (spread or 1.0) for row in rows]


def _sample_zscore(rows: Sequence[ShadowRow], s: AxisSettings) -> list[Tensor]:
    means = _row_means(rows)
    spread = deviation(means, s["ddof"]) + s["eps"]
    return [(row.advantage - level(means)) / (spread or 1.0) for row in rows]


def _token_zscore(rows: Sequence[ShadowRow], s: AxisSettings) -> list[Tensor]:
    tokens = torch.cat([row.advantage for row in rows]).tolist()
    spread = math.sqrt(max(deviation(tokens, s["ddof"]) ** 2 + s["eps"], s["floor"]))
    return [(row.advantage - level(tokens)) / (spread or 1.0) for row in rows]


def _valid_group_scale(rows: Sequence[ShadowRow], s: AxisSettings) -> list[Tensor]:
    alive = {row.group for row in rows if bool(row.advantage.any())}
    counted = [row.reward != 0 if s["of"] == "rewards" else row.group in alive for row in rows]
    factor = len(rows) / max(sum(counted), 1)
    return [row.advantage * factor for row in rows]


WHITENINGS = {
    "batch_centered": _batch_centered,
    "batch_std": _batch_std,
    "sample_zscore": _sample_zscore,
    "token_zscore": _token_zscore,
    "valid_group_scale": _valid_group_scale,
}
"""The functions of ``algorithm.whiten``, over the trained completions of the whole batch."""
