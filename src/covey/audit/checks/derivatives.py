"""Explanations of a loss whose derivative by the log-probs is not the expected one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from covey.audit.checks.variations import TINY, LossCase, varied

COMMON_PART = 0.02
"""Part of the tokens with a gradient that is more than rounding to 0."""


def _lacks_kl(case: LossCase) -> bool:
    return case.algorithm.kl is not None and case.is_along(varied(case, kl=None))


def _skips_tokens(case: LossCase) -> bool:
    if case.gradients is None:
        return False
    # A completion without any gradient is clipped, or left out as a whole.
    kept = (case.gradients != 0).any(-1, keepdim=True)
    return _is_common((case.gradients == 0) & (case.derivative != 0) & kept, case.derivative != 0)


def _weighs_otherwise(case: LossCase) -> bool:
    """Whether each completion's gradients are the expected ones, times a number of its own."""
    if case.gradients is None:
        return False
    sides = (case.gradients, case.derivative)
    lengths = [side.norm(dim=-1, keepdim=True).clamp(min=TINY) for side in sides]
    first, second = (side / length for side, length in zip(sides, lengths, strict=True))
    return bool(((first - second).norm(dim=-1) <= COMMON_PART).all())


def _is_multiple(case: LossCase) -> bool:
    return replace(case, is_scaled=True).is_along(case)


def _lacks_gains(case: LossCase) -> bool:
    """Whether no token with a positive advantage has a gradient, though it should have one."""
    if case.gradients is None:
        return False
    gains = (case.inputs.advantages > 0) & (case.derivative != 0)
    losses = (case.inputs.advantages < 0) & (case.derivative != 0)
    return (
        _is_common(gains, case.inputs.mask)
        and not case.gradients[gains].any()
        and bool(case.gradients[losses].any())
    )


def _reaches_beyond(case: LossCase) -> bool:
    return case.gradients is not None and _is_common(
        (case.gradients != 0) & ~case.inputs.mask, case.inputs.mask
    )


def _is_common(tokens: Tensor, trained: Tensor) -> bool:
    return int(tokens.sum()) > COMMON_PART * int(trained.sum())


DERIVATIVES: tuple[tuple[str, Callable[[LossCase], bool]], ...] = (
    ("the KL has no gradient in the loss, so that it holds nothing", _lacks_kl),
    ("completions with a positive advantage have no gradient", _lacks_gains),
    ("tokens of the mask have no gradient", _skips_tokens),
    ("tokens beyond the mask have a gradient", _reaches_beyond),
    ("the gradient is a multiple of that of the loss of the settings", _is_multiple),
    ("completions have other weights than the mean of the settings gives them", _weighs_otherwise),
    (
        "tokens have another gradient than that of the loss of the settings",
        lambda case: not case.is_along(case),
    ),
)
