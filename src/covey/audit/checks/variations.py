"""Variations of a loss: a loss that a run computed, and the same loss with one mistake in its algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from covey.objective import ratios, surrogates
from covey.objective.algorithms import Algorithm
from covey.objective.axis_function import AxisFunction, bind
from covey.objective.data import LossInputs
from covey.objective.loss import Loss, policy_loss
from covey.objective.reductions import constant_length

DIRECTION = 0.02
"""Part of a derivative that rounding may change."""
TINY = 1e-30
"""A square of a derivative that is 0."""
ENTROPY_PART = 0.1
"""Largest relative difference between the means of the entropy over completions and over tokens."""


@dataclass(frozen=True, eq=False)
class LossCase:
    """A loss that a run computed, with its inputs."""

    step: int
    words: str
    """The place of the loss in the run, in words."""
    recorded: float
    """The value that the run computed; NaN if only its derivative can be compared."""
    algorithm: Algorithm
    inputs: LossInputs
    mismatch: Tensor | None = None
    """(N, T) log-ratio of trainer and sampler; None if the loss does not correct for it."""
    weigh: Callable[[Tensor], Tensor] = torch.exp
    """Mismatch -> the weight of each token's loss."""
    bonus: float = 0.0
    """The entropy times its coefficient, which is subtracted."""
    is_part: bool = False
    """Whether the update trains only a part of its rollout; the mean may then be over the whole rollout."""
    precision: float = 5e-3
    """Largest relative difference by rounding; the largest absolute one is a fiftieth of it."""
    gradients: Tensor | None = None
    """(N, T) derivative of the recorded loss by the log-probs; None where it is unknown."""
    is_scaled: bool = True
    """Whether the derivative is known only up to a factor."""

    def is_that_of(self, candidate: LossCase) -> bool:
        """Whether covey's formula gives the recorded loss, and its derivative, in another case."""
        return self.agrees(self.recorded, candidate.due) and self.is_along(candidate)

    def is_along(self, candidate: LossCase, by: float = 1.0) -> bool:
        """Whether the recorded derivative is that of another case, times a number: this one if its scale is
        known, or else one of this sign.
        """
        if self.gradients is None:
            return True
        factor = self.factor_to(candidate)
        remainder = (self.gradients - factor * candidate.derivative).norm()
        is_near = self.is_scaled or abs(factor / by - 1) <= DIRECTION
        return factor / by >= 0 and is_near and bool(remainder <= DIRECTION * self.gradients.norm())

    def factor_to(self, candidate: LossCase) -> float:
        """Return the multiple of another case's derivative that is nearest to the recorded one."""
        assert self.gradients is not None
        due = candidate.derivative
        return float((self.gradients * due).sum()) / max(float((due**2).sum()), TINY)

    @cached_property
    def derivative(self) -> Tensor:
        """(N, T): the derivative of the loss by the log-probs, by covey's own formula."""
        logprobs = self.inputs.logprobs.detach().clone().requires_grad_(True)
        total = replace(self, inputs=replace(self.inputs, logprobs=logprobs)).value().total
        if not total.requires_grad:
            return torch.zeros_like(logprobs)
        (derivative,) = torch.autograd.grad(total, logprobs)
        return derivative

    def agrees(self, recorded: float, due: float) -> bool:
        """Whether two losses are equal up to rounding and the kind of the entropy's mean, or unknown."""
        if math.isnan(recorded):
            return True
        rounding = self.precision * (0.02 + abs(due))
        return abs(recorded - due) <= rounding + ENTROPY_PART * abs(self.bonus)

    @property
    def due(self) -> float:
        """The loss with the entropy bonus."""
        return float(self.value().total) - self.bonus

    def value(self) -> Loss:
        """Return the loss by covey's own formula, without an entropy bonus."""
        loss = policy_loss(self.algorithm, self.inputs)
        if self.mismatch is None:
            return loss
        weight = loss.weight[:, None] * self.inputs.mask * self.weigh(self.mismatch)
        policy = (loss.tokens.value * weight).sum()
        uncorrected = (loss.tokens.value * (loss.weight[:, None] * self.inputs.mask)).sum()
        return replace(loss, total=loss.total - uncorrected + policy, policy=policy.detach())


Variation = Callable[[LossCase], LossCase | None]
"""Returns a case with a mistake; None if the mistake would make no difference."""


