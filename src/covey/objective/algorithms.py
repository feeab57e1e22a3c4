"""Every algorithm of the field as a composition: a choice on each axis, one row a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from covey.objective import (
    advantages,
    credit,
    filters,
    multipliers,
    penalties,
    ratios,
    reductions,
    surrogates,
    weights,
)
from covey.objective.choice import Choice, use
from covey.objective.penalties import KL
from covey.types import NonNegative, Positive

AXES: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "advantage": (
        advantages.reward,
        advantages.group_centered,
        advantages.group_zscore,
        advantages.leave_one_out,
        advantages.leave_one_out_zscore,
        advantages.length_weighted,
        advantages.mean_normalized,
        advantages.greedy_baseline,
        advantages.component_zscore,
        advantages.component_leave_one_out,
        credit.process_zscore,
        credit.prefix_tree,
        credit.optimal_token_baseline,
        credit.gae,
    ),
    "whiten": (
        advantages.batch_centered,
        advantages.batch_std,
        advantages.sample_zscore,
        advantages.token_zscore,
        advantages.valid_group_scale,
    ),
    "ratio": (
        ratios.on_policy,
        ratios.token,
        ratios.sequence,
        ratios.sequence_token,
        ratios.response,
        ratios.geometric_clipped,
    ),
    "surrogate": (
        surrogates.vanilla,
        surrogates.clip,
        surrogates.cispo,
        surrogates.sapo,
        surrogates.vespo,
        surrogates.divergence_mask_tv,
        surrogates.divergence_mask_kl,
        surrogates.kl_on_marked,
    ),
    "estimator": (penalties.k1, penalties.k2, penalties.k3, penalties.absolute, penalties.full),
    "reduce": (
        reductions.token_mean,
        reductions.sequence_mean,
        reductions.sequence_sum,
        reductions.constant_length,
        reductions.prompt_mean,
    ),
    "weight": (
        weights.truncated,
        weights.masked,
        weights.geometric_mask,
        weights.decoupled,
        weights.off_policy_mask,
    ),
    "mark": (multipliers.top_entropy, multipliers.top_covariance, multipliers.random_covariant),
    "multipliers": (
        multipliers.marked_only,
        multipliers.unmarked_only,
        multipliers.unlikely_only,
        multipliers.future_influence,
    ),
    "filter": (filters.informative, filters.mixed, filters.pass_rate_band),
}
"""The functions a config may name on each axis; ``module.py:function`` brings one's own."""
PROPORTIONAL = frozenset(AXES["surrogate"]) - {surrogates.kl_on_marked}
"""Surrogates whose gradient vanishes with the advantage."""


@dataclass(frozen=True)
class Entropy:
    """An entropy bonus in the loss, fixed or steered towards a target."""

    coef: NonNegative = 0.0
    """Weight of the bonus; the start value where ``target`` is set."""
    target: Positive | None = None
    """Adaptive: nats per token to keep."""


