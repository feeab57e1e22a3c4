"""Clip rules: the loss of each token, to be minimised, from its ratio and advantage.

All are (N, T) -> (N, T). Where a rule writes sg(.) it is a detached weight on the log-probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey_verify.types import NonNegative, OpenShare, Positive

if TYPE_CHECKING:
    from torch import Tensor


def unclipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    """-rho A, without any clip. REINFORCE, RLOO, GPG."""
    return -ratio * advantages


def clip(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: Positive = 0.2,
    clip_high: Positive = 0.2,
    dual_clip: Positive | None = None,
) -> Tensor:
    """-min(rho A, r A), r = rho within [1 - low, 1 + high]. PPO, arXiv 1707.06347; low < high: DAPO.

    ``dual_clip`` c > 1 + high caps rho at c where A < 0: dual-clip PPO (1912.09729, c = 3), which
    is INTELLECT-2's two-sided clip with delta = c (2505.07291, 4).
    """
    gain = (ratio * advantages).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        gain = gain.maximum(dual_clip * advantages).where(advantages < 0, gain)
    return -gain


def cispo(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, cap: Positive = 5.0, floor: NonNegative = 0.0
) -> Tensor:
    """-sg(rho within [floor, cap]) A log pi: the weight is capped, no token loses its gradient.

    CISPO, arXiv 2506.13585. Both bound rho itself: ``cap`` is 1 + eps_high (ScaleRL uses 5),
    ``floor`` is 1 - eps_low (the paper sets none; verl's default is .8).
    """
    return -ratio.detach().clamp(floor, cap) * advantages * logprobs


def sapo(ratio: Tensor, advantages: Tensor, *, tau_up: Positive = 1.0, tau_down: Positive = 1.05) -> Tensor:
    """-(4 / tau) sigmoid(tau (rho - 1)) A: a soft gate instead of a clip; tau by the sign of A.

    SAPO, arXiv 2511.20347.
    """
    tau = ratio.new_tensor(tau_up).where(advantages > 0, tau_down)
    return -(4 / tau) * (tau * (ratio - 1)).sigmoid() * advantages


def vespo(
    ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    *,
    k_up: NonNegative = 2.0,
    lam_up: NonNegative = 3.0,
    k_down: NonNegative = 3.0,
    lam_down: NonNegative = 2.0,
) -> Tensor:
    """-sg(rho^k e^(lam (1 - rho))) A log pi: a gamma-shaped weight, 1 on-policy, 0 far away.

    VESPO, arXiv 2602.10693, with the response-level ratio; k and lam by the sign of A.
    """
    up, weight = advantages >= 0, ratio.detach()
    k = weight.new_tensor(k_up).where(up, k_down)
    lam = weight.new_tensor(lam_up).where(up, lam_down)
    return -(k * weight.log() + lam * (1 - weight)).exp() * advantages * logprobs


def dro(logprobs: Tensor, advantages: Tensor, log_ratio: Tensor, *, beta: NonNegative = 1.0) -> Tensor:
    """-(A log pi - beta / 2 (log rho)^2): a quadratic pull to the old policy instead of a clip.

    DRO, arXiv 2405.19107, by token as verl has it.
    """
    return beta / 2 * log_ratio.square() - advantages * logprobs


def divergence_mask_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    threshold: OpenShare = 0.15,
    cap: Positive = 20.0,
) -> Tensor:
    """-A sg(min(rho, cap)) log pi where the token's probability has moved less than ``threshold``.

    Kept: pi - pi_old <= threshold for A > 0, >= -threshold for A < 0. DPPO-TV, arXiv 2602.04879
    (.15; prime-rl .2): bounds the probability, not the ratio, so rare tokens may move.
    """
    moved = (logprobs.exp() - old_logprobs.exp()).detach() * advantages.sign()
    weight = (logprobs - old_logprobs).detach().exp().clamp(max=cap) * (moved <= threshold)
    return -advantages * weight * logprobs


def divergence_mask_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    threshold: Positive = 0.05,
    cap: Positive = 20.0,
) -> Tensor:
    """As ``divergence_mask_tv`` with the binary KL(pi_old || pi) of the token as the distance.

    DPPO-KL, arXiv 2602.04879: p log(p/q) + (1-p) log((1-p)/(1-q)), p = pi_old, q = pi.
    """
    log_ratio = (logprobs - old_logprobs).detach()
    p, q = (x.detach().exp().clamp(max=1 - 1e-6) for x in (old_logprobs, logprobs))
    distance = -p * log_ratio + (1 - p) * ((-p).log1p() - (-q).log1p())
    outward = (q - p) * advantages > 0
    weight = log_ratio.exp().clamp(max=cap) * ~(outward & (distance > threshold))
    return -advantages * weight * logprobs


def kl_on_selected(
    ratio: Tensor, advantages: Tensor, log_ratio: Tensor, selected: Tensor, *, coef: NonNegative = 1.0
) -> Tensor:
    """-rho A + coef |log rho| on the selected tokens. KL-Cov, arXiv 2505.22617.

    ``selected`` (N, T) bool: see ``token_weights.top_covariance``.
    """
    return -ratio * advantages + coef * log_ratio.abs() * selected


def group_classification(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, group: Tensor, *, tau: Positive = 0.5
) -> Tensor:
    """log(1 + sum_{A > 0} e^(-s / tau)) + log(1 + sum_{A < 0} e^(s / tau)) of its group, at every token.

    s = mean_t log rho_t of a completion; ``group`` (N,) int64. With reduction ``prompt_mean`` the loss is the
    mean over groups. Each completion's gradient lies within 1 / tau whatever its advantage, and fades as
    the group is told apart. REAL, arXiv 2602.05630.
    """
    sign = (advantages * mask).sum(-1).sign()
    among, score = sign != 0, log_ratio.sum(-1) / mask.sum(-1).clamp(min=1) / tau
    power, place = (-sign * score)[among], (2 * group + (sign < 0))[among]
    # log(1 + sum e^x) as log(e^-m + sum e^(x - m)) + m, m the largest of 0 and x.
    most = score.new_zeros(2 * int(group.max()) + 2).scatter_reduce(0, place, power.detach(), "amax")
    sums = (-most).exp().index_add(0, place, (power - most[place]).exp())
    return (sums.log() + most).view(-1, 2).sum(-1)[group][:, None].expand(mask.shape)
