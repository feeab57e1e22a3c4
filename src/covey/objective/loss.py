"""The loss of a micro-batch under an algorithm: its axes evaluated in order, once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

from covey.objective.penalties import at_level, with_gradient
from covey.objective.ratios import bounded

if TYPE_CHECKING:
    from torch import Tensor

    from covey.objective.algorithms import Algorithm
    from covey.objective.penalties import KL
    from covey.objective.reductions import Totals

CARRY_GRADIENT = {"logprobs", "entropy", "full_kl", "ratio"}


@dataclass(frozen=True)
class Terms:
    """All that a token loss may be made of, by the names the functions of the objective ask for.

    Shapes are (N, T) unless said otherwise. Values off the mask are replaced by 0, so padding may hold
    NaN or infinity; whatever is not of the policy being trained is detached.
    """

    logprobs: Tensor
    """log pi of the sampled tokens under the policy being trained, at the sampling temperature."""
    mask: Tensor
    """bool: the tokens that are trained."""
    advantages: Tensor
    old_logprobs: Tensor
    """At the start of this rollout batch's updates."""
    totals: Totals
    group_tokens: Tensor
    """(N,) trained tokens in the whole group of each completion."""
    sampler_logprobs: Tensor | None = None
    """As recorded by the sampler."""
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    """Of the policy's distribution at each token, nats."""
    full_kl: Tensor | None = None
    """KL(pi || ref) over the vocabulary at each token, nats."""
    marked: Tensor | None = None
    """bool: see ``multipliers``."""
    ratio: Tensor | None = None
    """Set by the algorithm's ratio axis."""

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name not in ("mask", "totals", "group_tokens")):
            value = getattr(self, name)
            if value is not None:
                value = value if name in CARRY_GRADIENT else value.detach()
                object.__setattr__(self, name, value.where(self.mask, value.new_zeros(())))
        object.__setattr__(self, "group_tokens", self.group_tokens.to(self.advantages.dtype))

    @property
    def lengths(self) -> Tensor:
        """(N,) trained tokens of each completion."""
        return self.mask.sum(-1).to(self.advantages.dtype)

    @cached_property
    def log_ratio(self) -> Tensor:
        """log pi - log pi_old, bounded."""
        return bounded(self.logprobs - self.old_logprobs)

    @property
    def gap(self) -> Tensor:
        """old_logprobs - sampler_logprobs, bounded: trainer against sampler."""
        assert self.sampler_logprobs is not None
        return bounded(self.old_logprobs - self.sampler_logprobs)

    @property
    def difference(self) -> Tensor:
        """log pi - log ref."""
        assert self.ref_logprobs is not None
        return self.logprobs - self.ref_logprobs


@dataclass(frozen=True)
class Estimated:
    """What ``kl.estimator`` reads."""

    difference: Tensor | None = None
    """log pi - log ref, by token (N, T) or, at level response, its sum on every token."""
    full_kl: Tensor | None = None
    """(N, T), in the loss only."""


@dataclass(frozen=True)
class Loss:
    """The parts of a micro-batch's share of the loss, scalars; ``total`` is the one to differentiate."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    entropy: Tensor
    """Mean entropy as the reduction weighs it (the bonus is ``-entropy_coef`` times this)."""


def policy_loss(
    algorithm: Algorithm, terms: Terms, *, kl_coef: float | None = None, entropy_coef: float | None = None
) -> Loss:
    """sum_it w_i (surrogate_it * factors_it + kl_coef KL_it - entropy_coef H_it).

    w_i is the reduction's weight under the totals of the whole optimizer step: the losses and
    gradients of micro-batches add up to those of the step. The coefficients default to the
    algorithm's; controllers pass their current ones.
    """
    terms = replace(terms, ratio=algorithm.ratio(terms))
    weight = algorithm.reduce(terms)[:, None] * terms.mask
    policy = (policy_values(algorithm, terms) * weight).sum()
    kl = entropy = policy.new_zeros(())
    total = policy
    if algorithm.kl is not None and algorithm.kl.place == "loss":
        kl = (penalty(algorithm.kl, terms) * weight).sum()
        total = total + (algorithm.kl.coef if kl_coef is None else kl_coef) * kl
    if algorithm.entropy is not None and terms.entropy is not None:
        entropy = (terms.entropy * weight).sum()
        total = total - (algorithm.entropy.coef if entropy_coef is None else entropy_coef) * entropy
    return Loss(total, policy.detach(), kl.detach(), entropy.detach())


def policy_values(algorithm: Algorithm, terms: Terms) -> Tensor:
    """What each token adds to the policy loss before the reduction. (N, T)."""
    values: Tensor = algorithm.surrogate(terms)
    for factor in algorithm.factors:
        values = values * factor(terms).detach()
    return values


def penalty(kl: KL, terms: Terms) -> Tensor:
    """The KL penalty of each token, with the gradient that ``kl`` asks for. (N, T)."""
    if "difference" not in kl.estimator.needs:
        return kl.estimator(Estimated(full_kl=terms.full_kl))
    assert terms.ratio is not None
    difference = at_level(terms.difference, terms.mask, kl.level)
    value = kl.estimator(Estimated(difference, terms.full_kl))
    return with_gradient(value, difference, terms.ratio, kl.gradient)
