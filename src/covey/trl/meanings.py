"""The meaning of every field of TRL's configs: covey's setting, the trainer's own reading, or a refusal.

Fields that several trainers share are in ``SHARED``; fields of a single trainer follow. ``covey.config.trl``
has the advice on names that YAML files may hold too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from covey.config import trl
from covey_verify.errors import ConfigError

Kind = Literal["setting", "read", "no effect", "refused"]


class Refused(ConfigError, ValueError):
    """A value of TRL that covey does not support. TRL raises ValueError for its own refusals."""


class Meaning(NamedTuple):
    """The meaning of a field."""

    kind: Kind
    text: str
    note: bool = False
    """Whether a run that gives the field says so, because something differs."""


def _as_setting(**names: str) -> dict[str, Meaning]:
    return {name: Meaning("setting", key) for name, key in names.items()}


def _as_read(names: str, text: str, note: bool = False) -> dict[str, Meaning]:
    return dict.fromkeys(names.split(), Meaning("read", text, note))


def _as_inert(names: str, why: str) -> dict[str, Meaning]:
    return dict.fromkeys(names.split(), Meaning("no effect", f"no effect: {why}", note=True))


def _as_refused(names: str, why: str) -> dict[str, Meaning]:
    return dict.fromkeys(names.split(), Meaning("refused", why))


def _of_files(names: Iterable[str]) -> dict[str, Meaning]:
    """Return the meanings of names that configs in YAML know too."""
    meanings: dict[str, Meaning] = {}
    for name in names:
        if name in trl.SAME:
            meanings[name] = Meaning("setting", trl.SAME[name])
        elif name in trl.LOSS:
            meanings[name] = Meaning("setting", "algorithm")
        elif name in trl.OTHERS:
            other = trl.OTHERS[name]
            text = trl.advice_on(name)
            meanings[name] = Meaning("no effect", text, True) if other.inert else Meaning("refused", text)
    return meanings


_BATCHES = "size and number of batches"
SHARED: Mapping[str, Meaning] = {
    **_as_setting(
        output_dir="output", seed="seed", learning_rate="train.lr", max_grad_norm="train.grad_clip"
    ),
    **_as_setting(lr_scheduler_type="train.schedule", optim="train.optimizer", report_to="tracker"),
    **_as_setting(adam_beta1="train.betas", adam_beta2="train.betas", bf16="dtype", use_cpu="device"),
    **_as_setting(
        save_total_limit="train.keep", save_steps="train.save_every", save_strategy="train.save_every"
    ),
    **_as_read(
        "warmup_steps warmup_ratio",
        "train.warmup_steps: the first step has the rate lr / N, where TRL's has 0",
        note=True,
    ),
    **_as_setting(weight_decay="train.weight_decay"),
    **_as_read("lr_scheduler_kwargs", "how low train.schedule ends"),
    **_as_read(
        "per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps", _BATCHES
    ),
    **_as_read("train_sampling_strategy", "the order of the rows"),
    **_as_read(
        "logging_strategy logging_steps logging_first_step", "how often callbacks and `state` get a log"
    ),
    **_as_read("eval_strategy eval_steps eval_on_start eval_delay", "when `evaluate` is called"),
    **_as_read("disable_tqdm", "silences the console"),
    **_as_read("model_init_kwargs", "how a model is loaded by name"),
    **_as_read("hub_model_id hub_token hub_private_repo", "for push_to_hub()"),
    **_as_read("push_to_hub", "nothing is uploaded during training; call trainer.push_to_hub()", note=True),
    **_as_inert(
        "per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps batch_eval_metrics bf16_full_eval do_train do_eval do_predict",
        "all rows are evaluated, as memory allows",
    ),
    **_as_inert("gradient_checkpointing activation_checkpointing", "it changes memory only"),
    **_as_inert("metric_for_best_model greater_is_better", "the last model is kept"),
    **_as_inert("hub_strategy hub_always_push hub_revision", "nothing is uploaded during training"),
    **_as_inert("accelerator_config", "there is no data loader"),
    **_as_inert("resume_from_checkpoint", "give it to train()"),
    **_as_inert("tf32 cast_lm_head_to_fp32", "log-probs are computed in float32"),
    **_as_inert("dataset_num_proc activation_offloading", "it changes speed and memory only"),
    **_as_inert("router_aux_loss_coef", "a router has no auxiliary loss here"),
    **_as_inert("disable_dropout", "models are trained without dropout"),
    **_as_inert("padding_free pad_to_multiple_of", "rows are never padded"),
    **_as_inert("label_names include_for_metrics", "the columns of each trainer are known"),
    **_as_inert("dataloader_drop_last", "a step always has as many rows as it asks for"),
    **_as_refused("trust_remote_code", "models are loaded without code of their own"),
    **_as_refused("load_best_model_at_end", "the last model is kept"),
    **_as_refused("fp16_full_eval", "numbers are float32 or bfloat16"),
}
SAMPLING: Mapping[str, Meaning] = {
    **_as_read("num_generations steps_per_generation generation_batch_size num_iterations", _BATCHES),
    **_as_read("reward_weights", "the weights of the rewards"),
    **_as_read("num_generations_eval", "completions of a prompt that `evaluate` samples"),
    **_as_read("shuffle_dataset", "the order of the rows"),
    **_as_read("generation_kwargs", "temperature, top_p and top_k"),
    **_as_read(
        "use_vllm vllm_server_base_url vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max",
        "rollout.sampler and algorithm.correction",
    ),
    **_as_read(
        "top_entropy_quantile",
        "algorithm.select_tokens, a fraction of the whole update (TRL's is of each micro-batch)",
        note=True,
    ),
    **_as_inert("ds3_gather_for_generation", "the engine fits itself to model and memory"),
}
TRUNCATED = "longer rows are truncated"
READING = "how rows are read"
OWN: Mapping[str, Mapping[str, Meaning]] = {
    "GRPOConfig": SAMPLING,
    "RLOOConfig": {
        **SAMPLING,
        **dict.fromkeys(
            ("epsilon", "epsilon_high", "beta", "sync_ref_model", "ref_model_sync_steps",
             "ref_model_mixup_alpha", "normalize_advantages"),
            Meaning("setting", "algorithm"),
        ),
        **_as_refused("reward_clip_range", "clip within the reward function"),
    },
    "SFTConfig": {
        **_as_read("max_length truncation_mode", TRUNCATED),
        **_as_read("dataset_text_field dataset_kwargs chat_template_path eos_token pad_token", READING),
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
        **_as_refused("ld_alpha", "every token of an answer counts alike"),
        **_as_refused("use_weighting", "pairs count alike"),
        **_as_refused("sync_ref_model", "the reference of a preference loss stays"),
    },
    "KTOConfig": {
        **_as_read("max_length", TRUNCATED),
        **_as_setting(beta="loss.beta", desirable_weight="loss.desirable_weight"),
        **_as_setting(undesirable_weight="loss.undesirable_weight"),
        **_as_inert("precompute_ref_log_probs precompute_ref_batch_size", "they are always precomputed"),
        **_as_inert("ref_model_mixup_alpha ref_model_sync_steps", "the reference of a preference loss stays"),
        **_as_read("loss_type", "the method"),
        **_as_refused("sync_ref_model", "the reference of a preference loss stays"),
    },
    "RewardConfig": {
        **_as_read("max_length", "longer rows are left out"),
        **_as_read("chat_template_path eos_token pad_token", "how rows are read"),
        **_as_setting(center_rewards_coefficient="loss.center"),
    },
}  # fmt: skip
"""Config -> the meanings of fields that no other config has, or that differ from SHARED."""


def _meanings(config: str) -> dict[str, Meaning]:
    return {**_of_files(trl.CHECKED_IN), **_of_files(trl.OLDER), **SHARED, **OWN[config]}


MEANINGS: Mapping[str, Mapping[str, Meaning]] = {config: _meanings(config) for config in OWN}
"""Config -> field -> its meaning."""


def refusal(config: str, name: str) -> str:
    """Return why a config can only have the default of a field; '' if it may have others."""
    meaning = MEANINGS[config].get(name)
    if meaning is None:
        return "covey does not know this name"
    return meaning.text if meaning.kind == "refused" else ""
