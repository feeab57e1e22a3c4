"""Advantages from rewards: one group at a time, then (optionally) across the batch.

A group function gets one group's data, of any size, and returns (G,): one advantage per
completion, or (G, T) per token. A batch function gets the broadcast (N, T) advantages of the whole
rollout batch. Rewards come as float64; equal rewards give exactly zero, tested by equality,
because the rounding of their mean would otherwise be divided by eps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from covey.objective.axis_function import declare
from covey.objective.setting import Setting
from covey_verify.types import Count, Fraction, NonNegative

if TYPE_CHECKING:
    from torch import Tensor

Single = Annotated[
    Literal["zero", "reward"],
    Setting("Advantage of a completion without siblings: zero, or its reward without a baseline (verl)."),
]
Ddof = Annotated[
    Literal[0, 1],
    Setting("1: the sample's standard deviation; 0: the population's, larger advantages in small groups."),
]
Eps = Annotated[
    NonNegative,
    Setting(
        "Added to the divisor: a larger value weakens groups whose rewards hardly differ.",
        usual="1e-8 to 1e-4",
        source="1e-4 in TRL, 1e-6 in verl, 1e-9 in OpenRLHF",
    ),
]


def centered(rewards: Tensor) -> Tensor:
    """r - mean(r) over the last dimension, exactly zero where all rewards are equal. (..., G)."""
    # Tested by equality: the mean of equal numbers may differ from them by rounding.
    unequal = (rewards != rewards[..., :1]).any(-1, keepdim=True)
    return (rewards - rewards.mean(-1, keepdim=True)).where(unequal, 0.0)


def standard_deviation(rewards: Tensor, ddof: int) -> Tensor:
    """sqrt(sum (r - mean)^2 / (G - ddof)) over the last dimension, kept; 0 for a single value."""
    freedom = max(rewards.shape[-1] - ddof, 1)
    return (centered(rewards).square().sum(-1, keepdim=True) / freedom).sqrt()


def divided(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 / 0 = 0: a group without spread and without eps has no signal."""
    return numerator / denominator.where(denominator != 0, 1.0)


# --- one group ------------------------------------------------------------------------------------


def reward(rewards: Tensor) -> Tensor:
    """A_i = r_i: no baseline. (G,) -> (G,). Williams 1992 (REINFORCE)."""
    return rewards.clone()


@declare("compares_siblings")
def group_centered(rewards: Tensor, *, single: Single = "zero") -> Tensor:
    """A_i = r_i - mean(r). (G,) -> (G,). Dr. GRPO, arXiv 2503.20783. ``single`` as for ``group_zscore``."""
    return rewards.clone() if _keeps_reward(rewards, single) else centered(rewards)


