"""The data that functions of the objective may ask for by name, axis by axis.

``ratio``, ``surrogate``, ``reduce``, ``weight`` and ``multipliers`` read a micro-batch's ``Terms``; the
other axes read the classes below. What a class does not name, a config may not ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from covey.objective.loss import Estimated, Terms
from covey.types import StepRewards

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GroupData:
    """The scored completions of one prompt, for ``advantage``. G completions, T tokens, K rewards."""

    rewards: Tensor
    """(G,) float64: the weighted sum, a KL in the reward included."""
    components: Tensor
    """(K, G) float64: reward by reward; NaN where one does not apply."""
    weights: Tensor
    """(K,) float64, of the components."""
    lengths: Tensor
    """(G,) float64: trained tokens."""
    mask: Tensor
    """(G, T) bool: the trained tokens."""
    tokens: Tensor
    """(G, T) int64, -1 after a completion's end."""
    steps: Sequence[StepRewards]
    """Rewards by step, one entry a completion, where a reward gives them."""
    greedy_reward: float | None
    """Of a greedy completion, which is sampled if this is asked for."""
    old_logprobs: Tensor | None
    """(G, T) float32."""
    old_collision: Tensor | None
    """(G, T) float32: sum_v pi(v)^2."""


@dataclass(frozen=True)
class BatchData:
    """All trained completions of a rollout batch, for ``whiten``. N completions, T tokens."""

    advantages: Tensor
    """(N, T) float64."""
    mask: Tensor
    """(N, T) bool."""
    rewards: Tensor
    """(N,) float64."""
    group: Tensor
    """(N,) int64: the group of each completion."""


@dataclass(frozen=True)
class FilterData:
    """One scored group, for ``filter``."""

    rewards: Tensor
    """(G,) float64."""
    correct: Tensor
    """(G,) bool."""


@dataclass(frozen=True)
class MarkData:
    """The completions of an optimizer step before it, for ``mark``."""

    advantages: Tensor
    """(N, T) float32."""
    mask: Tensor
    """(N, T) bool."""
    rewards: Tensor
    """(N,) float64."""
    group: Tensor
    """(N,) int64."""
    sampler_logprobs: Tensor
    """(N, T) float32."""
    old_logprobs: Tensor | None
    """(N, T) float32."""
    old_entropy: Tensor | None
    """(N, T) float32."""
    old_collision: Tensor | None
    """(N, T) float32."""
    noise: Tensor | None
    """(N, T) float32, uniform in [0, 1)."""


_OF_LOSS = frozenset({f.name for f in fields(Terms)} | {"lengths", "log_ratio", "gap", "difference"})
OFFERED: Mapping[str, frozenset[str]] = {
    **{
        axis: frozenset(f.name for f in fields(kind))
        for axis, kind in {
            "advantage": GroupData,
            "whiten": BatchData,
            "filter": FilterData,
            "mark": MarkData,
            "estimator": Estimated,
        }.items()
    },
    **dict.fromkeys(("surrogate", "reduce", "weight", "multipliers"), _OF_LOSS),
    "ratio": _OF_LOSS - {"ratio"},
}
"""axis -> the names that its functions may ask for."""