@dataclass(frozen=True)
class Algorithm:
    """A policy-optimization algorithm: one choice on each axis; a bare function is a choice too.

    >>> from covey.objective.surrogates import clip
    >>> mine = replace(PRESETS["grpo"], surrogate=use(clip, clip_low=0.1, clip_high=0.3))
    >>> mine.surrogate.settings["clip_high"]
    0.3
    """

    advantage: Choice
    """One group's data -> (G,) or (G, T)."""
    ratio: Choice = use(ratios.token)
    """(N, T) log-ratios -> (N, T) ratios."""
    surrogate: Choice = use(surrogates.clip)
    """Ratios and advantages -> (N, T) losses."""
    reduce: Choice = use(reductions.token_mean)
    """Weight of each completion, (N,)."""
    kl: KL | None = None
    """Pull to a reference; None keeps no reference in memory."""
    whiten: Choice | None = None
    """Second step of the advantage, across the rollout batch: (N, T) -> (N, T)."""
    entropy: Entropy | None = None
    weight: Choice | None = None
    """Correction for a sampler that disagrees with the trainer."""
    mark: Choice | None = None
    """Tokens of the optimizer step that are singled out."""
    multipliers: tuple[Choice, ...] = ()
    """Factors on the policy term."""
    filter: Choice | None = None
    """Groups to train on; rejected ones are replaced by dynamic sampling."""
    old: Literal["trainer", "sampler"] = "trainer"
    """Whose log-probs the ratio divides by: recomputed ones, or the sampler's (bypass)."""
    paper: str = field(default="", compare=False)
    """Source and the settings its authors report."""

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name not in ("kl", "entropy", "old", "paper")):
            value = getattr(self, name)
            bare = callable(value) and not isinstance(value, Choice)
            object.__setattr__(self, name, use(value) if bare else value)

    def but(self, paper: str, **axes: Any) -> Algorithm:
        """The algorithm of another paper: this one, but for some axes."""
        return replace(self, paper=paper, **axes)

    @property
    def factors(self) -> tuple[Choice, ...]:
        """All multipliers of the policy term, the rollout weight first."""
        return (*((self.weight,) if self.weight else ()), *self.multipliers)

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the first policy is kept."""
        return self.kl is not None

    @property
    def moves_reference(self) -> bool:
        """Whether the reference is renewed on the way."""
        return self.kl is not None and self.kl.refresh_every is not None

    @property
    def needs_old(self) -> bool:
        """Whether log-probs from before the update are read outside the loss."""
        outside = [c for c in (self.advantage, self.whiten, self.mark) if c]
        names = {n for c in outside for n in c.needs if n.startswith("old_")}
        return bool(names) or (self.kl is not None and self.kl.place == "reward")

    @property
    def skips_idle(self) -> bool:
        """Whether a completion with zero advantage has zero gradient, so that it may be left out."""
        pulls = (self.kl is not None and self.kl.place == "loss") or self.entropy is not None
        return not pulls and self.surrogate.function in PROPORTIONAL

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The choices on all axes but the KL estimator."""
        one = (self.advantage, self.whiten, self.ratio, self.surrogate, self.reduce, self.mark, self.filter)
        return (*(c for c in one if c), *self.factors)

    @property
    def needs(self) -> frozenset[str]:
        """Names of all data that any axis asks for."""
        names = {name for choice in self.choices for name in choice.needs}
        if self.kl is not None:
            names |= set(self.kl.estimator.needs)
        names |= {"ref_logprobs"} if "difference" in names else set()
        return frozenset(names | ({"entropy"} if self.entropy else set()))


_GRPO = Algorithm(
    paper="DeepSeekMath, arXiv 2402.03300: group 64, lr 1e-6, KL .04, one update per batch.",
    advantage=use(advantages.group_zscore),
    surrogate=use(surrogates.clip, clip_low=0.2, clip_high=0.2),
    reduce=use(reductions.sequence_mean),
    kl=KL(use(penalties.k3), coef=0.04),
)
_NO_KL = replace(_GRPO, kl=None)
_BY_TOKEN = replace(_NO_KL, reduce=use(reductions.token_mean))
_DAPO = _BY_TOKEN.but(
    "DAPO, arXiv 2503.14476: clip .2/.28, no KL, dynamic sampling, 16 x 512, lr 1e-6; with "
    "the reward `soft_overlong`.",
    surrogate=use(surrogates.clip, clip_low=0.2, clip_high=0.28),
    filter=filters.informative,
)
_REINFORCE = Algorithm(
    paper="Williams 1992: A = r, no clip; a baseline over the batch is whiten batch_centered.",
    advantage=use(advantages.reward),
    ratio=use(ratios.on_policy),
    surrogate=use(surrogates.vanilla),
    reduce=use(reductions.sequence_sum),
)
_GSPO = _NO_KL.but(
    "GSPO, arXiv 2507.18071: clip 3e-4/4e-4 on the geometric-mean ratio, 4 minibatches.",
    ratio=ratios.sequence,
    surrogate=use(surrogates.clip, clip_low=3e-4, clip_high=4e-4),
)
_RPP = replace(_BY_TOKEN, whiten=use(advantages.token_zscore))

