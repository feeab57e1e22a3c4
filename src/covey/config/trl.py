"""TRL's names (GRPOConfig of 1.16, ModelConfig, the script's arguments) and their equivalents in covey.

A name of TRL either means exactly what it means in TRL, or it is refused with covey's key and the difference.
Names with the same meaning are in the rows of the settings (``Setting.trl``); the names of the loss are read
together, with TRL's defaults for arguments that are not given; ``OTHERS`` has a row for each of the others.
The tables in `trl_fields` have all fields of TRL's configs; benchmarks/trl_tests/fields.py writes them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from covey.config.rows import schema_rows
from covey_verify.errors import ConfigError

TABLES = Path(__file__).parent / "trl_fields"
Fields: TypeAlias = Mapping[str, tuple[str, object]]
"""Field -> its type, in words, and its default."""


@cache
def trl_table(name: str) -> Fields:
    """Return a table of `trl_fields`, in TRL's order."""
    lines = (TABLES / f"{name}.txt").read_text("utf-8").splitlines()
    rows = (line.partition(": ") for line in lines)
    parts = ((field, rest.partition(" = ")) for field, _, rest in rows)
    return {field: (kind, ast.literal_eval(default)) for field, (kind, _, default) in parts}


def trl_fields(config: str) -> Fields:
    """Return the fields of a trainer's config: the fields that all trainers share, and its own."""
    return {**trl_table("common"), **trl_table(config)}


DEFAULTS: Mapping[str, object] = {name: default for name, (_, default) in trl_fields("GRPOConfig").items()}
"""GRPOConfig's defaults."""
OF_SCRIPTS = ("ModelConfig", "ScriptArguments", "GRPOScriptArguments")
CHECKED_IN = frozenset(DEFAULTS).union(*(trl_table(name) for name in OF_SCRIPTS))
"""All names of GRPOConfig, and of the configs that scripts have besides."""

SAME: Mapping[str, str] = {name: row.key for row in schema_rows() for name in row.setting.trl_names}
"""TRL's name -> the setting with the same meaning, to which it is renamed with a note."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "lr_scheduler_type": {
        "linear": "linear",
        "cosine": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
    },
    "optim": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_8bit": "adamw_8bit",
        "adamw_bnb_8bit": "adamw_8bit",
    },
}
"""For TRL's names with words as values: TRL's word -> covey's; other words are refused."""

PER_UPDATE = frozenset({"max_steps", "save_steps", "eval_steps"})
"""Names that TRL counts in optimizer steps and covey in rollout batches: equal with one update per batch."""

TrlLoss: TypeAlias = Mapping[str, object]
"""TRL's names of the loss -> their values, read from YAML."""
IN_LOSS = (
    "loss_type", "beta", "epsilon", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg",
    "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "importance_sampling_level",
    "scale_rewards", "multi_objective_aggregation", "use_bias_correction_kl", "sync_ref_model",
    "ref_model_sync_steps", "ref_model_mixup_alpha", "entropy_coef", "off_policy_mask_threshold",
)  # fmt: skip
LOSS: TrlLoss = {name: DEFAULTS[name] for name in IN_LOSS}
"""The names that together define TRL's loss, with TRL's defaults; ``config/trl_loss.py`` reads them."""


class Other(NamedTuple):
    """Advice on a name of TRL that is no setting here."""

    remark: str
    """The replacement, or the reason why there is none."""
    exists: bool = True
    """Whether covey has it in another form."""
    inert: bool = False
    """Whether it has no effect on training, so that a script's value may be dropped."""


def _instead(names: str, remark: str, inert: bool = False) -> dict[str, Other]:
    return dict.fromkeys(names.split(), Other(remark, inert=inert))


def _absent(names: str, why: str, inert: bool = False) -> dict[str, Other]:
    return dict.fromkeys(names.split(), Other(why, exists=False, inert=inert))


_NO_VLLM = "completions are sampled by covey itself, or on the servers that rollout.sampler.url names"
_LORA = "write lora: {rank: 16, alpha: 32}; naming lora switches it on"
_ENTROPY = "write algorithm: {entropy: {target: 0.2}}; its"

