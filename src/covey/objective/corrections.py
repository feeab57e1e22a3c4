"""Importance corrections for a sampler that gives tokens other probabilities than the trainer.

``mismatch`` is old_logprobs - sampler_logprobs, (N, T), zero off the mask: positive where the trainer
finds the token likelier than the sampler did. The corrections are detached and multiply the
policy term only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from covey.objective.ratios import clamp_log_ratio, sequence
from covey.objective.setting import Setting
from covey_verify.types import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

CorrectionLevel = Annotated[
    Literal["token", "sequence"], Setting("For each token, or their product over the completion.")
]


def truncated(
    mismatch: Tensor,
    *,
    cap: Annotated[Positive, Setting("Upper bound of the weight trainer / sampler.", usual="2 to 5")] = 2.0,
    level: CorrectionLevel = "token",
) -> Tensor:
    """min(e^mismatch, cap), by token or by the product over the sequence. (N, T) -> (N, T). TIS."""
    return _at_level(mismatch, level).exp().clamp(max=cap)


def masked(
    mismatch: Tensor,
    *,
    low: Annotated[NonNegative, Setting("Weights below this become 0.")] = 0.5,
    high: Annotated[Positive, Setting("Weights above this become 0.")] = 5.0,
    level: CorrectionLevel = "token",
) -> Tensor:
    """e^mismatch inside [low, high], 0 outside. (N, T) -> (N, T). MIS; by token, IcePop (.5, 5).

    By sequence the raw product is used: long completions fall out more often.
    """
    weight = _at_level(mismatch, level).exp()
    return weight * ((weight >= low) & (weight <= high))


def geometric_mask(
    mismatch: Tensor,
    mask: Tensor,
    *,
    low: Annotated[NonNegative, Setting("Completions with a smaller mean weight are left out.")] = 0.999,
    high: Annotated[Positive, Setting("Completions with a larger mean weight are left out.")] = 1.001,
) -> Tensor:
    """1 for completions whose exp(mean mismatch) lies in [low, high], else 0. (N, T) -> (N, T).

    The bounds hold for trainer / sampler (verl's k1 filter applies them to the inverse).
    """
    weight = sequence(mismatch, mask)
    return ((weight >= low) & (weight <= high)).to(mismatch.dtype)


def decoupled(mismatch: Tensor) -> Tensor:
    """e^mismatch without a cap: the sampler's data, the old policy's trust region. AReaL, 2505.24298."""
    return mismatch.exp()


def off_policy_mask(
    mismatch: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    delta: Annotated[
        Positive,
        Setting(
            "Completions with A < 0 that drifted further, nats per token, are left out.",
            trl="off_policy_mask_threshold",
        ),
    ] = 0.5,
) -> Tensor:
    """0 for completions with A < 0 and mean(sampler - current) > delta, else 1. (N, T) -> (N, T).

    OPSM, DeepSeek-V3.2: negative samples that have become unlikely only do harm.
    """
    # mismatch + log_ratio = log pi - log of the sampler's probability; 0 off the mask.
    drift = -(mismatch + log_ratio.detach()).sum(-1, keepdim=True)
    drift = drift / mask.sum(-1, keepdim=True).clamp(min=1)
    # The sign of the sum: a completion's tokens may have different advantages.
    drop = (drift > delta) & (advantages.sum(-1, keepdim=True) < 0)
    return (~drop).to(mismatch.dtype).expand_as(mismatch)


def _at_level(mismatch: Tensor, level: str) -> Tensor:
    """Return the mismatch itself, or its sum over the completion at every token. (N, T) -> (N, T)."""
    if level == "sequence":
        mismatch = mismatch.sum(-1, keepdim=True).expand_as(mismatch)
    return clamp_log_ratio(mismatch)