PRESETS: Mapping[str, Algorithm] = {
    "reinforce": _REINFORCE,
    "rloo": _REINFORCE.but(
        "RLOO, arXiv 2402.14740: k 2 or 4, KL .05 summed over the response, in the reward.",
        advantage=advantages.leave_one_out,
        kl=KL(use(penalties.k1), coef=0.05, place="reward", level="response"),
    ),
    "remax": _REINFORCE.but(
        "ReMax, arXiv 2310.10505: the baseline is the greedy completion's reward.",
        advantage=advantages.greedy_baseline,
    ),
    "ppo": Algorithm(
        paper="PPO, arXiv 1707.06347, as InstructGPT uses it: clip .2, lambda .95, KL in the reward.",
        advantage=use(credit.gae),
        kl=KL(use(penalties.k1), coef=0.05, place="reward"),
    ),
    "vapo": Algorithm(
        paper="VAPO, arXiv 2504.05118: length-adaptive lambda 1 - 1/(.05 l), clip .2/.28, NLL .1.",
        advantage=use(credit.gae, length_adaptive=0.05),
        surrogate=use(surrogates.clip, clip_low=0.2, clip_high=0.28),
    ),
    "grpo": _GRPO,
    "grpo_r1": _GRPO.but(
        "GRPO as DeepSeek-R1 prints it, arXiv 2501.12948: response-level ratio and k3, KL "
        ".001, clip 10 (off), group 16, 16 updates per batch, reference renewed every 400 updates.",
        ratio=ratios.response,
        surrogate=use(surrogates.clip, clip_low=10.0, clip_high=10.0),
        kl=KL(use(penalties.k3), coef=0.001, level="response", refresh_every=400),
    ),
    "grpo_process": _GRPO.but(
        "GRPO with process supervision, arXiv 2402.03300, 4.1.3; needs rewards by step.",
        advantage=use(credit.process_zscore, credit="sum_to_go"),
    ),
    "grpo_prefix_tree": _NO_KL.but(
        "Credit where completions part, after TEMPO, arXiv 2509.18314, whose own form adds the "
        "outcome's advantage (advantage.outcome 1); no extra rollouts.",
        advantage=credit.prefix_tree,
        reduce=reductions.sequence_sum,
    ),
    "dr_grpo": _NO_KL.but(
        "Dr. GRPO, arXiv 2503.20783: no std, constant length; group 8, lr 1e-6, 3,000 tokens.",
        advantage=advantages.group_centered,
        reduce=reductions.constant_length,
    ),
    "dapo": _DAPO,
    "lite_ppo": _BY_TOKEN.but(
        "Lite PPO, arXiv 2508.08221: group mean, batch std, token mean; group 8.",
        advantage=advantages.group_centered,
        whiten=use(advantages.batch_std, of="rewards"),
    ),
    "gspo": _GSPO,
    "gspo_token": _GSPO.but(
        "GSPO-token, arXiv 2507.18071, 4.3: GSPO's ratio for advantages that vary by token.",
        ratio=ratios.sequence_token,
    ),
    "luspo": _GSPO.but(
        "LUSPO, arXiv 2602.05261: GSPO weighted by length, clip 2e-3/2.5e-3.",
        surrogate=use(surrogates.clip, clip_low=2e-3, clip_high=2.5e-3),
        reduce=reductions.sequence_sum,
    ),
    "gmpo": _NO_KL.but(
        "GMPO, arXiv 2507.20673: log-ratios clipped at .4 before their mean.",
        ratio=use(ratios.geometric_clipped, clip_log=0.4),
        surrogate=surrogates.vanilla,
    ),
    "cispo": _BY_TOKEN.but(
        "CISPO, arXiv 2506.13585: detached weight with an upper bound, token mean.",
        surrogate=use(surrogates.cispo, cap=5.0),
    ),
    "sapo": _NO_KL.but(
        "SAPO, arXiv 2511.20347: soft gate, tau 1.0 up and 1.05 down.",
        surrogate=use(surrogates.sapo, tau_up=1.0, tau_down=1.05),
    ),
    "vespo": _BY_TOKEN.but(
        "VESPO, arXiv 2602.10693: gamma weight on the response ratio, k/lam 2/3 up, 3/2 down.",
        ratio=ratios.response,
        surrogate=use(surrogates.vespo, k_up=2.0, lam_up=3.0, k_down=3.0, lam_down=2.0),
    ),
    "dppo": _BY_TOKEN.but(
        "DPPO, arXiv 2602.04879: total-variation mask .15 against the sampler's probabilities.",
        advantage=advantages.group_centered,
        surrogate=use(surrogates.divergence_mask_tv, threshold=0.15),
        old="sampler",
    ),
    "gdpo": _BY_TOKEN.but(
        "GDPO, arXiv 2601.05242, the authors' TRL fork: z-score per reward, then over samples.",
        advantage=advantages.component_zscore,
        whiten=advantages.sample_zscore,
    ),
    "gdpo_tokens": _BY_TOKEN.but(
        "GDPO as the authors' verl fork computes it: eps 1e-6, then a z-score over tokens.",
        advantage=use(advantages.component_zscore, eps=1e-6),
        whiten=advantages.token_zscore,
    ),
    "gdpo_leave_one_out": _BY_TOKEN.but(
        "GDPO as NeMo-RL computes it: leave-one-out mean and std per reward, no eps in the batch.",
        advantage=advantages.component_leave_one_out,
        whiten=use(advantages.sample_zscore, eps=0.0),
    ),
    "reinforce_pp": _RPP.but(
        "REINFORCE++, arXiv 2501.03262: returns with k1 in the reward, whitened over tokens.",
        advantage=advantages.reward,
        kl=KL(use(penalties.k1), coef=0.01, place="reward"),
    ),
    "reinforce_pp_baseline": _RPP.but(
        "REINFORCE++-baseline, arXiv 2501.03262, as verl whitens (tokens); k2 in the loss. "
        "ms-swift: whiten batch_std of advantages; TRL's nearest: batch_std of rewards.",
        advantage=advantages.group_centered,
        kl=KL(use(penalties.k2), coef=0.01),
    ),
    "max_rl": _BY_TOKEN.but(
        "MaxRL, arXiv 2602.02710: divided by the mean; 128 rollouts, lr 1e-5.",
        advantage=advantages.mean_normalized,
    ),
    "opo": _REINFORCE.but(
        "OPO, arXiv 2505.23585: length-weighted baseline, exactly on-policy, no KL, no std.",
        advantage=advantages.length_weighted,
        reduce=reductions.token_mean,
    ),
    "gpg": _REINFORCE.but(
        "GPG, arXiv 2504.02546: centred, scaled up by the share of groups with a signal.",
        advantage=advantages.group_centered,
        whiten=advantages.valid_group_scale,
        reduce=reductions.token_mean,
    ),
    "scale_rl": _NO_KL.but(
        "ScaleRL, arXiv 2510.13786: CISPO cap 5 against the sampler, std of all advantages, prompt "
        "mean, tied groups dropped; without its FP32 logits and its retirement of solved prompts.",
        advantage=advantages.group_centered,
        whiten=use(advantages.batch_std, of="advantages"),
        surrogate=use(surrogates.cispo, cap=5.0),
        reduce=reductions.prompt_mean,
        filter=filters.informative,
        old="sampler",
    ),
    "clip_cov": _BY_TOKEN.but(
        "Clip-Cov, arXiv 2505.22617: 2e-4 of the tokens, covariance in [1, 5], get no gradient; "
        "the ratio clip is as good as off (1/1).",
        surrogate=use(surrogates.clip, clip_low=1.0, clip_high=1.0),
        mark=use(multipliers.random_covariant, share=2e-4, low=1.0, high=5.0),
        multipliers=(use(multipliers.unmarked_only),),
    ),
    "kl_cov": _BY_TOKEN.but(
        "KL-Cov, arXiv 2505.22617: |log ratio| penalty 1 on the top 2e-3 (7B), 2e-4 (32B).",
        mark=use(multipliers.top_covariance, share=2e-3),
        surrogate=use(surrogates.kl_on_marked, coef=1.0),
    ),
    "entropy_80_20": _DAPO.but(
        "Beyond the 80/20 rule, arXiv 2506.01939: DAPO on the 20 % of highest entropy.",
        mark=use(multipliers.top_entropy, share=0.2),
        multipliers=(use(multipliers.marked_only),),
    ),
    "fipo": _DAPO.but(
        "FIPO, arXiv 2603.19835: DAPO times future influence in [1, 1.2], half-life 32, safety 4, "
        "outliers and dual clip at 10.",
        surrogate=use(surrogates.clip, clip_low=0.2, clip_high=0.28, dual_clip=10.0),
        multipliers=(use(multipliers.future_influence),),
    ),
    "intellect_2": _GRPO.but(
        "INTELLECT-2, arXiv 2505.07291: two-sided clip, delta 4, KL .001, group 16, lr 3e-7.",
        surrogate=use(surrogates.clip, clip_low=0.2, clip_high=0.2, dual_clip=4.0),
        kl=KL(use(penalties.k3), coef=0.001),
    ),
    "dual_clip": _BY_TOKEN.but(
        "Dual-clip PPO, arXiv 1912.09729: c = 3 and a mean over tokens, as verl's default.",
        surrogate=use(surrogates.clip, clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    ),
}
"""name -> algorithm, each with its paper's settings; a config overrides any axis of one."""