@declare("compares_siblings", "divides_by_std")
def group_zscore(rewards: Tensor, *, ddof: Ddof = 1, eps: Eps = 1e-4, single: Single = "zero") -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + eps). (G,) -> (G,). GRPO, arXiv 2402.03300.

    ``ddof`` 1 is the sample, 0 the population standard deviation; papers and codes differ. A completion
    without siblings gets 0; with ``single`` "reward" its mean is 0 and its std 1 (verl).
    """
    if _keeps_reward(rewards, single):
        return rewards / (1 + eps)
    return divided(centered(rewards), standard_deviation(rewards, ddof) + eps)


@declare("compares_siblings")
def leave_one_out(rewards: Tensor, *, single: Single = "zero") -> Tensor:
    """A_i = r_i - mean_{j != i} r_j = G/(G-1) (r_i - mean(r)). (G,) -> (G,). RLOO, 2402.14740.

    A completion without siblings gets 0, or its reward.
    """
    size = rewards.shape[-1]
    return (
        rewards.clone() if _keeps_reward(rewards, single) else centered(rewards) * (size / max(size - 1, 1))
    )


def _keeps_reward(rewards: Tensor, single: Single) -> bool:
    return single == "reward" and rewards.shape[-1] == 1


@declare("compares_siblings", "divides_by_std")
def leave_one_out_zscore(rewards: Tensor, *, eps: Eps = 1e-6) -> Tensor:
    """A_i = (r_i - mean_{j != i} r_j) / (std_{j != i} r_j + eps), undivided where that std is 0.

    (G,) -> (G,), the sample standard deviation. NeMo-RL's default for GRPO: with one
    success among four it gives +1 and three times -1/sqrt(3), not +1.5 and three times -.5.
    """
    size = rewards.shape[-1]
    # Row i of the (G, G - 1) siblings holds all rewards but the i-th.
    others = rewards.new_ones(size, size).fill_diagonal_(0).bool()
    siblings = rewards.expand(size, size)[others].view(size, size - 1)
    std = standard_deviation(siblings, 1)[:, 0]
    return leave_one_out(rewards) / (std + eps).where(std > 0, 1.0)


@declare("compares_siblings")
def length_weighted(rewards: Tensor, lengths: Tensor, *, single: Single = "zero") -> Tensor:
    """A_i = r_i - sum_j |y_j| r_j / sum_j |y_j|. (G,), (G,) -> (G,). OPO, arXiv 2505.23585.

    The variance-minimising baseline when a completion's squared gradient grows with its length.
    """
    if _keeps_reward(rewards, single):
        return rewards.clone()
    # The baseline of centred rewards differs by the mean alone, and equal rewards give exactly 0.
    shifted = centered(rewards)
    return shifted - (lengths * shifted).sum() / lengths.sum().clamp(min=1)


@declare("compares_siblings")
def mean_normalized(rewards: Tensor, *, eps: Eps = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r)) / (mean(r) + eps), 0 where mean(r) <= 0. MaxRL, arXiv 2602.02710.

    (G,) -> (G,), rewards >= 0. For rewards 0 and 1 the expected gradient is exactly d log p(correct)
    truncated after G - 1 terms (the paper's order G also needs the baseline in all-incorrect groups).
    """
    mean = rewards.mean()
    return divided(centered(rewards) * (mean > 0), mean.clamp(min=0) + eps)


def greedy_baseline(rewards: Tensor, greedy_reward: float) -> Tensor:
    """A_i = r_i - r(greedy completion). (G,) -> (G,). ReMax, arXiv 2310.10505.

    0 where the greedy completion could not be judged (its reward is NaN).
    """
    return (rewards - greedy_reward).nan_to_num(0.0)


Decay = Annotated[Fraction, Setting("Fraction of the running mean that is kept at each reward.")]
RoleColumn = Annotated[
    str | None, Setting("Column with the role of a problem, for a mean by role; none: one mean.")
]


def running_baseline(
    rewards: Tensor,
    running_mean: Tensor,
    *,
    # Read where the mean is kept: rollouts/finish.py.
    decay: Decay = 0.95,
    by: RoleColumn = None,
) -> Tensor:
    """A_i = r_i - b_i, b the running mean of earlier rewards: b <- decay b + (1 - decay) r. (G,) -> (G,).

    There is one mean for each value of the problems' column ``by``, such as a role in self-play. It begins at
    0 and includes the rewards before the completion, in the order of sampling. RAE, SPIRAL, arXiv 2506.24119.
    """
    return rewards - running_mean


def running_means(rewards: Tensor, mean: float, decay: float) -> tuple[Tensor, float]:
    """Return the running mean before each reward, and after the last one. (G,) -> (G,), b.

    A reward that is NaN leaves the mean unchanged.
    """
    # before[i] holds the mean of everything before completion i.
    before = rewards.new_zeros(len(rewards))
    for i, reward in enumerate(rewards.tolist()):
        before[i] = mean
        mean = mean if math.isnan(reward) else decay * mean + (1 - decay) * reward
    return before, mean


@declare("compares_siblings")
def length_penalized(
    rewards: Tensor,
    lengths: Tensor,
    *,
    weight: Annotated[NonNegative, Setting("Penalty of the longest completion of a solved group.")] = 0.25,
) -> Tensor:
    """A_i = s_i - mean(s), s_i = r_i - weight mean(r) |y_i| / max |y|. (G,), (G,) -> (G,).

    Brevity counts in proportion to the group's pass rate: not at all where nothing is solved. As in prime-rl.
    """
    return centered(rewards - weight * rewards.mean() * lengths / lengths.max().clamp(min=1))