OTHERS: Mapping[str, Other] = {
    **_instead(
        "warmup_steps",
        "write train.warmup_steps, whose first step has the rate lr / N (TRL's has 0)",
    ),
    **_instead(
        "lr_scheduler_kwargs", "write train.schedule: {cosine: 0.1}, which ends at a tenth of train.lr"
    ),
    **_instead("warmup_ratio", "write train.warmup_steps, a number of steps"),
    **_instead(
        "weight_decay",
        "write train.weight_decay, which spares biases and norms as TRL's does",
    ),
    **_instead("adam_beta1 adam_beta2", "write both as train.betas: [0.9, 0.999]"),
    **_instead(
        "num_train_epochs",
        "write train.steps; an epoch is (rows / rollout.prompts_per_step) of them",
    ),
    **_instead(
        "per_device_train_batch_size",
        "write rollout.prompts_per_step, in prompts of rollout.group_size completions each; memory is "
        "bounded by train.tokens_per_micro_batch",
    ),
    **_instead(
        "gradient_accumulation_steps",
        "write rollout.prompts_per_step for the size of a batch; it is split by "
        "train.tokens_per_micro_batch without changing the result",
    ),
    **_instead("generation_batch_size", "write rollout.prompts_per_step and rollout.group_size"),
    **_instead(
        "steps_per_generation",
        "write train.updates_per_batch, the optimizer steps of a rollout batch",
    ),
    **_instead("save_strategy", "leave it out; train.save_every says how often", inert=True),
    **_instead(
        "eval_strategy evaluation_strategy",
        "leave it out; eval.every says how often (0: before and after training only)",
        inert=True,
    ),
    **_instead("do_eval", "leave it out; eval.every says how often", inert=True),
    **_instead("eval_on_start", "leave it out; covey always measures before and after training", inert=True),
    **_instead("bf16", "write dtype: bfloat16, which stores the weights in it, and trains a float32 copy"),
    **_instead("torch_dtype", "write dtype"),
    **_instead("use_cpu", "write device: cpu"),
    **_instead(
        "top_entropy_quantile",
        "write algorithm: {select_tokens: {name: top_entropy, fraction: 0.2}, token_weights: "
        "[selected_only]}, a fraction of the whole update (TRL's is of each micro-batch)",
    ),
    **_instead(
        "use_adaptive_entropy",
        "write algorithm: {entropy: {target: 0.2}}, whose bonus fades out above the target (TRL's stops)",
    ),
    **_instead("entropy_target", f"{_ENTROPY} controller is not TRL's"),
    **_instead("entropy_coef_min entropy_coef_max", f"{_ENTROPY} bounds, 0 and 0.1, are fixed"),
    **_instead("entropy_coef_delta", f"{_ENTROPY} step, 0.005, is fixed"),
    **_instead("reward_weights", "write the weights with the rewards: rewards: [{name: weight}, ...]"),
    **_instead("use_peft", "write lora: {rank: 16, alpha: 32}"),
    **_instead("lora_r lora_alpha", _LORA),
    **_instead(
        "lora_target_modules",
        "write lora: {targets: [q_proj, v_proj]}; the default is all linear layers",
    ),
    **_instead("dataset_name", "write data.train, a file or as hub:OWNER/NAME, or data.task"),
    **_instead("dataset_train_split", "write data.train: hub:OWNER/NAME?split=train"),
    **_instead("dataset_test_split", "write data.test: hub:OWNER/NAME?split=test"),
    **_instead("reward_model_name_or_path", "write it in rewards: see docs/rewards.md"),
    **_instead("use_vllm", "write rollout.sampler.url, the addresses of servers: [http://127.0.0.1:8000]"),
    **_instead("vllm_server_base_url", "write rollout.sampler.url, as [http://127.0.0.1:8000]"),
    **_instead("resume_from_checkpoint", "give the same command again, or `covey resume RUN`"),
    **_instead(
        "max_prompt_length",
        "leave it out; data.long_prompts says what happens to prompts that do not fit",
        inert=True,
    ),
    **_instead(
        "log_completions",
        "leave it out; every completion is kept in the run's rollouts/",
        inert=True,
    ),
    **_instead("full_determinism", "leave it out; runs are deterministic", inert=True),
    **_absent("vllm_mode vllm_server_port vllm_server_host vllm_server_timeout vllm_group_port", _NO_VLLM),
    **_absent(
        "vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_max_model_length "
        "vllm_tensor_parallel_size cache_implementation use_transformers_continuous_batching "
        "use_transformers_paged ds3_gather_for_generation transformers_continuous_batching_config "
        "use_cache",
        "the engine fits itself to model and memory",
        inert=True,
    ),
    **_absent(
        "vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_cap",
        f"{_NO_VLLM}; for another sampler's drift there is algorithm.correction",
    ),
    **_absent(
        "min_p repetition_penalty generation_kwargs vllm_structured_outputs_regex",
        "sampling has rollout.temperature, top_p, top_k and stop, nothing else",
    ),
    **_absent(
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
        "include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name "
        "project trackio_space_id trackio_bucket_id trackio_static_space_id log_multimodal "
        "num_completions_to_print log_unique_prompts log_completions_hub_repo skip_memory_metrics "
        "debug",
        "metrics, completions and curves are always written to the run's folder",
        inert=True,
    ),
    **_absent(
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
        "nothing is uploaded",
    ),
    **_absent(
        "accelerator_config parallelism_config fsdp fsdp_config deepspeed",
        "write launch.processes, or start covey under torchrun; weights are split by FSDP2",
    ),
    **_absent(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend ddp_timeout local_rank average_tokens_across_devices save_on_each_node "
        "ignore_bias_buffers",
        "how processes talk to each other is covey's own, and does not change the result",
        inert=True,
    ),
    **_absent(
        "shuffle_dataset data_seed dataloader_drop_last label_names dataset_config "
        "train_sampling_strategy length_column_name dataset_streaming",
        "data is read whole and shuffled by the seed",
    ),
    **_absent(
        "remove_unused_columns dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context",
        "data is read whole; there is no loader",
        inert=True,
    ),
    **_absent(
        "eval_delay per_device_eval_batch_size prediction_loss_only eval_do_concat_batches "
        "eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics "
        "bf16_full_eval fp16_full_eval do_train do_predict",
        "evaluation counts correct answers: see the section eval",
    ),
    **_absent(
        "save_only_model enable_jit_checkpoint load_best_model_at_end metric_for_best_model "
        "greater_is_better ignore_data_skip restore_callback_states_from_checkpoint",
        "checkpoints are always whole, and the last model is kept",
    ),
    **_absent(
        "optim_args adam_epsilon optim_target_modules label_smoothing_factor "
        "neftune_noise_alpha disable_dropout cast_lm_head_to_fp32 router_aux_loss_coef tf32",
        "it cannot be changed",
    ),
    **_absent(
        "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config "
        "attn_implementation pad_to_multiple_of",
        "the forward pass is covey's own, without padding",
        inert=True,
    ),
    **_absent(
        "auto_find_batch_size torch_empty_cache_steps gradient_checkpointing_kwargs "
        "activation_checkpointing_kwargs",
        "micro-batches shrink by themselves where memory is short",
        inert=True,
    ),
    **_absent(
        "fp16 load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage",
        "numbers are float32 or bfloat16",
    ),
    **_absent(
        "model_init_kwargs trust_remote_code model_revision",
        "models are loaded without code of their own and as they are",
    ),
    **_absent(
        "lora_dropout lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora",
        "lora has rank, alpha and targets, nothing else",
    ),
}
"""Advice on all names that are neither in SAME nor in LOSS."""

