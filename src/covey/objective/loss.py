"""The loss of a micro-batch under an algorithm: its axes evaluated in order, once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from covey.objective.axis_function import AnyAxisFunction, values_of
from covey.objective.data import KLData, LossInputs
from covey.objective.penalties import at_level, bounded_value, with_gradient

if TYPE_CHECKING:
    from torch import Tensor

    from covey.objective.algorithms import Algorithm
    from covey.objective.penalties import KL


@dataclass(frozen=True)
class TokenTerms:
    """The policy loss of a micro-batch token by token, before the reduction. (N, T) each."""

    ratio: Tensor
    """The importance ratio; (N, 1) where a user's function gives one for each completion."""
    correction: Tensor | None
    """The product of the importance corrections; None where the algorithm has none."""
    value: Tensor
    """The surrogate times corrections and token weights."""


@dataclass(frozen=True)
class Loss:
    """The terms of a micro-batch's part of the loss, scalars; ``total`` is the one to differentiate."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    entropy: Tensor
    """Mean entropy as the reduction weighs it (the bonus is ``-entropy_coef`` times this)."""
    tokens: TokenTerms
    """The terms that ``policy`` is the weighted sum of."""
    weight: Tensor
    """(N,): the factor of each completion's tokens in the reduction."""


def policy_loss(
    algorithm: Algorithm,
    inputs: LossInputs,
    *,
    kl_coef: float | None = None,
    entropy_coef: float | None = None,
) -> Loss:
    """sum_it w_i (surrogate_it * token_weights_it + kl_coef KL_it - entropy_coef H_it) + nll NLL(correct).

    w_i is the reduction's weight under the totals of the whole optimizer step: the losses and
    gradients of micro-batches add up to the step's gradient. The coefficients default to the
    algorithm's; controllers pass their current ones.
    """
    tokens = token_terms(algorithm, inputs)
    # Reductions and penalties may ask for the ratio too.
    inputs = replace(inputs, ratio=tokens.ratio)
    row_weight = values_of("reduce", algorithm.reduce, inputs, inputs.mask.shape[:1])
    # (N,) -> (N, T), 0 off the mask.
    weight = row_weight[:, None] * inputs.mask
    policy = (tokens.value * weight).sum()
    kl = entropy = policy.new_zeros(())
    total = policy
    if algorithm.kl is not None and algorithm.kl.place == "loss":
        kl = (penalty(algorithm.kl, inputs) * weight).sum()
        coef = algorithm.kl.coef if kl_coef is None else kl_coef
        total = total + coef * kl
    if algorithm.entropy is not None and inputs.entropy is not None:
        entropy = (inputs.entropy * weight).sum()
        coef = algorithm.entropy.coef if entropy_coef is None else entropy_coef
        total = total - coef * entropy
    if algorithm.nll:
        total = total + algorithm.nll * correct_nll(inputs)
    return Loss(total, policy.detach(), kl.detach(), entropy.detach(), tokens, row_weight)


def user_functions_in_loss(algorithm: Algorithm) -> list[str]:
    """Return the names of the user's functions that are called for the loss."""
    called: list[AnyAxisFunction] = [algorithm.ratio, algorithm.surrogate, algorithm.reduce]
    called += algorithm.policy_weights
    if algorithm.kl is not None:
        called.append(algorithm.kl.estimator)
    return [part.name for part in called if part.written_by_user]


def correct_nll(inputs: LossInputs) -> Tensor:
    """The negative log-likelihood of correct completions, over the number of their tokens in the step. ()."""
    assert inputs.correct is not None
    # The count is the whole step's, so that the terms of its micro-batches add up to the mean.
    chosen = inputs.mask & inputs.correct[:, None]
    return -(inputs.logprobs * chosen).sum() / max(inputs.totals.correct_tokens, 1)


def token_terms(algorithm: Algorithm, inputs: LossInputs) -> TokenTerms:
    """Return ratio, corrections and value of the policy loss for each token, before the reduction."""
    by_token = inputs.mask.shape
    # Later axes may ask for the ratio, so it is computed first.
    ratio = values_of("ratio", algorithm.ratio, inputs, by_token, (by_token[0], 1))
    inputs = replace(inputs, ratio=ratio)
    value = values_of("surrogate", algorithm.surrogate, inputs, by_token)
    by_completion = (by_token[0], 1)
    correction = None
    for weight in algorithm.correction:
        factors = values_of("correction", weight, inputs, by_token, by_completion).detach()
        value = value * factors
        correction = factors if correction is None else correction * factors
    for weight in algorithm.token_weights:
        value = value * values_of("token_weights", weight, inputs, by_token, by_completion).detach()
    return TokenTerms(ratio, correction, value)


def penalty(kl: KL, inputs: LossInputs) -> Tensor:
    """Return the KL penalty of each token, with the gradient that ``kl`` asks for. (N, T)."""
    # Only the exact KL reads no log-ratio; it is differentiated as it is.
    if "ref_log_ratio" not in kl.estimator.needs:
        exact = values_of("kl.estimator", kl.estimator, KLData(full_kl=inputs.full_kl), inputs.mask.shape)
        return bounded_value(exact, kl.bound)
    assert inputs.ratio is not None
    to_sampler = kl.to == "sampler"
    ref_log_ratio = inputs.sampler_log_ratio if to_sampler else inputs.ref_log_ratio
    ref_log_ratio = at_level(ref_log_ratio, inputs.mask, kl.level)
    shape = inputs.mask.shape
    value = values_of("kl.estimator", kl.estimator, KLData(ref_log_ratio, inputs.full_kl), shape)
    return with_gradient(value, ref_log_ratio, inputs.ratio, kl.gradient, kl.bound)
