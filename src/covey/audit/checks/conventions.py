"""Conventions: the algorithm that a framework's settings ask for, as functions of covey."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial

from torch import Tensor

from covey.audit.checks.kl_rewards import kl_in_rewards
from covey.audit.frameworks import FRAMEWORKS, words_of
from covey.audit.record import AuditRecord
from covey.config.algorithm import build_algorithm
from covey.config.trl import LOSS
from covey.config.trl_loss import KINDS, algorithm_of
from covey.objective import corrections, ratios, reductions, surrogates
from covey.objective.advantages import group_centered
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axis_function import bind
from covey.objective.dialects import DIALECTS
from covey_verify.errors import ConfigError

COMMON_ALGORITHMS = ("grpo", "dr_grpo", "rloo", "reinforce")
"""The algorithms that a run may have if its settings do not say."""
LOSSES = ("dapo", "grpo", "dr_grpo")
"""TRL's names of their losses."""
NAMING_FRAMEWORKS = ("verl", "openrlhf")
"""Frameworks whose settings name the algorithm."""
ADVANTAGES = ("scale_rewards", "multi_objective_aggregation")
"""TRL's arguments that affect only advantages."""


@lru_cache(maxsize=8)
def conventions_of(record: AuditRecord) -> tuple[Algorithm, ...]:
    """Return the algorithms that a run may have: the one that its settings name, or else those in common use;
    none if the settings name one that covey lacks.
    """
    algorithm = convention_of(record)
    if algorithm is not None:
        is_own = record.header.framework not in FRAMEWORKS
        # TRL's settings cannot express a critic, a leave-one-out baseline, or a single completion per prompt.
        if is_own and (
            record.number("num_generations", 0.0) == 1 or has_critic(record) or _is_unknown(record)
        ):
            return ()
        if is_own and algorithm.advantage.function is group_centered:
            return (algorithm, algorithm.variant("", advantage=PRESETS["rloo"].advantage))
        return (algorithm,)
    if algorithm_setting(record) is None:
        return ()
    return tuple(PRESETS[name].variant("", kl=None) for name in COMMON_ALGORITHMS)


def _is_unknown(record: AuditRecord) -> bool:
    """Whether a trainer of no framework names an algorithm that covey lacks, such as expert iteration."""
    name = str(record.setting("algorithm", "grpo")).lower().replace("-", "_").replace(".", "")
    return name.replace(" ", "_") not in PRESETS


def has_critic(record: AuditRecord) -> bool:
    """Whether a run has a critic, whose values are the baseline."""
    return any(value for use in record.uses for value in use.row.values or ())


def algorithm_setting(record: AuditRecord) -> str | None:
    """Return the missing setting that would tell which algorithm a run has; None if it is told already.

    A trainer of no known framework tells it by TRL's settings.
    """
    if (
        record.algorithm is not None
        or record.header.framework in (*NAMING_FRAMEWORKS, "trl")
        or _is_like_trl(record)
    ):
        return None
    return "settings.algorithm" if record.header.framework in FRAMEWORKS else "settings.loss_type"


def _is_like_trl(record: AuditRecord) -> bool:
    """Whether a run has TRL's settings: it is TRL's own, or its trainer uses TRL's words."""
    framework = record.header.framework
    return framework == "trl" or (framework not in FRAMEWORKS and record.setting("loss_type") is not None)


@lru_cache(maxsize=8)
def convention_of(record: AuditRecord) -> Algorithm | None:
    """Return the algorithm that a record's settings name; None if they name none, or covey lacks it."""
    if record.algorithm is not None:
        return record.algorithm
    if _is_like_trl(record):
        return _trl(record)
    words = words_of(record.header.framework)
    preset = words.presets.get(str(record.setting(words.estimator)))
    if preset == "grpo" and record.setting("algorithm.norm_adv_by_std_in_grpo") is False:
        preset = "dr_grpo"
    return None if preset is None else DIALECTS[words.dialect].algorithm(preset)