def bounds_exchanged(case: LossCase) -> LossCase | None:
    """Return the case with the lower clip bound as the upper one, and the reverse."""
    settings = dict(case.algorithm.surrogate.settings)
    low, high = settings.get("clip_low"), settings.get("clip_high")
    if low is None or low == high:
        return None
    return varied(
        case, surrogate=AxisFunction(surrogates.clip, {**settings, "clip_low": high, "clip_high": low})
    )


def not_clipped(case: LossCase) -> LossCase | None:
    """Return the case without a clip."""
    clipped = case.algorithm.surrogate.function is surrogates.clip
    return varied(case, surrogate=bind(surrogates.unclipped)) if clipped else None


def clipped_outside(case: LossCase) -> LossCase | None:
    """Return the case with the larger one of PPO's two objectives."""
    rule = case.algorithm.surrogate
    if rule.function is not surrogates.clip:
        return None

    def larger(ratio: Tensor, advantages: Tensor) -> Tensor:
        # With the opposite sign of the advantages, the larger objective becomes the smaller one.
        return -surrogates.clip(ratio, -advantages, **rule.settings)

    return varied(case, surrogate=bind(larger))


def clipped_alone(case: LossCase) -> LossCase | None:
    """Return the case with the clipped ratio alone, without the smaller one of PPO's two objectives."""
    rule = case.algorithm.surrogate
    if rule.function is not surrogates.clip:
        return None
    low, high = (float(rule.settings.get(name, 0.2)) for name in ("clip_low", "clip_high"))

    def alone(ratio: Tensor, advantages: Tensor) -> Tensor:
        return surrogates.unclipped(ratio.clamp(1 - low, 1 + high), advantages)

    return varied(case, surrogate=bind(alone))


def not_corrected(case: LossCase) -> LossCase | None:
    """Return the case without its importance correction."""
    return None if case.mismatch is None else replace(case, mismatch=None)


def corrected_the_wrong_way(case: LossCase) -> LossCase | None:
    """Return the case with the sampler over the trainer in its correction."""
    return None if case.mismatch is None else replace(case, mismatch=-case.mismatch)


def varied(case: LossCase, **axes: object) -> LossCase:
    """Return a case with other axes of its algorithm."""
    return replace(case, algorithm=case.algorithm.variant(case.algorithm.paper, **axes))


def of_another_level(case: LossCase) -> LossCase | None:
    """Return the case with the ratio of tokens in the place of the completion's, or the reverse."""
    is_of_tokens = case.algorithm.ratio.function is ratios.token
    return varied(case, ratio=bind(ratios.sequence if is_of_tokens else ratios.token))


def of_the_product(case: LossCase) -> LossCase | None:
    """Return the case with the product of its tokens' ratios as a completion's, not their geometric mean."""
    is_of_tokens = case.algorithm.ratio.function is ratios.token
    return None if is_of_tokens else varied(case, ratio=bind(ratios.completion))


def kl_exchanged(case: LossCase) -> LossCase | None:
    """Return the case with the KL from the reference to the policy."""
    kl = case.algorithm.kl
    if kl is None:
        return None
    estimator = kl.estimator.function

    def exchanged(ref_log_ratio: Tensor) -> Tensor:
        return estimator(-ref_log_ratio)

    return varied(case, kl=replace(kl, estimator=bind(exchanged)))


def over_padding(case: LossCase) -> LossCase:
    """Return the case with a mean over all places of the batch, the padding included."""
    return varied(case, reduce=bind(constant_length, length=case.inputs.mask.shape[1], rows="all"))


def counting_untrained(case: LossCase) -> LossCase | None:
    """Return the case with a mean over all tokens of its completions, those that are not trained included."""
    mask = case.inputs.mask
    places = torch.arange(1, mask.shape[1] + 1)
    tokens = int((places * mask).amax(-1).sum())
    totals = case.inputs.totals
    if tokens == int(mask.sum()):
        return None
    return replace(case, inputs=replace(case.inputs, totals=replace(totals, tokens=tokens)))


def of_both_levels(case: LossCase) -> LossCase | None:
    """Return the case with each token's ratio times its completion's, as if GSPO-token's detached log-probs
    were the old ones.
    """

    def product(log_ratio: Tensor, mask: Tensor) -> Tensor:
        return ratios.sequence(log_ratio, mask).detach() * ratios.token(log_ratio)

    return varied(case, ratio=bind(product))


def entropy_added(case: LossCase) -> LossCase | None:
    """Return the case with the entropy added to the loss."""
    return replace(case, bonus=-case.bonus) if case.bonus else None
