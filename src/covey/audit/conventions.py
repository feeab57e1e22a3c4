"""The algorithm that a framework's settings mean, computed by covey's own functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from torch import Tensor

from covey.audit.frameworks import words_of
from covey.audit.record import AuditRecord
from covey.config.algorithm import build_algorithm
from covey.config.trl import LOSS
from covey.config.trl_loss import algorithm_of
from covey.objective import corrections, reductions, surrogates
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.bound import bind
from covey.objective.dialects import DIALECTS
from covey_verify.errors import ConfigError

ADVANTAGES = ("scale_rewards", "multi_objective_aggregation")
"""TRL's arguments that decide about advantages alone."""


@lru_cache(maxsize=8)
def convention_of(record: AuditRecord) -> Algorithm | None:
    """Return the algorithm of a record's settings; None if they do not say, or covey lacks it."""
    if record.algorithm is not None:
        return record.algorithm
    if record.header.framework == "trl":
        return _trl(record)
    words = words_of(record.header.framework)
    preset = words.presets.get(str(record.setting(words.estimator)))
    if preset == "grpo" and record.setting("algorithm.norm_adv_by_std_in_grpo") is False:
        preset = "dr_grpo"
    return None if preset is None else DIALECTS[words.dialect].algorithm(preset)


def is_rloo(record: AuditRecord) -> bool:
    """Whether a run of TRL is its RLOOTrainer's, which alone has this setting."""
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
    # The micro-batches of bnpo do not matter for advantages; `same_loss` knows that they do for the loss.
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
    """Return TRL's settings of the loss that are not its defaults.

    Its arguments have values for every loss_type, and `algorithm_of` refuses arguments without effect.
    """
    settings = record.header.settings
    return {n: settings[n] for n, usual in LOSS.items() if n in settings and settings[n] != usual}


def same_loss(record: AuditRecord) -> bool:
    """Whether covey's loss is the framework's to the last term, so that the two can be compared."""
    if record.header.framework != "trl":
        return False
    is_plain = (
        record.number("top_entropy_quantile", 1.0) == 1.0
        and record.number("entropy_coef", 0.0) == 0.0
        and record.setting("off_policy_mask_threshold") is None
        and not record.setting("use_vllm")
    )
    if is_rloo(record):
        return False
    settings = _loss_settings(record)
    # A mean over the micro-batch is that over the update if there is one.
    if settings.get("loss_type") == "bnpo" and record.number("gradient_accumulation_steps", 1) == 1:
        settings["loss_type"] = "dapo"
    try:
        algorithm_of(settings)
    except ConfigError:
        return False
    return is_plain and not record.setting("sync_ref_model")


DUAL_CLIP: Mapping[str, float] = {"verl": 3.0}
"""Framework -> the bound of its dual clip where the settings say nothing."""
MEANS: Mapping[str, Callable[..., Tensor]] = {
    "token-mean": reductions.token_mean,
    "token-sum": reductions.token_sum,
    "seq-mean-token-sum": reductions.sequence_sum,
    "seq-mean-token-mean": reductions.sequence_mean,
}
"""verl's loss_agg_mode -> covey's reduction."""


def loss_of_calls(record: AuditRecord) -> Algorithm | None:
    """Return the clipped loss that a run's settings ask for; None of another loss."""
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
    """Return OpenRLHF's importance correction: mismatch -> weights; None without, or of another kind."""
    if record.setting("algo.advantage.is_correction_enable") is not True:
        return None
    bounds = record.setting("algo.advantage.is_correction_threshold", [0.5, 5.0])
    low, high = map(float, bounds) if isinstance(bounds, list) else (0.0, math.inf)
    kind = record.setting("algo.advantage.is_correction_type", "tis")
    if kind == "icepop":
        return partial(corrections.masked, low=low, high=high)
    return (lambda mismatch: mismatch.exp().clamp(low, high)) if kind == "tis" else None