@declare("compares_siblings", "divides_by_std")
def pass_at_k(
    rewards: Tensor,
    *,
    k: Annotated[
        Count, Setting("K of the trained objective, the best of K; at most rollout.group_size.")
    ] = 4,
    eps: Eps = 1e-6,
) -> Tensor:
    """A_i = (E[max of k | i among them] - E[max of k]) / (std[max of k] + eps), over all subsets of k.

    (G,) -> (G,). Rewards the best of k instead of each completion: a correct completion is worth less
    if k samples would contain one anyway. Pass@k Training, arXiv 2508.10751; for rewards
    0 and 1 its closed form.
    """
    ordered, order = centered(rewards).sort()
    size = len(rewards)
    k = min(k, size)
    # Subsets of k in which completion j of the order is the best, and those in which i < j is there as well.
    subsets_led = rewards.new_tensor([math.comb(j, k - 1) for j in range(size)])
    subsets_led_with_i = rewards.new_tensor(
        [math.comb(j - 1, k - 2) if min(j, k - 1) else 0 for j in range(size)]
    )
    mean = (ordered * subsets_led).sum() / math.comb(size, k)
    std = ((ordered - mean).square() * subsets_led).sum().div(math.comb(size, k)).sqrt()
    # Reversed cumulative sum without its own term: sum_{j > i} of r_j times the subsets with i that j leads.
    led_by_others = (ordered * subsets_led_with_i).flip(0).cumsum(0).flip(0) - ordered * subsets_led_with_i
    # E[max of k | i among them]: C(G - 1, k - 1) subsets of k hold completion i.
    among = (ordered * subsets_led + led_by_others) / math.comb(size - 1, k - 1)
    # Back from sorted order to the completions' own.
    return rewards.new_zeros(size).index_put((order,), divided((among - mean) * (std > 0), std + eps))


@declare("compares_siblings", "divides_by_std")
def component_zscore(
    components: Tensor,
    weights: Tensor,
    *,
    ddof: Ddof = 1,
    eps: Eps = 1e-4,
    single: Single = "zero",
) -> Tensor:
    """A_i = sum_k w_k (r_ik - mean_k) / (std_k + eps): each reward normalised before the sum.

    components (K, G), NaN where a reward does not apply, weights (K,) -> (G,). GDPO, arXiv 2601.05242; its
    second step is a batch z-score, over samples (the TRL fork) or over tokens (the verl fork).
    """
    zscore = partial(group_zscore, ddof=ddof, eps=eps, single=single)
    return _by_component(components, weights, zscore)


@declare("compares_siblings", "divides_by_std")
def component_leave_one_out(components: Tensor, weights: Tensor, *, eps: Eps = 1e-6) -> Tensor:
    """A_i = sum_k w_k (r_ik - mean_{-i} r_k) / (std_{-i} r_k + eps). (K, G), (K,) -> (G,).

    GDPO as in NeMo-RL: mean and std of the siblings, see ``leave_one_out_zscore``.
    """
    return _by_component(components, weights, lambda values: leave_one_out_zscore(values, eps=eps))


def _by_component(components: Tensor, weights: Tensor, advantage: Callable[[Tensor], Tensor]) -> Tensor:
    total = components.new_zeros(components.shape[-1])
    for values, weight in zip(components, weights, strict=True):
        applies = ~values.isnan()
        if applies.any():  # a reward may apply to no completion of a row
            total[applies] += weight * advantage(values[applies])
    return total


# --- the whole rollout batch ----------------------------------------------------------------------


def _beyond_rounding(mean: Tensor, values: Tensor) -> Tensor:
    """Return a mean of float64 values, 0 if only rounding keeps it from 0: without signal it stays 0."""
    return mean.where(mean.abs() > 1e-14 * values.abs().max(), 0.0)


