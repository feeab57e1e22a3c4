"""Group filters: whether a scored group is worth training on. Data by name, (G,) rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.types import Share

if TYPE_CHECKING:
    from torch import Tensor


def informative(rewards: Tensor) -> bool:
    """Whether the rewards differ at all: a tied group has zero gradient. DAPO, arXiv 2503.14476."""
    return bool((rewards != rewards[:1]).any())


def pass_rate_band(rewards: Tensor, *, low: Share = 0.0, high: Share = 1.0, threshold: float = 0.5) -> bool:
    """Whether low < share of rewards > threshold < high. PRIME: [.2, .8]; ScaleRL: high .9."""
    rate = float((rewards > threshold).double().mean())
    return low < rate < high
