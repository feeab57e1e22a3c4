"""Clip rules: the loss of each token, to be minimised, from its ratio and advantage.

All are (N, T) -> (N, T). sg(.) marks a detached weight on the log-probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from covey.objective.axis_function import declare
from covey.objective.setting import Setting
from covey_verify.types import NonNegative, OpenFraction, Positive

if TYPE_CHECKING:
    from torch import Tensor


@declare("proportional")
def unclipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    """-rho A, without any clip. REINFORCE, RLOO, GPG."""
    return -ratio * advantages


@declare("proportional", "bounds_ratio")
def clip(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: Annotated[
        Positive,
        Setting(
            "Where A < 0, no gradient below a ratio of 1 minus this.",
            usual="0.1 to 0.2; 3e-4 to 2e-3 with ratio sequence",
            source="0.2 in PPO (arXiv 1707.06347); 3e-4 in GSPO (2507.18071)",
            trl="epsilon",
        ),
    ] = 0.2,
    clip_high: Annotated[
        Positive,
        Setting(
            "Where A > 0, no gradient above a ratio of 1 plus this; larger keeps exploration up.",
            usual="0.2 to 0.28; 4e-4 to 2.5e-3 with ratio sequence",
            source="0.28 in DAPO (arXiv 2503.14476); 4e-4 in GSPO (2507.18071)",
            trl="epsilon_high",
        ),
    ] = 0.2,
    dual_clip: Annotated[
        Positive | None,
        Setting(
            "Upper bound of the ratio where A < 0, above 1 + clip_high: no outlier dominates.",
            usual="3 to 10, or none",
            trl="delta",
        ),
    ] = None,
) -> Tensor:
    """-min(rho A, r A), r = rho within [1 - low, 1 + high]. PPO, arXiv 1707.06347; low < high: DAPO.

    ``dual_clip`` c > 1 + high caps rho at c where A < 0: dual-clip PPO (1912.09729, c = 3), which
    is INTELLECT-2's two-sided clip with delta = c (2505.07291, 4).
    """
    gain = (ratio * advantages).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        # Beyond c the loss is -c A, a constant: no gradient.
        gain = gain.maximum(dual_clip * advantages).where(advantages < 0, gain)
    return -gain


@declare("proportional", "bounds_ratio")
def cispo(
    ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    *,
    cap: Annotated[
        Positive,
        Setting(
            "Upper bound of the ratio, 1 + eps_high: larger means less bias and more variance.",
            trl="epsilon_high",
        ),
    ] = 5.0,
    floor: Annotated[NonNegative, Setting("Lower bound of the ratio, 1 - eps_low; 0: none.")] = 0.0,
) -> Tensor:
    """-sg(rho within [floor, cap]) A log pi: the weight is capped, no token loses its gradient.

    CISPO, arXiv 2506.13585. Both bound rho itself: ``cap`` is 1 + eps_high (ScaleRL uses 5),
    ``floor`` is 1 - eps_low (the paper sets none; verl's default is .8).
    """
    return -ratio.detach().clamp(floor, cap) * advantages * logprobs


@declare("proportional", "bounds_ratio")
def sapo(
    ratio: Tensor,
    advantages: Tensor,
    *,
    tau_up: Annotated[
        Positive,
        Setting(
            "Rate at which the weight decays as the ratio leaves 1, for A > 0; larger: faster.",
            trl="sapo_temperature_pos",
        ),
    ] = 1.0,
    tau_down: Annotated[
        Positive,
        Setting(
            "Rate at which the weight decays as the ratio leaves 1, for A < 0; larger: faster.",
            trl="sapo_temperature_neg",
        ),
    ] = 1.05,
) -> Tensor:
    """-(4 / tau) sigmoid(tau (rho - 1)) A: a soft gate instead of a clip; tau by the sign of A.

    SAPO, arXiv 2511.20347.
    """
    # The factor 4 / tau gives the gate slope 1 at rho = 1: on-policy it is the plain policy gradient.
    tau = ratio.new_tensor(tau_up).where(advantages > 0, tau_down)
    return -(4 / tau) * (tau * (ratio - 1)).sigmoid() * advantages


@declare("proportional", "bounds_ratio")
def vespo(
    ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    *,
    k_up: Annotated[
        NonNegative,
        Setting("Power of the ratio in the weight where A > 0: weakens ratios below 1.", trl="vespo_k_pos"),
    ] = 2.0,
    lam_up: Annotated[
        NonNegative,
        Setting("Decay in the weight where A > 0: weakens ratios above 1.", trl="vespo_lambda_pos"),
    ] = 3.0,
    k_down: Annotated[NonNegative, Setting("As k_up, where A < 0.", trl="vespo_k_neg")] = 3.0,
    lam_down: Annotated[NonNegative, Setting("As lam_up, where A < 0.", trl="vespo_lambda_neg")] = 2.0,
) -> Tensor:
    """-sg(rho^k e^(lam (1 - rho))) A log pi: a gamma-shaped weight, 1 on-policy, 0 far away.

    VESPO, arXiv 2602.10693, with the completion-level ratio; k and lam by the sign of A.
    """
    up = advantages >= 0
    weight = ratio.detach()
    # The weight is 1 at rho = 1 for any k and lam, and largest at rho = k / lam.
    k = weight.new_tensor(k_up).where(up, k_down)
    lam = weight.new_tensor(lam_up).where(up, lam_down)
    return -(k * weight.log() + lam * (1 - weight)).exp() * advantages * logprobs


def dro(
    logprobs: Tensor,
    advantages: Tensor,
    log_ratio: Tensor,
    *,
    beta: Annotated[NonNegative, Setting("Pull to the old policy: larger is more cautious.")] = 1.0,
) -> Tensor:
    """-(A log pi - beta / 2 (log rho)^2): a quadratic pull to the old policy instead of a clip.

    DRO, arXiv 2405.19107, by token as verl has it.
    """
    return beta / 2 * log_ratio.square() - advantages * logprobs


@declare("proportional")
def divergence_mask_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    threshold: Annotated[
        OpenFraction,
        Setting("A token is trained if its probability has moved by no more than this.", usual="0.05 to 0.2"),
    ] = 0.15,
    cap: Annotated[Positive, Setting("Upper bound of the ratio.")] = 20.0,
) -> Tensor:
    """-A sg(min(rho, cap)) log pi where the token's probability has moved less than ``threshold``.

    Kept: pi - pi_old <= threshold for A > 0, >= -threshold for A < 0. DPPO-TV, arXiv 2602.04879
    (.15; prime-rl .2): bounds the probability, not the ratio, so rare tokens may move.
    """
    # How far the probability has moved in the direction that the advantage favours.
    moved = (logprobs.exp() - old_logprobs.exp()).detach() * advantages.sign()
    weight = (logprobs - old_logprobs).detach().exp().clamp(max=cap) * (moved <= threshold)
    return -advantages * weight * logprobs


@declare("proportional")
def divergence_mask_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    threshold: Annotated[
        Positive,
        Setting("A token is trained if the KL of its probability is at most this.", usual="0.05 to 0.2"),
    ] = 0.05,
    cap: Annotated[Positive, Setting("Upper bound of the ratio.")] = 20.0,
) -> Tensor:
    """``divergence_mask_tv`` with the binary KL(pi_old || pi) of the token as the distance.

    DPPO-KL, arXiv 2602.04879: p log(p/q) + (1-p) log((1-p)/(1-q)), p = pi_old, q = pi.
    """
    log_ratio = (logprobs - old_logprobs).detach()
    # Below 1, so that log(1 - p) and log(1 - q) are finite.
    p, q = (x.detach().exp().clamp(max=1 - 1e-6) for x in (old_logprobs, logprobs))
    # log_ratio is log q / p, hence the sign of its term.
    distance = -p * log_ratio + (1 - p) * ((-p).log1p() - (-q).log1p())
    outward = (q - p) * advantages > 0
    weight = log_ratio.exp().clamp(max=cap) * ~(outward & (distance > threshold))
    return -advantages * weight * logprobs


def kl_on_selected(
    ratio: Tensor,
    advantages: Tensor,
    log_ratio: Tensor,
    selected: Tensor,
    *,
    coef: Annotated[NonNegative, Setting("Weight of the penalty on the selected tokens.")] = 1.0,
) -> Tensor:
    """-rho A + coef |log rho| on the selected tokens. KL-Cov, arXiv 2505.22617.

    ``selected`` (N, T) bool: see ``token_weights.top_covariance``.
    """
    return -ratio * advantages + coef * log_ratio.abs() * selected


@declare("acts_at_ratio_one")
def group_classification(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    group: Tensor,
    *,
    tau: Annotated[
        Positive, Setting("Sharpness of the classes; smaller: steeper, and saturated sooner.")
    ] = 0.5,
) -> Tensor:
    """log(1 + sum_{A > 0} e^(-s / tau)) + log(1 + sum_{A < 0} e^(s / tau)) of its group, at every token.

    s = mean_t log rho_t of a completion; ``group`` (N,) int64. With reduction ``prompt_mean`` the loss is the
    mean over groups. Each completion's gradient lies within 1 / tau whatever its advantage, and fades as
    the group is told apart. REAL, arXiv 2602.05630.
    """
    sign = (advantages * mask).sum(-1).sign()
    score = log_ratio.sum(-1) / mask.sum(-1).clamp(min=1) / tau
    # A completion without an advantage belongs to neither class.
    among = sign != 0
    power = (-sign * score)[among]
    of_class = (2 * group + (sign < 0))[among]  # the two classes of each group
    # log(1 + sum e^x) as log(e^-m + sum e^(x - m)) + m, m the largest of 0 and x.
    largest = score.new_zeros(2 * int(group.max()) + 2).scatter_reduce(0, of_class, power.detach(), "amax")
    sums = (-largest).exp().index_add(0, of_class, (power - largest[of_class]).exp())
    # (2 groups,) -> both classes of each group added -> (N, T), the same at every token of a group.
    return (sums.log() + largest).view(-1, 2).sum(-1)[group][:, None].expand(mask.shape)
