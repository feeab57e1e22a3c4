"""The published algorithms as compositions: one function on each axis, one row per name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from covey.objective import (
    advantages,
    credit,
    filters,
    penalties,
    ratios,
    reductions,
    surrogates,
    token_weights,
    value,
)
from covey.objective.axis_function import AnyAxisFunction, AxisFunction, bind, has_trait
from covey.objective.penalties import KL, Entropy
from covey.objective.setting import Setting
from covey.objective.value import Critic
from covey.types import Credit
from covey_verify.types import NonNegative

if TYPE_CHECKING:
    from torch import Tensor

    from covey.objective.data import BatchData, FilterData, GroupData, LossInputs, SelectionData

OldPolicy = Literal["trainer", "sampler"]
RECORDED = ("kl", "entropy", "critic", "nll", "old", "paper")
"""Fields of an algorithm that are not functions of the objective."""


@dataclass(frozen=True)
class Algorithm:
    """A policy-optimization algorithm: one function with its settings on each axis; a plain one has defaults.

    >>> from covey.objective.surrogates import clip
    >>> mine = replace(PRESETS["grpo"], surrogate=bind(clip, clip_low=0.1, clip_high=0.3))
    >>> mine.surrogate.settings["clip_high"]
    0.3
    """

    advantage: Annotated[
        AxisFunction[GroupData, Tensor],
        Setting("Turns the rewards of a group into an advantage for each completion or token."),
    ]
    """One group's data -> (G,) or (G, T)."""
    ratio: Annotated[
        AxisFunction[LossInputs, Tensor],
        Setting(
            "Ratio of the policy to the sampling policy: by token, sequence or completion.",
            trl="importance_sampling_level",
        ),
    ] = bind(ratios.token)
    """(N, T) log-ratios -> (N, T) ratios."""
    surrogate: Annotated[
        AxisFunction[LossInputs, Tensor],
        Setting("Turns ratio and advantage into the loss of a token: the clip rule."),
    ] = bind(surrogates.clip)
    """Ratios and advantages -> (N, T) losses."""
    reduce: Annotated[
        AxisFunction[LossInputs, Tensor],
        Setting("Weight of a token in the loss of an update.", trl="loss_type"),
    ] = bind(reductions.token_mean)
    """Weight of each completion, (N,)."""
    kl: Annotated[
        KL | None,
        Setting(
            "The KL penalty; null keeps no reference in memory. A number is its coefficient.",
            resume="refused",
        ),
    ] = None
    whiten: Annotated[
        AxisFunction[BatchData, Tensor] | None,
        Setting("A second step of the advantage, over the whole batch.", trl="scale_rewards"),
    ] = None
    """(N, T) -> (N, T)."""
    entropy: Annotated[Entropy | None, Setting("The entropy bonus. A number is its coefficient.")] = None
    critic: Annotated[
        Critic | None,
        Setting("The critic, whose values gae needs; null: none. A word is its trunk."),
    ] = None
    nll: Annotated[
        NonNegative,
        Setting("Weight of the likelihood of correct completions in addition to the policy loss; VAPO: 0.1."),
    ] = 0.0
    """The negative log-likelihood is a mean over the tokens of correct completions."""
    correction: Annotated[
        tuple[AxisFunction[LossInputs, Tensor], ...],
        Setting("Importance corrections for a sampler that disagrees with the trainer; several multiply."),
    ] = ()
    select_tokens: Annotated[
        AxisFunction[SelectionData, Tensor] | None,
        Setting("Selects tokens for token_weights, or for a surrogate that reads `selected`."),
    ] = None
    """(N, T) bool, over all completions of an optimizer step."""
    token_weights: Annotated[
        tuple[AxisFunction[LossInputs, Tensor], ...],
        Setting("A list of weights of tokens in the policy loss."),
    ] = ()
    """(N, T)."""
    filter: Annotated[
        AxisFunction[FilterData, bool] | None,
        Setting("Condition for training a group; other groups are resampled."),
    ] = None
    old: Annotated[
        OldPolicy, Setting("Log-probs that the ratio divides by: the trainer's, or the sampler's.")
    ] = "trainer"
    """``trainer``: recomputed by the trainer; ``sampler``: as the sampler recorded them (bypass)."""
    paper: str = field(default="", compare=False)
    """Source and the settings its authors report."""

    def __post_init__(self) -> None:
        # The dataclass is frozen, so fields are set through ``object``; an axis with several functions is a
        # tuple.
        for name in (f.name for f in fields(self) if f.name not in RECORDED):
            value = getattr(self, name)
            part = tuple(map(_bind_plain, value)) if isinstance(value, tuple) else _bind_plain(value)
            object.__setattr__(self, name, part)

    def variant(self, paper: str, **axes: Any) -> Algorithm:
        """Return this algorithm with some axes replaced, for a variant of another paper."""
        return replace(self, paper=paper, **axes)

    @property
    def policy_weights(self) -> tuple[AxisFunction[LossInputs, Tensor], ...]:
        """All token weights of the policy term, the importance corrections first."""
        return (*self.correction, *self.token_weights)

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the first policy is kept."""
        return self.kl is not None and self.kl.to == "reference"

    @property
    def whole_groups(self) -> bool:
        """Whether a completion's loss depends on its siblings, which then share a micro-batch."""
        # Advantages are computed before the batch is split, so only functions of the loss matter here.
        return any("group" in c.needs for c in (self.ratio, self.surrogate, *self.policy_weights))

    @property
    def moves_reference(self) -> bool:
        """Whether the reference is replaced during the run."""
        return self.kl is not None and self.kl.refresh_every is not None

    @property
    def needs_old(self) -> bool:
        """Whether log-probs from before the update are read outside the loss."""
        # These axes run before the loss, which alone can use the current log-probs as the old ones.
        outside: list[AnyAxisFunction] = [c for c in (self.advantage, self.whiten, self.select_tokens) if c]
        names = {n for c in outside for n in c.needs if n.startswith("old_")}
        return bool(names) or (self.kl is not None and self.kl.place == "reward")

    @property
    def credit(self) -> Credit:
        """The finest unit whose rewards the algorithm reads: token, step, component or completion."""
        # From the finest unit to the coarsest: the first match decides.
        if {"values", "token_rewards"} & self.needs:
            return "token"
        if "steps" in self.needs:
            return "step"
        return "component" if "components" in self.needs else "completion"

    @property
    def discount(self) -> float:
        """The discount of later rewards, which a critic's targets share; 1 for an advantage without one."""
        return float(self.advantage.all_settings.get("gamma", 1.0))

    @property
    def values_on_policy(self) -> bool:
        """Whether the critic is a head on the policy's hidden states."""
        return self.critic is not None and self.critic.trunk == "policy"

    @property
    def skips_idle(self) -> bool:
        """Whether a completion with zero advantage has zero gradient, so that it may be left out."""
        # Terms that have a gradient even where the advantage is 0.
        pulls = (self.kl is not None and self.kl.place == "loss") or self.entropy is not None or self.nll > 0
        return not (pulls or self.values_on_policy) and has_trait(self.surrogate.function, "proportional")

    @property
    def functions(self) -> tuple[AnyAxisFunction, ...]:
        """The functions on all axes but the KL estimator's."""
        parts: tuple[AnyAxisFunction | None, ...] = (
            *(self.advantage, self.whiten, self.ratio, self.surrogate, self.reduce),
            *(self.select_tokens, self.filter),
        )
        return (*(c for c in parts if c), *self.policy_weights)

    @property
    def all_functions(self) -> tuple[AnyAxisFunction, ...]:
        """The functions on all axes."""
        return self.functions if self.kl is None else (*self.functions, self.kl.estimator)

    @property
    def needs(self) -> frozenset[str]:
        """Names of all data that any axis asks for."""
        names = {name for part in self.functions for name in part.needs}
        if self.kl is not None:
            # A KL to the sampler reads recorded log-probs and needs no reference model.
            names |= set(self.kl.estimator.needs) if self.needs_reference else set()
        # Even if the estimator reads none: guards and KL metrics need the log-probs of sampled tokens.
        names |= {"ref_logprobs"} if self.needs_reference or "ref_log_ratio" in names else set()
        return frozenset(names | ({"entropy"} if self.entropy else set()))


