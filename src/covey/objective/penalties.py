"""The KL penalty towards the reference policy, its estimators and gradients, and the entropy bonus.

``ref_log_ratio`` is log pi - log ref, (N, T), zero off the mask. Value and gradient are separate
questions (arXiv 2506.09477, 2510.01555). On-policy and in the loss, the expected gradient is zero for k1,
the forward KL's for k3, and the reverse KL's for k2 and ratio-weighted k3. k1 in the reward gives
the exact policy gradient of the reverse KL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from covey.objective.axis_function import AxisFunction, bind
from covey.objective.ratios import LOG_RATIO_LIMIT
from covey.objective.setting import Setting
from covey_verify.types import Count, Fraction, NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from covey.objective.data import KLData

Estimator: TypeAlias = "AxisFunction[KLData, Tensor]"
"""The type is a string, because configs evaluate the annotations of ``KL`` without loading torch."""


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
    """One meaning of "KL to the reference": its estimator, the place where it acts, and its gradient."""

    estimator: Annotated[Estimator, Setting("k1, k2, k3, absolute or full: see docs/algorithms/kl.md.")] = (
        field(default_factory=lambda: bind(k3))
    )
    coef: Annotated[
        NonNegative,
        Setting(
            "Weight of the KL penalty; larger: slower, safer. With a target, the initial weight.",
            usual="0 (kl: null) to 0.05; 0.001 in long runs",
            source="0.04 in DeepSeekMath (arXiv 2402.03300), 0.001 in DeepSeek-R1 (2501.12948)",
            trl="beta",
        ),
    ] = 0.001
    place: Annotated[
        Literal["loss", "reward"],
        Setting(
            "Where the penalty acts: in the loss, or detached in the reward. There it is subtracted before "
            "the baseline at level completion, and after it at level token, so that a token bears its own "
            "cost and the cost of all later tokens."
        ),
    ] = "loss"
    level: Annotated[
        Literal["token", "completion"],
        Setting("For each token, or for the whole completion, whose log-ratios the estimator gets as a sum."),
    ] = "token"
    gradient: Annotated[
        Literal["formula", "straight_through", "ratio", "score"],
        Setting(
            "Whose gradient the penalty gets: its formula's; k2's (straight_through); ratio times value's, "
            "which is unbiased; or pi / sg(pi) times value's (score), where pi / sg(pi) is 1 with the "
            "gradient of log pi."
        ),
    ] = "formula"
    bound: Annotated[
        Positive | None,
        Setting(
            "Largest size of a token's penalty, with no gradient beyond; 10 in verl, OpenRLHF and NeMo-RL."
        ),
    ] = None
    to: Annotated[
        Literal["reference", "sampler"],
        Setting(
            "To the reference, or to the policy that sampled, which needs no reference: prime-rl's choice, "
            "with k2 and a coefficient of 2e-3."
        ),
    ] = "reference"
    target: Annotated[
        Positive | None, Setting("Target of the adaptive coefficient: KL in nats per completion.")
    ] = None
    horizon: Annotated[Count, Setting("Completions over which a deviation from the target acts.")] = 10_000
    refresh_every: Annotated[
        Count | None,
        Setting(
            "Updates after which the reference moves to the policy, at the end of their step.",
            usual="none; 400 in DeepSeek-R1",
            trl="ref_model_sync_steps",
            resume="refused",
        ),
    ] = None
    refresh_mix: Annotated[
        Fraction,
        Setting(
            "Weight of the policy in the new reference: 1 copies it.",
            trl="ref_model_mixup_alpha",
            resume="refused",
        ),
    ] = 1.0


@dataclass(frozen=True)
class Entropy:
    """An entropy bonus in the loss, fixed or steered towards a target."""

    coef: Annotated[
        NonNegative,
        Setting(
            "Weight of the bonus: larger keeps exploration up, too large ends in noise. With a target, the "
            "initial weight.",
            usual="0 to 0.01",
            trl="entropy_coef",
        ),
    ] = 0.0
    target: Annotated[
        Positive | None,
        Setting("Entropy in nats per token below which the bonus is raised.", usual="0.1 to 0.5"),
    ] = None


def at_level(ref_log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return the log-ratio to the reference per token, or its sum over the completion on each. (N, T)."""
    return ref_log_ratio.sum(-1, keepdim=True) * mask if level == "completion" else ref_log_ratio


def with_gradient(
    value: Tensor, ref_log_ratio: Tensor, ratio: Tensor, mode: str, bound: float | None = None
) -> Tensor:
    """Return a bounded KL value with its own gradient, k2's, or value times a ratio's. (N, T)."""
    if mode == "straight_through":
        # x - sg(x) is 0 and keeps its gradient: the value is the estimator's, the gradient k2's.
        gradient = k2(ref_log_ratio)
        return bounded_value(value, bound).detach() + gradient - gradient.detach()
    if mode == "ratio":
        value = value * ratio
    elif mode == "score":
        # exp(d - sg(d)) is pi / sg(pi): 1 in the value, the score function in the gradient.
        value = value * (ref_log_ratio - ref_log_ratio.detach()).exp()
    return bounded_value(value, bound)


def bounded_value(value: Tensor, bound: float | None) -> Tensor:
    """Clamp a penalty to [-bound, bound]."""
    return value if bound is None else value.clamp(-bound, bound)
