"""Credit assignment finer than the completion: which tokens earned the reward.

These are group functions, like ``advantages``'s, but return (G, T): an advantage per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

from covey.objective.advantages import Ddof, Eps, centered, group_zscore, leave_one_out
from covey.objective.axis_function import declare
from covey.objective.setting import Setting
from covey.objective.token_weights import discounted_sum
from covey.objective.value import gae
from covey_verify.types import Count, Fraction, NonNegative, StepRewards

if TYPE_CHECKING:
    from torch import Tensor


@declare("divides_by_std")
def process_zscore(
    components: Tensor,
    weights: Tensor,
    mask: Tensor,
    steps: Sequence[Sequence[StepRewards]],
    *,
    credit: Annotated[
        Literal["sum_to_go", "own_step", "min_form"],
        Setting("Credit of a step's reward: to it and earlier steps, to it alone, or only the worst step's."),
    ] = "sum_to_go",
    ddof: Ddof = 1,
    eps: Eps = 1e-4,
) -> Tensor:
    """sum_k w_k A^k: each function's step rewards, or values, z-scored over the group. -> (G, T).

    components (K, G), weights (K,), steps (K, G). The value of a function without steps is z-scored
    as in GRPO and goes to every token. All step rewards of one function are z-scored together, then credited
    to tokens by ``credit``:

    ``sum_to_go``: A_t = sum of the normalised rewards of steps ending at or after t (DeepSeekMath,
    arXiv 2402.03300, 4.1.3): correct steps before a failure are punished too.
    ``own_step``: A_t = the normalised reward of the step t belongs to.
    ``min_form``: the worst step's reward up to its end, 0 after it (PURE, arXiv 2504.15275).
    Tokens after the last step get 0.
    """
    total = components.new_zeros(mask.shape)
    for values, weight, step_rewards in zip(components, weights, steps, strict=True):
        if not step_rewards:  # a function that scores whole completions
            applies = ~values.isnan()
            total[applies] += weight * group_zscore(values[applies], ddof=ddof, eps=eps)[:, None]
            continue
        # (S,) the step rewards of all completions, one after another.
        flat = values.new_tensor([value for s in step_rewards for value in s.values])
        scores = weight * group_zscore(flat, ddof=ddof, eps=eps)
        parts = scores.split([len(s.values) for s in step_rewards])
        for row, s, part in zip(total, step_rewards, parts, strict=True):
            _add_by_segment(row, _step_advantages(part, credit), s.ends)
    return total * mask


def process_leave_one_out(
    components: Tensor,
    weights: Tensor,
    mask: Tensor,
    steps: Sequence[Sequence[StepRewards]],
    *,
    gamma: Annotated[Fraction, Setting("Discount of the rewards of later steps.")] = 1.0,
) -> Tensor:
    """sum_k w_k A^k: dense rewards and outcomes, each minus the mean of the other completions. -> (G, T).

    For a function with steps: A_t = sum of gamma^n (r - mean of the siblings' mean step reward) over the
    steps ending at or after t, n later each. For any other: r_i - mean_{j != i} r_j, on every token. PRIME,
    arXiv 2502.01456, with its discount by step. A completion without siblings is its own baseline.
    """
    total = components.new_zeros(mask.shape)
    for values, weight, step_rewards in zip(components, weights, steps, strict=True):
        if not step_rewards:  # a function that scores whole completions
            applies = ~values.isnan()
            total[applies] += weight * leave_one_out(values[applies])[:, None]
            continue
        # The first reward is subtracted from all, so that equal rewards give exactly 0.
        first = next((s.values[0] for s in step_rewards if s.values), 0.0)
        shifted = [values.new_tensor(s.values) - first for s in step_rewards]
        # Mean step reward of each completion that has steps.
        means = values.new_tensor([float(r.mean()) for r in shifted if len(r)])
        count = max(len(means) - 1, 1)
        for row, s, r in zip(total, step_rewards, shifted, strict=True):
            # The mean of the siblings' means. Where r is empty it is NaN, and no step reads it.
            baseline = (means.sum() - r.mean()) / count if len(r) and len(means) > 1 else r.mean()
            _add_by_segment(row, weight * discounted_sum(r - baseline, gamma), s.ends)
    return total * mask


def _add_by_segment(row: Tensor, values: Iterable[Tensor | float], ends: Sequence[int]) -> None:
    """Add a value to the tokens of each segment, from the end of the one before to its own last token."""
    start = 0
    for value, end in zip(values, ends, strict=True):
        row[start : end + 1] += value
        start = end + 1


def _step_advantages(scores: Tensor, credit: str) -> Tensor:
    """Return the advantage of each step's tokens, (K,), from the normalised step rewards, (K,)."""
    if credit == "own_step" or len(scores) == 0:
        return scores
    if credit == "min_form":
        worst = scores == scores.min()
        # The reversed cumulative sum is positive up to the last step with the worst reward.
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
        # together[i, j]: completions i and j agree on all tokens up to t. After an end both hold -1.
        together &= tokens[:, t, None] == tokens[None, :, t]
        count = together.sum(-1)
        if (count == 1).all():
            break  # every completion is alone on its branch from here on
        # (G, G) @ (G,): the sum of the rewards of completions that share the prefix.
        values[:, t + 1] = together.to(rewards.dtype) @ rewards / count
    return values


@declare("compares_siblings")
def prefix_tree(
    rewards: Tensor,
    tokens: Tensor,
    mask: Tensor,
    *,
    outcome: Annotated[
        NonNegative, Setting("Weight of the outcome's advantage, which is added; 1 is TEMPO.")
    ] = 0.0,
) -> Tensor:
    """A_t = V(prefix with token t) - V(prefix before it) + outcome (r_i - mean(r)).

    (G,), (G, T), (G, T) -> (G, T). The group's own completions form the tree, so that no extra rollouts are
    needed. A completion gets its credit where it leaves its siblings; the credit sums to r_i - mean(r) unless
    the completion is the beginning of another. TEMPO, 2509.18314, adds these differences to the outcome's
    (``outcome`` 1).
    """
    shifted = centered(rewards)
    values = prefix_values(shifted, tokens)
    return (values[:, 1:] - values[:, :-1] + outcome * shifted[:, None]) * mask


Continuations = Annotated[
    Count, Setting("Completions sampled from each split point; more: less noise, more cost.")
]
Segments = Annotated[
    Literal["lines", "paragraphs", "numbered", "code_blocks", "tokens", "unlikely"],
    Setting("Split points of completions: by their text, into equal parts, or before unlikely tokens."),
]
MostSegments = Annotated[Count, Setting("Segments of a completion, at most.")]


def segment_difference(
    rewards: Tensor,
    segments: Sequence[StepRewards],
    mask: Tensor,
    *,
    # Read where continuations are sampled: rollouts/segments.py.
    continuations: Continuations = 4,
    split_by: Segments = "lines",
    most: MostSegments = 6,
) -> Tensor:
    """A_t = V(end of t's segment) - V(its start), V the mean reward of continuations sampled from there.

    (G,), ``segments`` (G,) with V after each segment but the last -> (G, T). V of the prompt is the group's
    mean, V of the whole completion its reward, so that the gains sum to r_i - mean(r). VinePPO, arXiv
    2410.01679 (9 continuations at every step); SPO, 2505.23564 (segments at unlikely tokens).
    """
    gains = rewards.new_zeros(mask.shape)
    mean = rewards[0] + (rewards - rewards[0]).mean()  # the mean of equal rewards is exactly their value
    for row, reward, parts in zip(gains, rewards, segments, strict=True):
        # The last segment ends with the row and its value is the completion's reward.
        values = (mean, *parts.values, reward)
        differences = [after - before for before, after in pairwise(values)]
        _add_by_segment(row, differences, (*parts.ends, mask.shape[-1] - 1))
    return gains * mask


def discounted_return(
    token_rewards: Tensor,
    mask: Tensor,
    *,
    gamma: Annotated[Fraction, Setting("Discount of later rewards, by token.")] = 1.0,
) -> Tensor:
    """A_t = sum_k gamma^k r_{t+k} over the trained tokens from t on. (G, T), (G, T) -> (G, T).

    A later reward counts less, without a critic; gamma 1 is ``advantages.reward``. A KL by token in the
    reward is part of r. REINFORCE++, arXiv 2501.03262, and OpenRLHF's reinforce with a gamma below 1.
    """
    # With values of 0 and lam 1, GAE is the discounted return.
    return gae(token_rewards, token_rewards.new_zeros(mask.shape), mask, gamma=gamma, lam=1.0)


@declare("compares_siblings")
def optimal_token_baseline(
    rewards: Tensor, old_logprobs: Tensor, old_collision: Tensor, mask: Tensor
) -> Tensor:
    """A_t = r - sum_i r_i W_it / sum_i W_it, W_t = cumsum(1 - 2 pi + sum_v pi_v^2). -> (G, T).

    ``old_collision`` (G, T) is sum_v pi(v)^2. W is the squared norm of the score so far, so the
    baseline minimises the variance token by token. OTB, arXiv 2602.07078. At tokens that only one completion
    reaches, its own reward would be the baseline; the group's mean takes its place (verl: 0).
    """
    # W_t of trained tokens only; at least 0, which rounding could fall below.
    energy = (1 - 2 * old_logprobs.exp() + old_collision).clamp(min=0).where(mask, 0.0).cumsum(-1) * mask
    shifted = centered(rewards)[:, None]
    baseline = (shifted * energy).sum(0) / energy.sum(0).clamp(min=1e-12)
    return (shifted - baseline.where(mask.sum(0) > 1, 0.0)) * mask
