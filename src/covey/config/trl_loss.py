"""TRL's loss as an `algorithm` block: its names are read together, TRL's defaults filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from covey.config.trl import LOSS, TrlLoss
from covey.errors import ConfigError


def algorithm_of(given: TrlLoss) -> dict[str, object]:
    """TRL's loss as a config's `algorithm` block: the names given, TRL's defaults for the others.

    Raises ConfigError for what TRL itself would refuse or ignore, and for what covey cannot do exactly.

    >>> algorithm_of({"loss_type": "dr_grpo", "epsilon": 0.1})["surrogate"]
    {'name': 'clip', 'clip_low': 0.1, 'clip_high': 0.1, 'dual_clip': None}
    """
    loss = {**LOSS, **given}
    kind = loss["loss_type"]
    if kind == "bnpo":
        raise ConfigError(
            "loss_type bnpo divides by the tokens of each micro-batch, so it depends on the micro-batches; "
            "use loss_type: dapo, which divides by those of the whole update"
        )
    if not isinstance(kind, str) or kind not in _SURROGATES:
        raise ConfigError(f"loss_type: {kind!r} is unknown; TRL's are {', '.join(_SURROGATES)}")
    surrogate, reads = _SURROGATES[kind]
    for name in sorted(set(given) & _OF_ONE_LOSS - set(reads)):
        raise ConfigError(f"{name} has no effect with TRL's loss_type {kind}; leave it out")
    threshold = loss["off_policy_mask_threshold"]
    return {
        "name": "grpo",
        **_advantage(loss),
        "ratio": _ratio(loss),
        "surrogate": surrogate(loss),
        "reduce": _reduction(kind),
        "kl": _kl(loss, given),
        "entropy": _entropy(loss),
        "correction": None if threshold is None else {"name": "off_policy_mask", "delta": threshold},
    }


def _clip(loss: TrlLoss) -> dict[str, object]:
    high = loss["epsilon"] if loss["epsilon_high"] is None else loss["epsilon_high"]
    return {"name": "clip", "clip_low": loss["epsilon"], "clip_high": high, "dual_clip": loss["delta"]}


def _cispo(loss: TrlLoss) -> dict[str, object]:
    cap = loss["epsilon_high"]
    if cap is None:
        raise ConfigError(
            "loss_type cispo without epsilon_high caps every weight at epsilon, 0.2; set epsilon_high, the "
            "cap of the ratio itself: 5.0 is usual"
        )
    return {"name": "cispo", "cap": cap}


def _sapo(loss: TrlLoss) -> dict[str, object]:
    up, down = loss["sapo_temperature_pos"], loss["sapo_temperature_neg"]
    return {"name": "sapo", "tau_up": up, "tau_down": down}


def _vespo(loss: TrlLoss) -> dict[str, object]:
    signs = {"up": "pos", "down": "neg"}
    powers = {f"k_{ours}": loss[f"vespo_k_{theirs}"] for ours, theirs in signs.items()}
    return {
        "name": "vespo",
        **powers,
        **{f"lam_{ours}": loss[f"vespo_lambda_{theirs}"] for ours, theirs in signs.items()},
    }


_CLIPPED = (_clip, ("epsilon", "epsilon_high", "delta"))
_SURROGATES: Mapping[str, tuple[Callable[[TrlLoss], dict[str, object]], tuple[str, ...]]] = {
    "grpo": _CLIPPED,
    "dr_grpo": _CLIPPED,
    "dapo": _CLIPPED,
    "luspo": _CLIPPED,
    "cispo": (_cispo, ("epsilon_high",)),
    "sapo": (_sapo, ("sapo_temperature_pos", "sapo_temperature_neg")),
    "vespo": (_vespo, ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")),
}
"""loss_type -> its surrogate, and the names that act in it."""
_OF_ONE_LOSS = frozenset(name for _, names in _SURROGATES.values() for name in names)
_REDUCTIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dr_grpo": "constant_length",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "luspo": "sequence_sum",
}


def _advantage(loss: TrlLoss) -> dict[str, object]:
    scale = loss["scale_rewards"]
    scale = ("none", "group")[scale] if isinstance(scale, bool) else scale
    aggregation = loss["multi_objective_aggregation"]
    if aggregation == "normalize_then_sum":
        return {"advantage": "component_zscore", "whiten": "sample_zscore"}
    if aggregation != "sum_then_normalize":
        raise ConfigError(f"multi_objective_aggregation: {aggregation!r} is none of TRL's")
    known: Mapping[str, dict[str, object]] = {
        "group": {"advantage": "group_zscore", "whiten": None},
        "none": {"advantage": "group_centered", "whiten": None},
        "batch": {"advantage": "group_centered", "whiten": {"name": "batch_std", "of": "rewards"}},
    }
    if not isinstance(scale, str) or scale not in known:
        raise ConfigError(f"scale_rewards: {scale!r} is none of TRL's: true, false, group, batch, none")
    return known[scale]


def _ratio(loss: TrlLoss) -> str:
    kind, level = loss["loss_type"], loss["importance_sampling_level"]
    if level not in ("token", "sequence"):
        raise ConfigError(f"importance_sampling_level: {level!r} is none of TRL's: token, sequence")
    if kind == "vespo":
        if level != "token":
            raise ConfigError(
                "loss_type vespo weights by sequence itself; leave importance_sampling_level out"
            )
        return "response"
    return str(level)


def _kl(loss: TrlLoss, given: TrlLoss) -> dict[str, object] | None:
    beta, corrected = loss["beta"], loss["use_bias_correction_kl"]
    synced = {"ref_model_sync_steps", "ref_model_mixup_alpha"} & set(given)
    if synced and not loss["sync_ref_model"]:
        raise ConfigError(f"{min(synced)} has no effect without sync_ref_model: true")
    if beta == 0 or beta is None:
        if loss["sync_ref_model"]:
            raise ConfigError("sync_ref_model: with beta 0 there is no reference to refresh; set beta")
        return None
    if corrected and loss["loss_type"] == "vespo":
        raise ConfigError(
            "beta with loss_type vespo: TRL weights the KL by token ratios there, covey by the response's; "
            "set use_bias_correction_kl: false"
        )
    kl = {"estimator": "k3", "coef": beta, "place": "loss", "level": "token"}
    kl |= {"gradient": "ratio" if corrected else "formula"}
    if loss["sync_ref_model"]:
        kl |= {"refresh_every": loss["ref_model_sync_steps"], "refresh_mix": loss["ref_model_mixup_alpha"]}
    return kl


def _reduction(kind: str) -> dict[str, object]:
    """TRL's means over completions count those of which nothing is trained."""
    name = _REDUCTIONS[kind]
    return {"name": name, **({} if name == "token_mean" else {"rows": "all"})}


def _entropy(loss: TrlLoss) -> dict[str, object] | None:
    if loss["entropy_coef"] == 0 or loss["entropy_coef"] is None:
        return None
    if _REDUCTIONS[str(loss["loss_type"])] != "token_mean":
        raise ConfigError(
            f"entropy_coef with loss_type {loss['loss_type']}: TRL's bonus is a mean over tokens, covey's is "
            "weighted as the loss is; use loss_type dapo, or algorithm: {entropy: {coef: ...}}"
        )
    return {"coef": loss["entropy_coef"]}