def is_rloo(record: AuditRecord) -> bool:
    """Whether a run is of TRL's RLOOTrainer: no other trainer has this setting."""
    return "normalize_advantages" in record.header.settings


def _rloo(record: AuditRecord) -> Algorithm:
    """Return the algorithm of TRL's RLOOTrainer; its KL is part of the reward."""
    beta = record.number("beta", 0.0)
    whiten = "sample_zscore" if record.setting("normalize_advantages") is True else None
    kl = {"estimator": "k1", "coef": beta, "place": "reward", "level": "completion"} if beta else None
    return build_algorithm({"name": "rloo", "whiten": whiten, "kl": kl})


def _trl(record: AuditRecord) -> Algorithm | None:
    if is_rloo(record):
        return _rloo(record)
    settings = _loss_settings(record)
    named = str(settings.get("loss_type", "grpo"))
    if record.header.framework not in FRAMEWORKS and named not in (*KINDS, "bnpo"):
        # A loop of no framework may name another algorithm there.
        return PRESETS[named].variant("", kl=None) if named in PRESETS else None
    # bnpo's micro-batches matter for the loss (see `_same_loss`) but not for advantages.
    if settings.get("loss_type") == "bnpo":
        settings["loss_type"] = "dapo"
    advantage_settings = {name: settings[name] for name in ADVANTAGES if name in settings}
    for candidate in (settings, advantage_settings):
        try:
            return build_algorithm(algorithm_of(candidate))
        except ConfigError:
            continue
    return None


def _loss_settings(record: AuditRecord) -> dict[str, object]:
    """Return TRL's settings of the loss that differ from its defaults, except the entropy bonus, which
    `entropy_coefficient` handles.

    TRL gives every argument a value for every loss_type, but `algorithm_of` refuses arguments without effect.
    """
    settings = {name: value for name, value in record.header.settings.items() if value is not None}
    names = set(settings) & set(LOSS) - {"entropy_coef"}
    return {name: settings[name] for name in sorted(names) if settings[name] != LOSS[name]}


def losses_of(record: AuditRecord) -> tuple[Algorithm, ...]:
    """Return the algorithms whose loss may equal a run's, to the last term: the one of its settings, or else
    those in common use; none if covey lacks the loss of its settings.
    """
    algorithm = convention_of(record)
    if algorithm is not None and is_rloo(record):
        low = record.number("epsilon", 0.2)
        clip = bind(surrogates.clip, clip_low=low, clip_high=record.number("epsilon_high", low))
        # TRL's RLOO has one ratio for a completion, the product of its tokens', and a mean over completions.
        mean, ratio = bind(reductions.sequence_mean), bind(ratios.completion)
        return (algorithm.variant("", ratio=ratio, surrogate=clip, reduce=mean, kl=None),)
    if algorithm is not None:
        is_same = _is_like_trl(record) and _same_loss(record)
        return _own_losses(record, algorithm) if is_same else ()
    if algorithm_setting(record) is None or record.header.framework in FRAMEWORKS:
        return ()
    settings = _loss_settings(record)
    levels = ("token", "sequence")
    variants = [
        {**settings, "loss_type": t, "importance_sampling_level": at} for t in LOSSES for at in levels
    ]
    try:
        return tuple(build_algorithm(algorithm_of(variant)) for variant in variants)
    except ConfigError:
        return ()


def _own_losses(record: AuditRecord, algorithm: Algorithm) -> tuple[Algorithm, ...]:
    """Return the losses that TRL's settings may mean; a loop of no framework need not share TRL's habits."""
    losses = [algorithm]
    if record.header.framework in FRAMEWORKS:
        return (algorithm,)
    if algorithm.kl is not None and kl_in_rewards(record) is not None:
        losses = [algorithm.variant("", kl=None)]
    elif algorithm.kl is not None:
        # TRL multiplies the KL of a token by the token's ratio; other loops may use the plain formula.
        losses.insert(0, algorithm.variant("", kl=replace(algorithm.kl, gradient="formula")))
    if all(use.first for use in record.uses):
        losses += [loss.variant("", surrogate=bind(log_likelihood)) for loss in losses]
    return tuple(losses)


