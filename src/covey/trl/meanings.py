"""The meaning of every field of TRL's configs: a setting, the trainer's own, no effect, or a refusal.

Names that may be in YAML files too are in ``covey.config.trl_arguments``.
"""

from __future__ import annotations

from collections.abc import Mapping

from covey.config import trl
from covey.config.trl_arguments import ARGUMENTS, BATCHES, EVALUATED, Meaning, as_inert, as_read, as_setting
from covey_verify.errors import ConfigError


class UnsupportedArgument(ConfigError, ValueError):
    """A value of TRL that covey does not support. TRL raises ValueError for its own refusals."""


def _as_setting(**names: str) -> dict[str, Meaning]:
    return {name: as_setting(key) for name, key in names.items()}


def _as_read(names: str, text: str, note: bool = False) -> dict[str, Meaning]:
    return dict.fromkeys(names.split(), as_read(text, note))


def _as_inert(names: str, why: str) -> dict[str, Meaning]:
    return dict.fromkeys(names.split(), as_inert(why))


def _as_refused(names: str, why: str) -> dict[str, Meaning]:
    return dict.fromkeys(names.split(), Meaning("refused", why))


def _shared_meaning(name: str) -> Meaning:
    """Return the meaning of a name that is valid in YAML files too."""
    if name in trl.SAME_MEANING:
        return as_setting(trl.SAME_MEANING[name])
    if name in trl.LOSS:
        return as_setting("algorithm")
    argument = ARGUMENTS[name]
    if argument.script:
        return argument.script
    return as_inert(argument.remark) if argument.inert else Meaning("refused", trl.advice_on(name))


SHARED_MEANINGS: Mapping[str, Meaning] = {
    **{name: _shared_meaning(name) for name in trl.NAMES},
    "max_steps": BATCHES,
    "eval_steps": EVALUATED,
    **_as_inert("gradient_checkpointing activation_checkpointing", "it changes memory only"),
    **_as_inert("dataset_num_proc activation_offloading", "it changes speed and memory only"),
    **_as_inert("padding_free", "rows are never padded"),
}
"""The meanings of fields in all configs that have them."""
SAMPLING_MEANINGS: Mapping[str, Meaning] = {
    **dict.fromkeys(("num_generations", "num_iterations"), BATCHES),
    **_as_read("num_generations_eval", "completions of a prompt that `evaluate` samples"),
}
TRUNCATED = "longer rows are truncated"
FIXED_REFERENCE = (
    "a preference loss computes the reference's log-probs once, before the first step, and needs no model in "
    "memory for them. For a newer reference start another run from the trained model"
)
ROW_READING = "how rows are read"
OWN_MEANINGS: Mapping[str, Mapping[str, Meaning]] = {
    "GRPOConfig": SAMPLING_MEANINGS,
    "RLOOConfig": {
        **SAMPLING_MEANINGS,
        **_as_setting(normalize_advantages="algorithm"),
        **_as_refused("reward_clip_range", "clip within the reward function"),
    },
    "SFTConfig": {
        **_as_read("max_length truncation_mode", TRUNCATED),
        **_as_read("dataset_text_field dataset_kwargs chat_template_path eos_token pad_token", ROW_READING),
        **_as_read("completion_only_loss assistant_only_loss", "which tokens are trained"),
        **_as_read("loss_type", "nll"),
        **_as_read(
            "packing packing_strategy",
            "rows are never padded, so packing changes no loss; a step has as many rows as its packed "
            "sequences would hold on average",
            note=True,
        ),
        **_as_inert("eval_packing", "all rows are evaluated"),
        **_as_inert("shuffle_dataset", "rows are shuffled in every epoch, as in TRL"),
    },
    "DPOConfig": {
        **_as_read("max_length truncation_mode", TRUNCATED),
        **_as_read("pad_token", "how rows are read"),
        **_as_setting(beta="loss.beta", loss_type="method"),
        **_as_read(
            "label_smoothing", "loss.label_smoothing of robust and exo_pair; no other loss has it", note=True
        ),
        **_as_inert("precompute_ref_log_probs precompute_ref_batch_size", "they are always precomputed"),
        **_as_setting(discopop_tau="loss.tau", f_divergence_type="loss.divergence"),
        **_as_setting(f_alpha_divergence_coef="loss.alpha"),
        **_as_read("loss_weights", "the weights of method mpo"),
        **_as_inert("ref_model_mixup_alpha ref_model_sync_steps", "the reference of a preference loss stays"),
        **_as_refused(
            "ld_alpha",
            "every token of an answer counts alike; loss_type='sigmoid_norm' divides by the lengths instead",
        ),
        **_as_refused("use_weighting", "pairs count alike"),
        **_as_refused("sync_ref_model", FIXED_REFERENCE),
    },
    "KTOConfig": {
        **_as_read("max_length", TRUNCATED),
        **_as_setting(beta="loss.beta", desirable_weight="loss.desirable_weight"),
        **_as_setting(undesirable_weight="loss.undesirable_weight"),
        **_as_inert("precompute_ref_log_probs precompute_ref_batch_size", "they are always precomputed"),
        **_as_inert("ref_model_mixup_alpha ref_model_sync_steps", "the reference of a preference loss stays"),
        **_as_read("loss_type", "the method"),
        **_as_refused("sync_ref_model", FIXED_REFERENCE),
    },
    "RewardConfig": {
        **_as_read("max_length", "longer rows are left out"),
        **_as_read("chat_template_path eos_token pad_token", "how rows are read"),
        **_as_setting(center_rewards_coefficient="loss.center"),
    },
}  # fmt: skip
"""Config -> the meanings of fields that no other config has, or that differ from SHARED."""


MEANINGS: Mapping[str, Mapping[str, Meaning]] = {
    config: {**SHARED_MEANINGS, **own} for config, own in OWN_MEANINGS.items()
}
"""Config -> field -> its meaning."""


def refusal(config: str, name: str) -> str:
    """Return why a field must keep its default; '' if other values are supported."""
    meaning = MEANINGS[config].get(name)
    if meaning is None:
        return "covey does not know this name"
    return meaning.text if meaning.kind == "refused" else ""
