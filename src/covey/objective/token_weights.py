"""Token weights: how much of the policy term each token of a completion gets.

A selection singles out tokens of the whole optimizer step, once, from what was known when the step began,
so that micro-batches agree. Token weights turn the selection or the current log-probs into factors (N, T)
on the policy term; they are detached and do not change the denominators of the reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from covey.objective.setting import Setting
from covey_verify.types import Fraction, NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

# --- selections: (N, T) bool, over all completions of an optimizer step ----------------------------


def top_entropy(
    old_entropy: Tensor,
    mask: Tensor,
    *,
    fraction: Annotated[
        Fraction,
        Setting("Fraction of the tokens that is selected: those with the highest entropy.", usual="0.2"),
    ] = 0.2,
) -> Tensor:
    """The ``fraction`` of trained tokens with the highest entropy. (N, T) -> (N, T) bool.

    Beyond the 80/20 rule, arXiv 2506.01939.
    """
    return _largest(old_entropy, mask, fraction)


def top_covariance(
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    fraction: Annotated[
        Fraction,
        Setting(
            "Fraction of the tokens that is selected: those with the highest covariance.",
            usual="2e-4 to 2e-3",
        ),
    ] = 2e-3,
) -> Tensor:
    """The ``fraction`` of tokens with the highest covariance of log pi and A. (N, T) -> (N, T) bool.

    KL-Cov, arXiv 2505.22617.
    """
    return _largest(covariance(old_logprobs, advantages, mask), mask, fraction)


def random_covariant(
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    noise: Tensor,
    *,
    fraction: Annotated[
        Fraction, Setting("Fraction of the tokens that is selected, at random from the band.", usual="2e-4")
    ] = 2e-4,
    low: Annotated[float, Setting("Lowest covariance of the band.")] = 1.0,
    high: Annotated[float, Setting("Highest covariance of the band.")] = 5.0,
) -> Tensor:
    """``fraction`` of all tokens, drawn among those with covariance in [low, high]. -> (N, T) bool.

    Clip-Cov, arXiv 2505.22617. ``noise`` (N, T) is uniform in [0, 1) and decides the draw.
    """
    value = covariance(old_logprobs, advantages, mask)
    band = mask & (value >= low) & (value <= high)
    return _largest(noise, band, fraction, total=int(mask.sum()))


def covariance(old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A)(log pi - mean log pi), the means over all trained tokens. (N, T) -> (N, T)."""
    logprobs = old_logprobs.where(mask, 0.0)
    exact = advantages.double()
    centred = exact - exact[mask].mean()  # in float64, so that equal advantages give 0
    return centred.to(logprobs) * (logprobs - logprobs[mask].mean())


def _largest(values: Tensor, among: Tensor, fraction: float, total: int | None = None) -> Tensor:
    """Mark the ``fraction`` largest values, at least one if fraction > 0; ties at the border all count."""
    # The count is ``fraction`` of ``total``, or else of the candidates.
    candidates = values[among]
    count = min(max(round(fraction * (total or len(candidates))), int(fraction > 0)), len(candidates))
    if count == 0:
        return among & False
    return among & (values >= candidates.topk(count).values[-1])


# --- token weights: (N, T) factors on the policy term ----------------------------------------------


def selected_only(selected: Tensor) -> Tensor:
    """1 on selected tokens, 0 elsewhere. (N, T) bool -> (N, T)."""
    return selected.float()


def unselected_only(selected: Tensor) -> Tensor:
    """0 on selected tokens, 1 elsewhere. (N, T) bool -> (N, T)."""
    return (~selected).float()


def unlikely_only(
    old_logprobs: Tensor,
    *,
    below: Annotated[Fraction, Setting("Tokens that are at least this likely are not trained.")] = 0.9,
) -> Tensor:
    """1 where the sampled token had probability < ``below``. (N, T) -> (N, T). SPO, 2505.23564."""
    return (old_logprobs.exp() < below).to(old_logprobs.dtype)


def future_influence(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    half_life: Annotated[
        Positive, Setting("Distance in tokens after which a later token counts half.")
    ] = 32.0,
    low: Annotated[NonNegative, Setting("Lower bound of the factor.")] = 1.0,
    high: Annotated[Positive, Setting("Upper bound of the factor.")] = 1.2,
    outlier: Annotated[Positive, Setting("Tokens with a larger ratio are not counted.")] = 10.0,
    safety: Annotated[
        Positive, Setting("Where A < 0 and the ratio is larger, the factor is at most 1.")
    ] = 4.0,
) -> Tensor:
    """clip(exp(sum_{k >= t} g^(k-t) log rho_k), low, high) with g = 2^(-1/half_life). (N, T).

    Tokens with rho > ``outlier`` are left out of the sum; where A < 0 and rho > ``safety`` the
    factor is at most 1. FIPO, arXiv 2603.19835.
    """
    log_ratio = log_ratio.detach()
    # An outlier counts as a log-ratio of 0: no movement.
    counted = log_ratio.where(mask & (log_ratio.exp() <= outlier), 0.0)
    influence = discounted_sum(counted, 0.5 ** (1 / half_life)).exp().clamp(low, high)
    risky = (advantages < 0) & (log_ratio.exp() > safety)
    return influence.clamp(max=1.0).where(risky, influence)


def discounted_sum(values: Tensor, discount: float) -> Tensor:
    """R_t = v_t + discount * R_{t+1}, along the last dimension. (..., T) -> (..., T)."""
    result = values.clone()
    # From the second to last token backwards, so that R_{t+1} is complete when it is added.
    for t in range(values.shape[-1] - 2, -1, -1):
        result[..., t] += discount * result[..., t + 1]
    return result