def _bind_plain(value: object) -> Any:
    """Return a plain function as an ``AxisFunction`` without settings, anything else unchanged."""
    return bind(value) if callable(value) and not isinstance(value, AxisFunction) else value


_GRPO = Algorithm(
    paper="DeepSeekMath, arXiv 2402.03300: group 64, lr 1e-6, KL .04, one update per batch.",
    advantage=bind(advantages.group_zscore),
    surrogate=bind(surrogates.clip, clip_low=0.2, clip_high=0.2),
    reduce=bind(reductions.sequence_mean),
    kl=KL(bind(penalties.k3), coef=0.04),
)
# The rows of ``PRESETS`` are written as differences from these bases.
_NO_KL = replace(_GRPO, kl=None)
_BY_TOKEN = replace(_NO_KL, reduce=bind(reductions.token_mean))
_DAPO = _BY_TOKEN.variant(
    "DAPO, arXiv 2503.14476: clip .2/.28, no KL, dynamic sampling, 16 x 512, lr 1e-6; with "
    "the reward `soft_overlong`.",
    surrogate=bind(surrogates.clip, clip_low=0.2, clip_high=0.28),
    filter=filters.informative,
)
_REINFORCE = Algorithm(
    paper="Williams 1992: A = r, no clip; a baseline over the batch is whiten batch_centered.",
    advantage=bind(advantages.reward),
    ratio=bind(ratios.on_policy),
    surrogate=bind(surrogates.unclipped),
    reduce=bind(reductions.sequence_sum),
)
_GSPO = _NO_KL.variant(
    "GSPO, arXiv 2507.18071: clip 3e-4/4e-4 on the geometric-mean ratio, 4 minibatches.",
    ratio=ratios.sequence,
    surrogate=bind(surrogates.clip, clip_low=3e-4, clip_high=4e-4),
)
_RPP = replace(_BY_TOKEN, whiten=bind(advantages.token_zscore))

