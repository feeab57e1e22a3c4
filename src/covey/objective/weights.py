"""Rollout weights: what to do where sampler and trainer disagree about a token's probability.

``gap`` is old_logprobs - sampler_logprobs, (N, T), zero off the mask: positive where the trainer
finds the token likelier than the sampler did. The weights are detached and multiply the policy
term only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from covey.objective.ratios import bounded, sequence
from covey.types import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


def truncated(gap: Tensor, *, cap: Positive = 2.0, level: Literal["token", "sequence"] = "token") -> Tensor:
    """min(e^gap, cap), by token or by the product over the sequence. (N, T) -> (N, T). TIS."""
    return at_level(gap, level).exp().clamp(max=cap)


def masked(
    gap: Tensor,
    *,
    low: NonNegative = 0.5,
    high: Positive = 5.0,
    level: Literal["token", "sequence"] = "token",
) -> Tensor:
    """e^gap inside [low, high], 0 outside. (N, T) -> (N, T). MIS; by token, IcePop (.5, 5).

    By sequence the raw product is used: long completions fall out more often.
    """
    weight = at_level(gap, level).exp()
    return weight * ((weight >= low) & (weight <= high))


def geometric_mask(gap: Tensor, mask: Tensor, *, low: NonNegative = 0.999, high: Positive = 1.001) -> Tensor:
    """1 for completions whose exp(mean gap) lies in [low, high], else 0. (N, T) -> (N, T).

    The bounds hold for trainer / sampler (verl's k1 filter applies them to the inverse).
    """
    weight = sequence(gap, mask)
    return ((weight >= low) & (weight <= high)).to(gap.dtype)


def decoupled(gap: Tensor) -> Tensor:
    """e^gap without a cap: the sampler's data, the old policy's trust region. AReaL, 2505.24298."""
    return gap.exp()


def off_policy_mask(
    gap: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, delta: Positive = 0.5
) -> Tensor:
    """0 for completions with A < 0 and mean(sampler - current) > delta, else 1. (N, T) -> (N, T).

    OPSM, DeepSeek-V3.2: negative samples that have become unlikely only do harm.
    """
    drift = -(gap + log_ratio.detach()).sum(-1, keepdim=True)
    drift = drift / mask.sum(-1, keepdim=True).clamp(min=1)
    drop = (drift > delta) & (advantages.sum(-1, keepdim=True) < 0)
    return (~drop).to(gap.dtype).expand_as(gap)


def at_level(gap: Tensor, level: str) -> Tensor:
    """The gap itself, or its sum over the completion on every token. (N, T) -> (N, T)."""
    if level == "sequence":
        gap = gap.sum(-1, keepdim=True).expand_as(gap)
    return bounded(gap)