def batch_centered(advantages: Tensor, mask: Tensor) -> Tensor:
    """A - mean(A) over all completions. (N, T), (N, T) -> (N, T). REINFORCE with a batch baseline."""
    # One value per completion, so that long completions do not weigh more.
    values = per_completion(advantages, mask)
    mean = _beyond_rounding(values.mean(), values)
    return (advantages - mean).where(mask & (values != values[:1]).any(), 0.0)


def batch_std(
    advantages: Tensor,
    mask: Tensor,
    rewards: Tensor,
    *,
    of: Annotated[
        Literal["rewards", "advantages"],
        Setting("Divisor: the standard deviation of the raw or of the centred rewards."),
    ] = "rewards",
    ddof: Ddof = 1,
    eps: Eps = 1e-4,
) -> Tensor:
    """Divide by one standard deviation over all completions. (N, T), (N, T), (N,) -> (N, T).

    ``of="rewards"``: the raw rewards, spread between prompts included (Lite PPO, arXiv 2508.08221).
    ``of="advantages"``: the centred ones (ScaleRL, 2510.13786; REINFORCE++-baseline in ms-swift).
    """
    values = rewards if of == "rewards" else per_completion(advantages, mask)
    return divided(advantages, standard_deviation(values, ddof) + eps)


def sample_zscore(advantages: Tensor, mask: Tensor, *, ddof: Ddof = 1, eps: Eps = 1e-4) -> Tensor:
    """(A - mean) / (std + eps) with the mean and std over completions. (N, T), (N, T) -> (N, T).

    GDPO's second step in the authors' TRL fork.
    """
    std = standard_deviation(per_completion(advantages, mask), ddof)
    return divided(batch_centered(advantages, mask), std + eps)


def token_zscore(
    advantages: Tensor,
    mask: Tensor,
    *,
    ddof: Ddof = 1,
    eps: Eps = 1e-8,
    floor: Annotated[
        NonNegative, Setting("Lower bound of the variance, for codes with a floor instead of eps.")
    ] = 0.0,
) -> Tensor:
    """(A - mean) / sqrt(max(var + eps, floor)) over all trained tokens: long completions weigh more.

    (N, T), (N, T) -> (N, T). REINFORCE++, arXiv 2501.03262; GDPO's second step in the verl fork. Frameworks
    add eps to the variance (verl) or keep it above a floor (OpenRLHF, NeMo-RL).
    """
    values = advantages[mask]
    centre = (values - _beyond_rounding(values.mean(), values)).where((values != values[:1]).any(), 0.0)
    # (tokens,) back to (N, T), 0 off the mask.
    shifted = advantages.new_zeros(mask.shape).masked_scatter(mask, centre)
    variance = (standard_deviation(values, ddof).square() + eps).clamp(min=floor)
    return divided(shifted, variance.sqrt())


def valid_group_scale(
    advantages: Tensor,
    mask: Tensor,
    group: Tensor,
    rewards: Tensor,
    *,
    of: Annotated[
        Literal["groups", "rewards"],
        Setting(
            "Completions with a signal: in groups whose rewards differ, or with a reward other than 0 (verl)."
        ),
    ] = "groups",
) -> Tensor:
    """Multiply by N / (completions in groups that carry a signal). (N, T) -> (N, T).

    ``group`` (N,) int64 numbers each completion's group. GPG, arXiv 2504.02546; verl counts the completions
    whose reward is not 0 (``of="rewards"``).
    """
    if of == "rewards":
        return advantages * len(rewards) / (rewards != 0).sum().clamp(min=1)
    # A group carries a signal if any of its completions has a nonzero advantage.
    signal = advantages.abs().where(mask, 0.0).sum(-1)
    per_group = signal.new_zeros(int(group.max()) + 1).index_add(0, group, signal)
    alive = (per_group[group] != 0).sum()
    return advantages * len(group) / alive.clamp(min=1)


def per_completion(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each completion's trained tokens. (N, T), (N, T) -> (N,).

    It is the first value plus the mean distance from it, so that equal values have exactly their mean.
    """
    # argmax of a mask is its first true place.
    first = values.gather(-1, mask.int().argmax(-1, keepdim=True))
    distance = (values - first).where(mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    return first[:, 0] + distance