OLDER = frozenset({"max_prompt_length", "warmup_ratio", "torch_dtype", "evaluation_strategy"})
"""Names of earlier TRL versions that are still found in scripts."""
NAMES = frozenset({*SAME, *LOSS, *OTHERS})
"""All names of TRL that are known here."""


def advice_on(name: str) -> str:
    """Return advice on a name of TRL that is no setting of covey; '' for other names.

    >>> advice_on("use_vllm")[:18], advice_on("lr")
    ("for TRL's use_vllm", '')
    """
    if name in LOSS:
        return f"TRL's {name} belongs at the top of a config, in place of algorithm"
    if name in SAME:
        return f"TRL's {name} is covey's {SAME[name]}"
    if name not in OTHERS:
        return ""
    other = OTHERS[name]
    if other.exists:
        return f"for TRL's {name} {other.remark}"
    return f"TRL's {name} has no equivalent: {other.remark}"


def covey_value(name: str, value: object) -> object:
    """Return covey's value for TRL's value of a name in ``SAME``. Raises ConfigError if there is none."""
    words = VALUES.get(name)
    if words is None or (isinstance(value, str) and value in words.values()):
        return value
    if not isinstance(value, str) or value not in words:
        raise ConfigError(f"{SAME[name]}: TRL's {name} {value!r} is not supported; use {', '.join(words)}")
    return words[value]