PRESETS: Mapping[str, Algorithm] = {
    "reinforce": _REINFORCE,
    "rloo": _REINFORCE.variant(
        "RLOO, arXiv 2402.14740: k 2 or 4, KL .05 summed over the completion, in the reward.",
        advantage=advantages.leave_one_out,
        kl=KL(bind(penalties.k1), coef=0.05, place="reward", level="completion"),
    ),
    "remax": _REINFORCE.variant(
        "ReMax, arXiv 2310.10505: the baseline is the greedy completion's reward.",
        advantage=advantages.greedy_baseline,
    ),
    "ppo": Algorithm(
        paper="PPO, arXiv 1707.06347, as InstructGPT uses it: clip .2, lambda .95, KL by token in the "
        "reward, value clip .2, advantages whitened.",
        advantage=bind(value.gae),
        whiten=bind(advantages.token_zscore),
        kl=KL(bind(penalties.k1), coef=0.05, place="reward"),
        critic=Critic(),
    ),
    "vapo": Algorithm(
        paper="VAPO, arXiv 2504.05118: length-adaptive lambda 1 - 1/(.05 l), clip .2/.28; the critic "
        "learns returns, 50 steps before the policy; NLL .1 of correct answers; lr 1e-6 and 2e-6.",
        advantage=bind(value.gae, length_adaptive=0.05),
        whiten=bind(advantages.token_zscore),
        surrogate=bind(surrogates.clip, clip_low=0.2, clip_high=0.28),
        critic=Critic(lr=2e-6, lam=1.0, warmup=50),
        nll=0.1,
    ),
    "grpo": _GRPO,
    "grpo_r1": _GRPO.variant(
        "GRPO as DeepSeek-R1 prints it, arXiv 2501.12948: completion-level ratio and k3, KL "
        ".001, clip 10 (off), group 16, 16 updates per batch, reference renewed every 400 updates.",
        ratio=ratios.completion,
        surrogate=bind(surrogates.clip, clip_low=10.0, clip_high=10.0),
        kl=KL(bind(penalties.k3), coef=0.001, level="completion", refresh_every=400),
    ),
    "grpo_process": _GRPO.variant(
        "GRPO with process supervision, arXiv 2402.03300, 4.1.3; needs rewards by step.",
        advantage=bind(credit.process_zscore, credit="sum_to_go"),
    ),
    "grpo_prefix_tree": _NO_KL.variant(
        "Credit where completions part, after TEMPO, arXiv 2509.18314, whose own form adds the "
        "outcome's advantage (advantage.outcome 1); no extra rollouts.",
        advantage=credit.prefix_tree,
        reduce=reductions.sequence_sum,
    ),
    "dr_grpo": _NO_KL.variant(
        "Dr. GRPO, arXiv 2503.20783: no std, constant length; group 8, lr 1e-6, 3,000 tokens.",
        advantage=advantages.group_centered,
        reduce=reductions.constant_length,
    ),
    "dapo": _DAPO,
    "lite_ppo": _BY_TOKEN.variant(
        "Lite PPO, arXiv 2508.08221: group mean, batch std, token mean; group 8.",
        advantage=advantages.group_centered,
        whiten=bind(advantages.batch_std, of="rewards"),
    ),
    "gspo": _GSPO,
    "gspo_token": _GSPO.variant(
        "GSPO-token, arXiv 2507.18071, 4.3: GSPO's ratio for advantages that vary by token.",
        ratio=ratios.sequence_token,
    ),
    "luspo": _GSPO.variant(
        "LUSPO, arXiv 2602.05261: GSPO weighted by length, clip 2e-3/2.5e-3.",
        surrogate=bind(surrogates.clip, clip_low=2e-3, clip_high=2.5e-3),
        reduce=reductions.sequence_sum,
    ),
    "gmpo": _NO_KL.variant(
        "GMPO, arXiv 2507.20673: log-ratios clipped at .4 before their mean.",
        ratio=bind(ratios.geometric_clipped, clip_log=0.4),
        surrogate=surrogates.unclipped,
    ),
    "cispo": _BY_TOKEN.variant(
        "CISPO, arXiv 2506.13585: detached weight with an upper bound, token mean.",
        surrogate=bind(surrogates.cispo, cap=5.0),
    ),
    "sapo": _NO_KL.variant(
        "SAPO, arXiv 2511.20347: soft gate, tau 1.0 up and 1.05 down.",
        surrogate=bind(surrogates.sapo, tau_up=1.0, tau_down=1.05),
    ),
    "vespo": _BY_TOKEN.variant(
        "VESPO, arXiv 2602.10693: gamma weight on the completion ratio, k/lam 2/3 up, 3/2 down.",
        ratio=ratios.completion,
        surrogate=bind(surrogates.vespo, k_up=2.0, lam_up=3.0, k_down=3.0, lam_down=2.0),
    ),
    "dppo": _BY_TOKEN.variant(
        "DPPO, arXiv 2602.04879: total-variation mask .15 against the sampler's probabilities.",
        advantage=advantages.group_centered,
        surrogate=bind(surrogates.divergence_mask_tv, threshold=0.15),
        old="sampler",
    ),
    "gdpo": _BY_TOKEN.variant(
        "GDPO, arXiv 2601.05242, the authors' TRL fork: z-score per reward, then over samples.",
        advantage=advantages.component_zscore,
        whiten=advantages.sample_zscore,
    ),
    "reinforce_pp": _RPP.variant(
        "REINFORCE++, arXiv 2501.03262: returns with k1 in the reward, whitened over tokens.",
        advantage=advantages.reward,
        kl=KL(bind(penalties.k1), coef=0.01, place="reward"),
    ),
    "reinforce_pp_baseline": _RPP.variant(
        "REINFORCE++-baseline, arXiv 2501.03262, as verl whitens (tokens); k2 in the loss. "
        "ms-swift: whiten batch_std of advantages; TRL's nearest: batch_std of rewards.",
        advantage=advantages.group_centered,
        kl=KL(bind(penalties.k2), coef=0.01),
    ),
    "max_rl": _BY_TOKEN.variant(
        "MaxRL, arXiv 2602.02710: divided by the mean; 128 rollouts, lr 1e-5.",
        advantage=advantages.mean_normalized,
    ),
    "opo": _REINFORCE.variant(
        "OPO, arXiv 2505.23585: length-weighted baseline, exactly on-policy, no KL, no std.",
        advantage=advantages.length_weighted,
        reduce=reductions.token_mean,
    ),
    "gpg": _REINFORCE.variant(
        "GPG, arXiv 2504.02546: centred, scaled up by the fraction of groups with a signal.",
        advantage=advantages.group_centered,
        whiten=advantages.valid_group_scale,
        reduce=reductions.token_mean,
    ),
    "scale_rl": _NO_KL.variant(
        "ScaleRL, arXiv 2510.13786: CISPO cap 5 against the sampler, std of all advantages, prompt "
        "mean, tied groups dropped; with `rollout.retire_after: 1`. Without its FP32 logits.",
        advantage=advantages.group_centered,
        whiten=bind(advantages.batch_std, of="advantages"),
        surrogate=bind(surrogates.cispo, cap=5.0),
        reduce=reductions.prompt_mean,
        filter=filters.informative,
        old="sampler",
    ),
    "clip_cov": _BY_TOKEN.variant(
        "Clip-Cov, arXiv 2505.22617: 2e-4 of the tokens, covariance in [1, 5], get no gradient; "
        "the ratio clip is as good as off (1/1).",
        surrogate=bind(surrogates.clip, clip_low=1.0, clip_high=1.0),
        select_tokens=bind(token_weights.random_covariant, fraction=2e-4, low=1.0, high=5.0),
        token_weights=(bind(token_weights.unselected_only),),
    ),
    "kl_cov": _BY_TOKEN.variant(
        "KL-Cov, arXiv 2505.22617: |log ratio| penalty 1 on the top 2e-3 (7B), 2e-4 (32B).",
        select_tokens=bind(token_weights.top_covariance, fraction=2e-3),
        surrogate=bind(surrogates.kl_on_selected, coef=1.0),
    ),
    "entropy_80_20": _DAPO.variant(
        "Beyond the 80/20 rule, arXiv 2506.01939: DAPO on the 20 % of highest entropy.",
        select_tokens=bind(token_weights.top_entropy, fraction=0.2),
        token_weights=(bind(token_weights.selected_only),),
    ),
    "fipo": _DAPO.variant(
        "FIPO, arXiv 2603.19835: DAPO times future influence in [1, 1.2], half-life 32, safety 4, "
        "outliers and dual clip at 10.",
        surrogate=bind(surrogates.clip, clip_low=0.2, clip_high=0.28, dual_clip=10.0),
        token_weights=(bind(token_weights.future_influence),),
    ),
    "intellect_2": _GRPO.variant(
        "INTELLECT-2, arXiv 2505.07291: two-sided clip, delta 4, KL .001, group 16, lr 3e-7.",
        surrogate=bind(surrogates.clip, clip_low=0.2, clip_high=0.2, dual_clip=4.0),
        kl=KL(bind(penalties.k3), coef=0.001),
    ),
    "prime_rl": _BY_TOKEN.variant(
        "prime-rl's default: DPPO's total-variation mask, .2, against the sampler, and 1e-3 (log ratio)^2 of "
        "pull towards it, as Kimi K2.5, arXiv 2602.02276.",
        advantage=advantages.group_centered,
        surrogate=bind(surrogates.divergence_mask_tv, threshold=0.2),
        kl=KL(bind(penalties.k2), coef=2e-3, to="sampler"),
        old="sampler",
    ),
    "real": _NO_KL.variant(
        "REAL, arXiv 2602.05630: correct and incorrect completions of a group as two classes, tau .5.",
        advantage=advantages.group_centered,
        surrogate=bind(surrogates.group_classification, tau=0.5),
        reduce=reductions.prompt_mean,
        filter=filters.mixed,
    ),
    "dro": _BY_TOKEN.variant(
        "DRO, arXiv 2405.19107, by token as verl has it: a quadratic pull to the old policy, no clip.",
        advantage=advantages.group_centered,
        surrogate=bind(surrogates.dro, beta=1.0),
    ),
    "vine_ppo": _BY_TOKEN.variant(
        "VinePPO, arXiv 2410.01679: values of steps by continuations sampled from their ends, here 4 at "
        "most 6 places (theirs: 9 at every step); no critic.",
        advantage=bind(credit.segment_difference, continuations=4, most=6),
    ),
    "rae": _REINFORCE.variant(
        "RAE of SPIRAL, arXiv 2506.24119: a running mean of earlier rewards, decay .95, is the baseline.",
        advantage=bind(advantages.running_baseline, decay=0.95),
        reduce=reductions.token_mean,
    ),
    "dual_clip": _BY_TOKEN.variant(
        "Dual-clip PPO, arXiv 1912.09729: c = 3 and a mean over tokens, verl's defaults.",
        surrogate=bind(surrogates.clip, clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    ),
}
"""name -> algorithm, each with its paper's settings; a config overrides any axis of one."""
