"""Credit finer than the completion: which token earned the reward.

Group functions, as in ``advantages``, that return (G, T): an advantage per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from covey.objective.advantages import centered, divided, standard_deviation
from covey.types import NonNegative, StepRewards

if TYPE_CHECKING:
    from torch import Tensor


def process_zscore(
    rewards: Tensor,
    mask: Tensor,
    steps: Sequence[StepRewards],
    *,
    credit: Literal["sum_to_go", "own_step", "min_form"] = "sum_to_go",
    ddof: Literal[0, 1] = 1,
    eps: NonNegative = 1e-4,
) -> Tensor:
    """Z-score all step rewards of the group together, then credit them to tokens. -> (G, T).

    ``sum_to_go``: A_t = sum of the normalised rewards of steps ending at or after t (DeepSeekMath,
    arXiv 2402.03300, 4.1.3): correct steps before a failure are punished too.
    ``own_step``: A_t = the normalised reward of the step t belongs to.
    ``min_form``: the worst step's reward up to its end, 0 after it (PURE, arXiv 2504.15275).
    Tokens after the last step get 0.
    """
    flat = rewards.new_tensor([value for s in steps for value in s.values])
    scores = divided(centered(flat), standard_deviation(flat, ddof) + eps)
    advantages = rewards.new_zeros(mask.shape)
    for row, s, own in zip(advantages, steps, scores.split([len(s.values) for s in steps]), strict=True):
        start = 0
        for value, end in zip(_credited(own, credit), s.ends, strict=True):
            row[start : end + 1] = value
            start = end + 1
    return advantages


def _credited(scores: Tensor, credit: str) -> Tensor:
    """(K,) normalised step rewards -> (K,) advantage of each step's tokens."""
    if credit == "own_step" or len(scores) == 0:
        return scores
    if credit == "min_form":
        worst = scores == scores.min()
        return scores.min() * (worst.flip(0).cumsum(0).flip(0) > 0)
    return scores.flip(0).cumsum(0).flip(0)


def prefix_values(rewards: Tensor, tokens: Tensor) -> Tensor:
    """V of every prefix: the mean reward of the completions that share it. (G, T) -> (G, T + 1).

    Column t is the value before token t; a completion that is alone on its branch has V = r.
    ``tokens`` (G, T) int64 hold -1 after a completion's end.
    """
    size, length = tokens.shape
    values = rewards[:, None].repeat(1, length + 1)
    values[:, 0] = rewards.mean()
    together = rewards.new_ones(size, size).bool()
    for t in range(length):
        together &= tokens[:, t, None] == tokens[None, :, t]
        count = together.sum(-1)
        if (count == 1).all():
            break  # everybody is alone from here on
        values[:, t + 1] = together.to(rewards.dtype) @ rewards / count
    return values


def prefix_tree(rewards: Tensor, tokens: Tensor, mask: Tensor, *, outcome: NonNegative = 0.0) -> Tensor:
    """A_t = V(prefix with token t) - V(prefix before it) + outcome (r_i - mean(r)).

    (G,), (G, T), (G, T) -> (G, T). The group's own completions form the tree, so no extra rollouts: the
    credit of a completion is where it leaves its siblings, and sums to r_i - mean(r) unless it is
    another one's beginning. TEMPO, 2509.18314, adds these differences to the outcome's (``outcome`` 1).
    """
    shifted = centered(rewards)
    values = prefix_values(shifted, tokens)
    return (values[:, 1:] - values[:, :-1] + outcome * shifted[:, None]) * mask


def segment_difference(segment_values: Tensor, segment: Tensor, mask: Tensor) -> Tensor:
    """A_t = V(end of t's segment) - V(its start). (G, K + 1), (G, T) int64 -> (G, T).

    ``segment_values[:, k]`` is the Monte-Carlo value before segment k (the mean reward of rollouts
    continued from there), the last known one being the completion's own reward; ``segment`` names
    each token's segment. VinePPO, arXiv 2410.01679; SPO, 2505.23564.
    """
    gain = segment_values[:, 1:] - segment_values[:, :-1]
    return gain.gather(1, segment) * mask


def optimal_token_baseline(
    rewards: Tensor, old_logprobs: Tensor, old_collision: Tensor, mask: Tensor
) -> Tensor:
    """A_t = r - sum_i r_i W_it / sum_i W_it, W_t = cumsum(1 - 2 pi + sum_v pi_v^2). -> (G, T).

    ``old_collision`` (G, T) is sum_v pi(v)^2. W is the squared norm of the score so far, so the
    baseline minimises the variance token by token. OTB, arXiv 2602.07078. Where one completion is
    longer than all others its own reward would be its baseline; there the group's mean is (verl: 0).
    """
    energy = (1 - 2 * old_logprobs.exp() + old_collision).clamp(min=0).where(mask, 0.0).cumsum(-1) * mask
    shifted = centered(rewards)[:, None]
    baseline = (shifted * energy).sum(0) / energy.sum(0).clamp(min=1e-12)
    return (shifted - baseline.where(mask.sum(0) > 1, 0.0)) * mask
