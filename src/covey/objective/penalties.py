"""The pull towards the reference policy: estimators of KL(pi || ref) and how they act.

``ref_log_ratio`` is log pi - log ref, (N, T), zero off the mask. Value and gradient are separate
questions (arXiv 2506.09477, 2510.01555): on-policy, the expected gradient of k1 as a loss is zero,
that of k3 is the forward KL's, that of k2 and of ratio-weighted k3 the reverse KL's; k1 in the
reward gives the exact policy gradient of the reverse KL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from covey.objective.bound import Bound, bind
from covey.objective.ratios import LOG_RATIO_LIMIT
from covey_verify.types import Count, NonNegative, Positive, Share

if TYPE_CHECKING:
    from torch import Tensor

    from covey.objective.data import KLData

Estimator: TypeAlias = "Bound[KLData, Tensor]"
"""A string, because configs evaluate the annotations of ``KL`` without loading torch."""


def k1(ref_log_ratio: Tensor) -> Tensor:
    """log pi - log ref: unbiased, may be negative. (N, T) -> (N, T)."""
    return ref_log_ratio


def k2(ref_log_ratio: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2: biased, low variance. (N, T) -> (N, T)."""
    return ref_log_ratio.square() / 2


def k3(ref_log_ratio: Tensor) -> Tensor:
    """exp(-d) + d - 1 with d = log pi - log ref: unbiased, never negative. (N, T) -> (N, T).

    Schulman 2020; GRPO, arXiv 2402.03300. d below -``LOG_RATIO_LIMIT`` counts as that, so that the
    exponential stays finite; above, it grows linearly and needs no bound.
    """
    d = ref_log_ratio.clamp(min=-LOG_RATIO_LIMIT)
    return (-d).expm1() + d


def absolute(ref_log_ratio: Tensor) -> Tensor:
    """abs(log pi - log ref). (N, T) -> (N, T)."""
    return ref_log_ratio.abs()


def full(full_kl: Tensor) -> Tensor:
    """sum_v pi(v) (log pi(v) - log ref(v)): exact, over the whole vocabulary. (N, T) -> (N, T)."""
    return full_kl


@dataclass(frozen=True)
class KL:
    """One reading of "KL to the reference": what is estimated, where it acts, how it is differentiated."""

    estimator: Estimator = field(default_factory=lambda: bind(k3))
    coef: NonNegative = 0.001
    """Weight of the penalty; the start value where ``target`` is set."""
    place: Literal["loss", "reward"] = "loss"
    """``reward``: taken from it, detached: by response before the baseline; by token after it, each
    token bearing what it and all later ones cost."""
    level: Literal["token", "response"] = "token"
    """``response``: the log-ratios of a completion are summed before the estimator."""
    gradient: Literal["formula", "straight_through", "ratio", "score"] = "formula"
    """``straight_through``: the value's, with k2's gradient. ``ratio``: multiplied by the ratio; ``score``:
    by pi / sg(pi), which is 1 and adds the gradient of having been sampled."""
    bound: Positive | None = None
    """Largest size of a token's penalty; beyond it there is no gradient. 10 in verl, OpenRLHF, NeMo-RL."""
    to: Literal["reference", "sampler"] = "reference"
    """``sampler``: to the policy that sampled, which needs no reference: prime-rl, with k2 and 2e-3."""
    target: Positive | None = None
    """Adaptive: the coefficient is steered so that KL per completion, in nats, stays here."""
    horizon: Count = 10_000
    """Adaptive: completions over which a deviation acts."""
    refresh_every: Count | None = None
    """Updates after which the reference moves to the policy, at the end of their step; R1 used 400."""
    refresh_mix: Share = 1.0
    """How far it moves: 1 copies the policy, less mixes it in."""


def at_level(ref_log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """The log-ratio to the reference per token, or its sum over the response on each. (N, T)."""
    return ref_log_ratio.sum(-1, keepdim=True) * mask if level == "response" else ref_log_ratio


def with_gradient(
    value: Tensor, ref_log_ratio: Tensor, ratio: Tensor, mode: str, bound: float | None = None
) -> Tensor:
    """A bounded KL value with its own gradient, k2's, or that of value times a ratio. (N, T) -> (N, T)."""
    if mode == "straight_through":
        gradient = k2(ref_log_ratio)
        return bounded_value(value, bound).detach() + gradient - gradient.detach()
    weight = {"ratio": ratio, "score": (ref_log_ratio - ref_log_ratio.detach()).exp()}.get(mode)
    return bounded_value(value if weight is None else value * weight, bound)


def bounded_value(value: Tensor, bound: float | None) -> Tensor:
    """A penalty within [-bound, bound]."""
    return value if bound is None else value.clamp(-bound, bound)
