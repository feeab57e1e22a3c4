"""The translation of TRL's loss into an `algorithm` block, from all its names and their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from covey.config.algorithm import rows_of
from covey.config.trl import LOSS, TrlLoss
from covey.objective.corrections import off_policy_mask
from covey.objective.reductions import constant_length, sequence_mean, sequence_sum, token_mean
from covey.objective.surrogates import cispo, clip, sapo, vespo
from covey_verify.errors import ConfigError


class LossParts(NamedTuple):
    """The parts of a loss_type of TRL."""

    surrogate: Callable[..., object]
    reduce: Callable[..., object]


KINDS: Mapping[str, LossParts] = {
    "grpo": LossParts(clip, sequence_mean),
    "dr_grpo": LossParts(clip, constant_length),
    "dapo": LossParts(clip, token_mean),
    "luspo": LossParts(clip, sequence_sum),
    "cispo": LossParts(cispo, token_mean),
    "sapo": LossParts(sapo, sequence_mean),
    "vespo": LossParts(vespo, token_mean),
}
SCALES: Mapping[str, dict[str, object]] = {
    "group": {"advantage": "group_zscore", "whiten": None},
    "none": {"advantage": "group_centered", "whiten": None},
    "batch": {"advantage": "group_centered", "whiten": {"name": "batch_std", "of": "rewards"}},
}
"""scale_rewards -> the axes that it sets."""


def _names(function: Callable[..., object]) -> dict[str, str]:
    """Return setting -> TRL's name, for the settings of a function that have one."""
    rows = rows_of(function, "")
    return {row.key.lstrip("."): name for row in rows for name in row.setting.trl_names}


OF_ONE_KIND = frozenset(name for kind in KINDS.values() for name in _names(kind.surrogate).values())
"""Names that act only in the surrogates of some values of loss_type."""


def algorithm_of(of_user: TrlLoss) -> dict[str, object]:
    """Return TRL's loss as a config's `algorithm` block, from the user's names and TRL's defaults.

    Raises ConfigError for values that TRL itself would refuse or ignore, or that covey cannot reproduce
    exactly.

    >>> algorithm_of({"loss_type": "dr_grpo", "epsilon": 0.1})["surrogate"]
    {'name': 'clip', 'clip_low': 0.1, 'clip_high': 0.1, 'dual_clip': None}
    """
    loss = {**LOSS, **of_user}
    kind = loss["loss_type"]
    if kind == "bnpo":
        raise ConfigError(
            "loss_type bnpo depends on the micro-batches, because it divides by the tokens of each; use "
            "loss_type: dapo, which divides by the tokens of the whole update"
        )
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"loss_type: {kind!r} is unknown; TRL has {', '.join(KINDS)}")
    drift = _settings(off_policy_mask, loss)
    return {
        "name": "grpo",
        **_advantage(loss),
        "ratio": _ratio(loss),
        "surrogate": _surrogate(kind, loss, of_user),
        "reduce": _reduction(kind),
        "kl": _kl(loss, of_user),
        "entropy": _entropy(kind, loss),
        "correction": None if drift["delta"] is None else drift,
    }


def _settings(function: Callable[..., object], loss: TrlLoss) -> dict[str, object]:
    """Return a function's mapping with TRL's values of its settings."""
    named = {setting: loss[name] for setting, name in _names(function).items()}
    return {"name": function.__name__, **named}


def _surrogate(kind: str, loss: TrlLoss, of_user: TrlLoss) -> dict[str, object]:
    function = KINDS[kind].surrogate
    # The user's names that belong to another loss_type's surrogate.
    for name in sorted(set(of_user) & OF_ONE_KIND - set(_names(function).values())):
        raise ConfigError(f"{name} has no effect with TRL's loss_type {kind}; remove it")
    settings = _settings(function, loss)
    # TRL's epsilon_high defaults to epsilon.
    if function is clip and settings["clip_high"] is None:
        settings["clip_high"] = settings["clip_low"]
    if function is cispo and settings["cap"] is None:
        raise ConfigError(
            "loss_type cispo without epsilon_high caps every weight at epsilon, 0.2; set epsilon_high, the "
            "cap of the ratio itself (usually 5.0)"
        )
    return settings


def _advantage(loss: TrlLoss) -> dict[str, object]:
    aggregation = loss["multi_objective_aggregation"]
    scale = loss["scale_rewards"]
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    if aggregation == "normalize_then_sum":
        return {"advantage": "component_zscore", "whiten": "sample_zscore"}
    if aggregation != "sum_then_normalize":
        raise ConfigError(
            f"multi_objective_aggregation: {aggregation!r} is unknown; TRL has sum_then_normalize, "
            "normalize_then_sum"
        )
    if not isinstance(scale, str) or scale not in SCALES:
        raise ConfigError(f"scale_rewards: {scale!r} is unknown; TRL has true, false, group, batch, none")
    return SCALES[scale]


def _ratio(loss: TrlLoss) -> str:
    level = loss["importance_sampling_level"]
    if level not in ("token", "sequence"):
        raise ConfigError(f"importance_sampling_level: {level!r} is unknown; TRL has token, sequence")
    if loss["loss_type"] != "vespo":
        return str(level)
    if level != "token":
        raise ConfigError("loss_type vespo always weights by sequence; remove importance_sampling_level")
    return "completion"


def _kl(loss: TrlLoss, of_user: TrlLoss) -> dict[str, object] | None:
    beta = loss["beta"]
    corrected = loss["use_bias_correction_kl"]
    synced = loss["sync_ref_model"]
    idle = {"ref_model_sync_steps", "ref_model_mixup_alpha"} & set(of_user)
    if idle and not synced:
        raise ConfigError(f"{min(idle)} has no effect without sync_ref_model: true")
    if beta == 0 or beta is None:
        if synced:
            raise ConfigError("sync_ref_model: with beta 0 there is no reference model to refresh; set beta")
        return None
    if corrected and loss["loss_type"] == "vespo":
        raise ConfigError(
            "beta with loss_type vespo: TRL weights the KL by each token's ratio, covey by the response's "
            "ratio; set use_bias_correction_kl: false"
        )
    kl = {"estimator": "k3", "coef": beta, "place": "loss", "level": "token"}
    # use_bias_correction_kl weights each token's KL by its ratio, which is covey's gradient `ratio`.
    kl |= {"gradient": "ratio" if corrected else "formula"}
    if synced:
        kl |= {"refresh_every": loss["ref_model_sync_steps"], "refresh_mix": loss["ref_model_mixup_alpha"]}
    return kl


def _reduction(kind: str) -> dict[str, object]:
    """Return the reduction; TRL's means over completions also count those without trained tokens."""
    reduce = KINDS[kind].reduce
    return {"name": reduce.__name__, **({} if reduce is token_mean else {"rows": "all"})}


def _entropy(kind: str, loss: TrlLoss) -> dict[str, object] | None:
    if loss["entropy_coef"] == 0 or loss["entropy_coef"] is None:
        return None
    if KINDS[kind].reduce is not token_mean:
        raise ConfigError(
            f"entropy_coef with loss_type {kind}: TRL's bonus is a mean over tokens, covey's has the weights "
            f"of the loss; use loss_type dapo, or algorithm: {{entropy: {{coef: ...}}}}"
        )
    return {"coef": loss["entropy_coef"]}