def log_likelihood(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi: REINFORCE's loss. Until the policy moves, a loss with a ratio has the same gradient."""
    return -advantages * logprobs


def entropy_coefficient(record: AuditRecord) -> float:
    """Return the coefficient of an entropy bonus whose mean over an update was logged; 0 otherwise."""
    if record.header.framework in FRAMEWORKS or "metrics.entropy" not in record.fields:
        return 0.0
    return record.number("entropy_coef", 0.0)


def _same_loss(record: AuditRecord) -> bool:
    """Whether covey's loss is the framework's, but for an entropy bonus, so that the two can be compared."""
    # TRL's log-probs have no part in its bonus; another loop may make its entropy of them.
    is_trl = record.header.framework == "trl"
    is_plain = (
        record.number("top_entropy_quantile", 1.0) == 1.0
        and (is_trl or record.number("entropy_coef", 0.0) == entropy_coefficient(record))
        and record.setting("off_policy_mask_threshold") is None
        and not record.setting("use_vllm")
    )
    settings = _loss_settings(record)
    # With a single micro-batch, its mean is the mean over the update.
    if settings.get("loss_type") == "bnpo" and record.number("gradient_accumulation_steps", 1) == 1:
        settings["loss_type"] = "dapo"
    try:
        algorithm_of(settings)
    except ConfigError:
        return False
    return is_plain


DUAL_CLIP: Mapping[str, float] = {"verl": 3.0}
"""Framework -> the default bound of its dual clip."""
MEANS: Mapping[str, Callable[..., Tensor]] = {
    "token-mean": reductions.token_mean,
    "token-sum": reductions.token_sum,
    "seq-mean-token-sum": reductions.sequence_sum,
    "seq-mean-token-mean": reductions.sequence_mean,
}
"""verl's loss_agg_mode -> covey's reduction."""


def loss_of_calls(record: AuditRecord) -> Algorithm | None:
    """Return the clipped loss that a run's settings ask for; None if they ask for another loss."""
    mean = MEANS.get(str(record.setting("reduction", "token-mean")))
    if mean is None or record.setting("loss_mode", "vanilla") not in ("vanilla", "ppo"):
        return None
    epsilon = record.number("epsilon", 0.2)
    low = record.number("clip_low", epsilon)
    high = record.number("algorithm.surrogate.clip_high", epsilon)
    bounds = record.setting("clip_bounds")
    if isinstance(bounds, list) and len(bounds) == 2:
        low, high = map(float, bounds)
    dual = record.number("dual_clip", DUAL_CLIP.get(record.header.framework, 0.0))
    surrogate = bind(surrogates.clip, clip_low=low, clip_high=high, dual_clip=dual or None)
    return PRESETS["grpo"].variant("", kl=None, surrogate=surrogate, reduce=bind(mean))


def correction_of(record: AuditRecord) -> Callable[[Tensor], Tensor] | None:
    """Return OpenRLHF's importance correction, mismatch -> weights; None if it is off or of another kind."""
    if record.setting("algo.advantage.is_correction_enable") is not True:
        return None
    bounds = record.setting("algo.advantage.is_correction_threshold", [0.5, 5.0])
    low, high = map(float, bounds) if isinstance(bounds, list) else (0.0, math.inf)
    kind = record.setting("algo.advantage.is_correction_type", "tis")
    if kind == "icepop":
        return partial(corrections.masked, low=low, high=high)
    return (lambda mismatch: mismatch.exp().clamp(low, high)) if kind == "tis" else None
