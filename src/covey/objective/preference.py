"""Offline preference losses: pairs (or single judged answers) instead of rollouts.

``chosen`` and ``rejected`` are summed log-probs of whole answers under the policy, (B,), ``ref_*``
the same under the reference, ``*_lengths`` their token counts. All return (B,), to be averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from covey.objective.setting import Setting
from covey_verify.types import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

Beta = Annotated[Positive, Setting("Factor of the margin; larger: the policy stays closer to its start.")]
PairNoise = Annotated[
    float,
    Ge(0),
    Lt(0.5),  # with half of the pairs swapped nothing can be learned
    Setting("Assumed fraction of pairs whose labels are swapped."),
]

GoodWeight = Annotated[NonNegative, Setting("Weight of good answers; raise it if there are few.")]
BadWeight = Annotated[NonNegative, Setting("Weight of bad answers.")]


@dataclass(frozen=True)
class PreferenceData:
    """The data that a preference loss may ask for by name: pairs, or answers judged alone. (B,) each."""

    chosen: Tensor | None = None
    rejected: Tensor | None = None
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None
    chosen_lengths: Tensor | None = None
    rejected_lengths: Tensor | None = None
    nll: Tensor | None = None
    """Negative log-likelihood of prompt and chosen answer, scaled so that its mean over the pairs of a step
    is the mean over all their tokens."""
    chosen_nll: Tensor | None = None
    """The same of the chosen answer alone."""
    log_ratio: Tensor | None = None
    desirable: Tensor | None = None
    reference_point: Tensor | None = None
    chosen_scores: Tensor | None = None
    rejected_scores: Tensor | None = None


def log_sigmoid(x: Tensor) -> Tensor:
    """log(1 / (1 + e^-x)) without overflow."""
    # logaddexp(-x, 0) = log(1 + e^-x).
    return -(-x).logaddexp(x.new_zeros(()))


def margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    """D = log pi/ref of the chosen answer minus log pi/ref of the rejected answer. (B,) -> (B,)."""
    return (chosen - ref_chosen) - (rejected - ref_rejected)


Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon", "alpha"]


def divergence_slope(log_ratio: Tensor, divergence: Divergence, alpha: float) -> Tensor:
    """f'(r) of the divergence f, r = pi/ref of an answer, without a constant that margins lose. (B,) -> (B,).

    log r of the reverse KL, -1 / r of the forward KL, log(r / (1 + r)) of Jensen and Shannon's, and
    r^(a - 1) / (a - 1) of the alpha divergence. f-DPO, arXiv 2309.16240, table 1, whose alpha is 1 - a.
    """
    if divergence == "forward_kl":
        return -(-log_ratio).clamp(max=MAX_EXPONENT).exp()
    if divergence == "jensen_shannon":
        return log_sigmoid(log_ratio)
    if divergence == "alpha":
        return ((alpha - 1) * log_ratio).clamp(max=MAX_EXPONENT).exp() / (alpha - 1)
    return log_ratio


MAX_EXPONENT = 80.0
"""Largest exponent of e in a divergence; e^89 is not a number of float32."""


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: Beta = 0.1,
    label_smoothing: PairNoise = 0.0,
    divergence: Annotated[
        Divergence, Setting("Distance to the reference on which the loss is based: DPO's is the reverse KL.")
    ] = "reverse_kl",
    alpha: Annotated[
        Positive,
        Lt(1),
        Setting("Order of the alpha divergence; near 1 the reverse KL, near 0 the forward."),
    ] = 0.5,
) -> Tensor:
    """-(1 - e) log sig(beta D) - e log sig(-beta D), D = margin of log-ratios. (B,) -> (B,).

    DPO, arXiv 2305.18290; ``label_smoothing`` e > 0: conservative DPO. Under another ``divergence`` D is the
    margin of its slopes, f-DPO.
    """
    up = divergence_slope(chosen - ref_chosen, divergence, alpha)
    down = divergence_slope(rejected - ref_rejected, divergence, alpha)
    pull = beta * (up - down)
    return -(1 - label_smoothing) * log_sigmoid(pull) - label_smoothing * log_sigmoid(-pull)


def robust_dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: Beta = 0.1,
    label_smoothing: PairNoise = 0.1,
) -> Tensor:
    """(-(1 - e) log sig(beta D) + e log sig(-beta D)) / (1 - 2 e). (B,) -> (B,).

    Unbiased if a fraction e of the pairs has its labels swapped. Robust DPO, arXiv 2403.00409.
    """
    pull = beta * margin(chosen, rejected, ref_chosen, ref_rejected)
    loss = -(1 - label_smoothing) * log_sigmoid(pull) + label_smoothing * log_sigmoid(-pull)
    return loss / (1 - 2 * label_smoothing)


def ln_dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: Beta = 5.0,
) -> Tensor:
    """-log sig(beta (x/|chosen| - y/|rejected|)), x and y the log-ratios. (B,) -> (B,).

    Length-normalized DPO: a long answer does not outweigh a short one. Tulu 3, arXiv 2411.15124, eq. 6.
    """
    up = (chosen - ref_chosen) / chosen_lengths
    down = (rejected - ref_rejected) / rejected_lengths
    return -log_sigmoid(beta * (up - down))


def mpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_nll: Tensor,
    *,
    beta: Beta = 0.1,
    preference_weight: Annotated[NonNegative, Setting("Weight of DPO's loss.")] = 0.8,
    quality_weight: Annotated[NonNegative, Setting("Weight of BCO's loss.")] = 0.2,
    generation_weight: Annotated[NonNegative, Setting("Weight of the chosen answer's likelihood.")] = 1.0,
) -> Tensor:
    """w_p DPO + w_q BCO + w_g NLL(chosen). (B,) -> (B,).

    Mixed preference optimization, arXiv 2411.10442, eq. 4. With ``quality_weight`` 0 it is RPO, arXiv
    2404.19733: DPO that keeps the chosen answer likely.
    """
    answers = (chosen, rejected, ref_chosen, ref_rejected)
    pairs = preference_weight * dpo(*answers, beta=beta) + quality_weight * bco(*answers, beta=beta)
    return pairs + generation_weight * chosen_nll


def hinge(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """max(0, 1 - beta D): no gradient beyond the margin. (B,) -> (B,). SLiC-HF, arXiv 2305.10425."""
    return (1 - beta * margin(chosen, rejected, ref_chosen, ref_rejected)).clamp(min=0)


def ipo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    tau: Annotated[Positive, Setting("Determines the target margin, 1 / (2 tau); TRL's beta.")] = 0.1,
    level: Annotated[
        Literal["summed", "averaged"],
        Setting("Log-ratios averaged over tokens (like the authors and TRL), or summed over the answer."),
    ] = "averaged",
) -> Tensor:
    """(D - 1 / (2 tau))^2 with D of summed or per-token averaged log-ratios. (B,) -> (B,).

    IPO, arXiv 2310.12036. The authors average; codes that sum are not comparable in tau.
    """
    up = chosen - ref_chosen
    down = rejected - ref_rejected
    if level == "averaged":
        up = up / chosen_lengths
        down = down / rejected_lengths
    return (up - down - 1 / (2 * tau)).square()


def exo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: Beta = 0.1,
    label_smoothing: Annotated[PairNoise, Gt(0)] = 1e-3,
) -> Tensor:
    """KL(q || (1 - e, e)), q = (sig(beta D), sig(-beta D)): the reverse of DPO's direction. (B,) -> (B,).

    EXO on pairs, arXiv 2402.00856, eq. 16; e = ``label_smoothing`` is the preference for the rejected one.
    """
    pull = beta * margin(chosen, rejected, ref_chosen, ref_rejected)
    up = pull.sigmoid() * (log_sigmoid(pull) - math.log1p(-label_smoothing))
    down = (-pull).sigmoid() * (log_sigmoid(-pull) - math.log(label_smoothing))
    return up + down


def nca(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """-log sig(x) - log sig(-x) / 2 - log sig(-y) / 2; x, y = beta log-ratio of either. (B,) -> (B,).

    Each answer by itself: the chosen one's likelihood does not fall with the rejected one's. NCA, arXiv
    2402.05369.
    """
    x = beta * (chosen - ref_chosen)
    y = beta * (rejected - ref_rejected)
    return -log_sigmoid(x) - 0.5 * log_sigmoid(-x) - 0.5 * log_sigmoid(-y)


def bco(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """-log sig(x) - log sig(-y); x, y = beta log-ratio of the chosen and rejected answer. (B,) -> (B,).

    BCO, arXiv 2404.04656, on pairs and without its shift of the rewards, as TRL's bco_pair.
    """
    return -log_sigmoid(beta * (chosen - ref_chosen)) - log_sigmoid(-beta * (rejected - ref_rejected))


def sppo(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """(x - 1 / (2 beta))^2 + (y + 1 / (2 beta))^2; x, y = log-ratio of either. (B,) -> (B,).

    SPPO, arXiv 2405.00675, eq. 4.7, with a win probability of 1 for the chosen answer.
    """
    aim = 1 / (2 * beta)
    return (chosen - ref_chosen - aim).square() + (rejected - ref_rejected + aim).square()


def apo_zero(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """1 - sig(x) + sig(y); x, y = beta log-ratio of either. (B,) -> (B,).

    Raises the chosen answer and lowers the rejected one: for chosen answers better than the model's own.
    APO-zero, arXiv 2408.06266, eq. 7.
    """
    return 1 - (beta * (chosen - ref_chosen)).sigmoid() + (beta * (rejected - ref_rejected)).sigmoid()


def apo_down(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """sig(x) + 1 - sig(beta D); x = beta log-ratio of the chosen answer. (B,) -> (B,).

    Lowers both, the rejected answer more: for chosen answers worse than the model's own. APO-down, arXiv
    2408.06266, eq. 8.
    """
    pull = beta * margin(chosen, rejected, ref_chosen, ref_rejected)
    return (beta * (chosen - ref_chosen)).sigmoid() + 1 - pull.sigmoid()


def discopop(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: Beta = 0.1,
    tau: Annotated[
        Positive, Setting("Width of the change from the logistic to the exponential loss.")
    ] = 0.05,
) -> Tensor:
    """-(1 - m) log sig(beta D) + m e^(-beta D), m = sig(beta D / tau). (B,) -> (B,).

    The loss that a language model proposed; not convex: at a margin of 0 its slope is positive, so training
    may settle at a negative margin. DiscoPOP, arXiv 2406.08414, eq. 5.
    """
    pull = beta * margin(chosen, rejected, ref_chosen, ref_rejected)
    mixed = (pull / tau).sigmoid()
    return -(1 - mixed) * log_sigmoid(pull) + mixed * (-pull).exp()


def kto(
    log_ratio: Tensor,
    desirable: Tensor,
    reference_point: Tensor,
    *,
    beta: Beta = 0.1,
    desirable_weight: GoodWeight = 1.0,
    undesirable_weight: BadWeight = 1.0,
) -> Tensor:
    """w (1 - sig(+-beta (log_ratio - z0))): unpaired answers, judged good or bad. (B,) -> (B,).

    ``log_ratio`` is log pi(y) - log ref(y); ``desirable`` (B,) bool; ``reference_point`` z0, the
    mean KL of mismatched pairs, is detached and clamped at 0. KTO, arXiv 2402.01306.
    """
    z0 = reference_point.detach().clamp(min=0)
    # +1 where the answer is desirable, -1 where not; the weights likewise.
    sign = log_ratio.new_ones(()).where(desirable, -1.0)
    weight = log_ratio.new_tensor(desirable_weight).where(desirable, undesirable_weight)
    return weight * (1 - (sign * beta * (log_ratio - z0)).sigmoid())


def apo_zero_unpaired(
    log_ratio: Tensor,
    desirable: Tensor,
    *,
    beta: Beta = 0.1,
    desirable_weight: GoodWeight = 1.0,
    undesirable_weight: BadWeight = 1.0,
) -> Tensor:
    """w (1 - sig(+-beta log_ratio)): KTO with a reference point of 0. (B,) -> (B,).

    For good answers that are better than the model's own. APO-zero, arXiv 2408.06266, eq. 7, applied
    to answers that are judged alone (TRL).
    """
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    return kto(log_ratio, desirable, log_ratio.new_zeros(()), beta=beta, **weights)


def orpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    nll: Tensor,
    *,
    lam: Annotated[
        NonNegative,
        Setting("Weight of the odds ratio in addition to the likelihood of the chosen answer; TRL's beta."),
    ] = 0.1,
) -> Tensor:
    """NLL - lam log sig(log odds ratio), the odds of averaged log-probs. (B,) -> (B,).

    odds(p) = p / (1 - p); no reference. ORPO, arXiv 2403.07691, whose authors train the prompt too.
    """
    up = chosen / chosen_lengths
    down = rejected / rejected_lengths
    # log odds(p) = log p - log(1 - p), here of p = e^up and e^down.
    log_odds = (up - down) - (_log1mexp(up) - _log1mexp(down))
    return nll - lam * log_sigmoid(log_odds)


def simpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: Beta = 2.0,
    gamma: Annotated[NonNegative, Setting("Target margin between the chosen and the rejected answer.")] = 0.5,
) -> Tensor:
    """-log sig(beta (log pi(x)/|x| - log pi(y)/|y|) - gamma). (B,) -> (B,). SimPO, 2405.14734."""
    return -log_sigmoid(beta * (chosen / chosen_lengths - rejected / rejected_lengths) - gamma)


def bradley_terry(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    center: Annotated[NonNegative, Setting("Keeps scores around 0: larger pulls harder.")] = 0.0,
) -> Tensor:
    """-log sig(s(x) - s(y)) + center (s(x) + s(y))^2. (B,) -> (B,).

    Bradley-Terry; ``center`` keeps scores around 0, arXiv 2312.09244.
    """
    loss = -log_sigmoid(chosen_scores - rejected_scores)
    return loss + center * (chosen_scores + rejected_scores).square()


PREFERENCES: Mapping[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        dpo, ipo, kto, orpo, simpo, robust_dpo, hinge, exo, nca, bco, sppo, apo_zero, apo_down, discopop,
        apo_zero_unpaired, ln_dpo, mpo,
    )
}  # fmt: skip
"""`method` -> its loss, whose keyword-only parameters a config's `loss` may set."""


def _log1mexp(x: Tensor) -> Tensor:
    # log(1 - e^x) for x < 0; x = 0 (probability 1) is moved off the pole.
    return (-(x.clamp(max=-1e-7).expm1())).log()
