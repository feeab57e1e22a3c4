"""Arguments of TRL without an equal setting: what to write in YAML, and their meaning in a script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

MeaningKind = Literal["setting", "read", "no effect", "refused"]


class Meaning(NamedTuple):
    """The meaning of a field of TRL's configs in a script."""

    kind: MeaningKind
    text: str
    note: bool = False
    """Whether a run that gives the field says so, because something differs."""


def as_setting(key: str) -> Meaning:
    """Return the meaning of a field that sets ``key``."""
    return Meaning("setting", key)


def as_read(text: str, note: bool = False) -> Meaning:
    """Return the meaning of a field that the trainer itself reads."""
    return Meaning("read", text, note)


def as_inert(why: str) -> Meaning:
    """Return the meaning of a field without an effect."""
    return Meaning("no effect", f"no effect: {why}", note=True)


class Argument(NamedTuple):
    """An argument of TRL that is no setting here."""

    remark: str
    """The replacement in YAML, or the reason why there is none."""
    exists: bool
    """Whether covey has it in another form."""
    inert: bool
    """Whether it has no effect on training, so that a script's value may be dropped."""
    script: Meaning | None
    """The meaning in a script; None: the remark, as a refusal or, if ``inert``, as a note."""


def _instead(
    names: str, remark: str, inert: bool = False, script: Meaning | None = None
) -> dict[str, Argument]:
    return dict.fromkeys(names.split(), Argument(remark, True, inert, script))


def _absent(names: str, why: str, inert: bool = False, script: Meaning | None = None) -> dict[str, Argument]:
    return dict.fromkeys(names.split(), Argument(why, False, inert, script))


BATCHES = as_read("size and number of batches")
EVALUATED = as_read("when `evaluate` is called")
_ORDER = as_read("the order of the rows")
_WARMUP = as_read(
    "train.warmup_steps: the first step has the rate lr / N, where TRL's has 0 and learns nothing", note=True
)
_SERVERS = as_read("rollout.sampler and algorithm.correction")
_NO_VLLM = "completions are sampled by covey itself, or on the servers that rollout.sampler.url names"
_LORA = "write lora: {rank: 16, alpha: 32}"
_ENTROPY = "write algorithm: {entropy: {target: 0.2}}"
_WRITTEN = "metrics, completions and curves are always written to the run's folder"
_DATA = "data is read whole and shuffled by the seed"

ARGUMENTS: Mapping[str, Argument] = {
    **_instead(
        "warmup_steps",
        "write train.warmup_steps, whose first step has the rate lr / N (TRL's has 0)",
        script=_WARMUP,
    ),
    **_instead("warmup_ratio", "write train.warmup_steps, a number of steps", script=_WARMUP),
    **_instead(
        "lr_scheduler_kwargs",
        "write train.schedule: {cosine: 0.1}, which ends at a tenth of train.lr",
        script=as_read("how low train.schedule ends"),
    ),
    **_instead(
        "weight_decay",
        "write train.weight_decay, which spares biases and norms as TRL's does",
        script=as_setting("train.weight_decay"),
    ),
    **_instead(
        "adam_beta1 adam_beta2",
        "write both as train.betas: [0.9, 0.999]",
        script=as_setting("train.betas"),
    ),
    **_instead(
        "num_train_epochs",
        "write train.steps; an epoch is (rows / rollout.prompts_per_step) of them",
        script=BATCHES,
    ),
    **_instead(
        "per_device_train_batch_size",
        "write rollout.prompts_per_step, in prompts of rollout.group_size completions each; memory is "
        "bounded by train.tokens_per_micro_batch",
        script=BATCHES,
    ),
    **_instead(
        "gradient_accumulation_steps",
        "write rollout.prompts_per_step for the size of a batch; it is split by "
        "train.tokens_per_micro_batch without changing the result",
        script=BATCHES,
    ),
    **_instead(
        "generation_batch_size", "write rollout.prompts_per_step and rollout.group_size", script=BATCHES
    ),
    **_instead(
        "steps_per_generation",
        "write train.updates_per_batch, the optimizer steps of a rollout batch",
        script=BATCHES,
    ),
    **_instead(
        "save_strategy",
        "leave it out; train.save_every says how often",
        script=as_setting("train.save_every"),
    ),
    **_instead(
        "eval_strategy evaluation_strategy",
        "leave it out; eval.every says how often (0: before and after training only)",
        script=EVALUATED,
    ),
    **_instead(
        "eval_on_start", "leave it out; covey always measures before and after training", script=EVALUATED
    ),
    **_instead(
        "bf16",
        "write dtype: bfloat16, which stores the weights in it, and trains a float32 copy",
        script=as_setting("dtype"),
    ),
    **_instead("torch_dtype", "write dtype"),
    **_instead("use_cpu", "write device: cpu", script=as_setting("device")),
    **_instead(
        "top_entropy_quantile",
        "write algorithm: {select_tokens: {name: top_entropy, fraction: 0.2}, token_weights: "
        "[selected_only]}, a fraction of the whole update (TRL's is of each micro-batch)",
        script=as_read(
            "algorithm.select_tokens, a fraction of the whole update (TRL's is of each micro-batch)",
            note=True,
        ),
    ),
    **_instead("use_adaptive_entropy", f"{_ENTROPY}, whose bonus fades out above the target (TRL's stops)"),
    **_instead("entropy_target", f"{_ENTROPY}; its controller is not TRL's"),
    **_instead("entropy_coef_min entropy_coef_max", f"{_ENTROPY}; its bounds, 0 and 0.1, are fixed"),
    **_instead("entropy_coef_delta", f"{_ENTROPY}; its step, 0.005, is fixed"),
    **_instead(
        "reward_weights",
        "write the weights with the rewards: rewards: [{name: weight}, ...]",
        script=as_read("the weights of the rewards"),
    ),
    **_instead("use_peft", _LORA),
    **_instead("lora_r lora_alpha", f"{_LORA}; naming lora switches it on"),
    **_instead(
        "lora_target_modules",
        "write lora: {targets: [q_proj, v_proj]}; the default is all linear layers",
    ),
    **_instead("dataset_name", "write data.train, a file or as hub:OWNER/NAME, or data.task"),
    **_instead("dataset_train_split", "write data.train: hub:OWNER/NAME?split=train"),
    **_instead("dataset_test_split", "write data.test: hub:OWNER/NAME?split=test"),
    **_instead("reward_model_name_or_path", "write it in rewards: see docs/rewards.md"),
    **_instead(
        "use_vllm",
        "write rollout.sampler.url, the addresses of servers: [http://127.0.0.1:8000]",
        script=_SERVERS,
    ),
    **_instead(
        "vllm_server_base_url",
        "write rollout.sampler.url, as [http://127.0.0.1:8000]",
        script=_SERVERS,
    ),
    **_instead(
        "resume_from_checkpoint",
        "give the same command again, or `covey resume RUN`",
        script=as_inert("give it to train()"),
    ),
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
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
        f"{_NO_VLLM}; for another sampler's drift there is algorithm.correction",
        script=_SERVERS,
    ),
    **_absent(
        "vllm_importance_sampling_cap",
        f"{_NO_VLLM}; for another sampler's drift there is algorithm.correction",
    ),
    **_absent(
        "min_p repetition_penalty vllm_structured_outputs_regex",
        "sampling has rollout.temperature, top_p, top_k and stop, nothing else",
    ),
    **_absent(
        "generation_kwargs",
        "sampling has rollout.temperature, top_p, top_k and stop, nothing else",
        script=as_read("temperature, top_p and top_k"),
    ),
    **_absent(
        "logging_strategy logging_steps logging_first_step",
        _WRITTEN,
        script=as_read("how often callbacks and `state` get a log"),
    ),
    **_absent("disable_tqdm", _WRITTEN, script=as_read("silences the console")),
    **_absent("report_to", _WRITTEN, script=as_setting("tracker")),
    **_absent(
        "log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level "
        "log_level_replica run_name project trackio_space_id trackio_bucket_id trackio_static_space_id "
        "log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo "
        "skip_memory_metrics debug",
        _WRITTEN,
        inert=True,
    ),
    **_absent(
        "push_to_hub",
        "nothing is uploaded",
        script=as_read("nothing is uploaded during training; call trainer.push_to_hub()", note=True),
    ),
    **_absent(
        "hub_token hub_private_repo hub_model_id",
        "nothing is uploaded",
        script=as_read("for push_to_hub()"),
    ),
    **_absent("hub_strategy hub_always_push hub_revision", "nothing is uploaded during training", inert=True),
    **_absent(
        "parallelism_config fsdp fsdp_config deepspeed",
        "write launch.processes, or start covey under torchrun; weights are split by FSDP2",
    ),
    **_absent(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend ddp_timeout local_rank average_tokens_across_devices save_on_each_node "
        "ignore_bias_buffers",
        "how processes talk to each other is covey's own, and does not change the result",
        inert=True,
    ),
    **_absent("shuffle_dataset train_sampling_strategy", _DATA, script=_ORDER),
    **_absent("data_seed dataset_config length_column_name dataset_streaming", _DATA),
    **_absent("dataloader_drop_last", "a step always has as many rows as it asks for", inert=True),
    **_absent("label_names include_for_metrics", "the columns of each method are known", inert=True),
    **_absent(
        "remove_unused_columns dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context accelerator_config",
        "data is read whole; there is no loader",
        inert=True,
    ),
    **_absent("eval_delay", "evaluation counts correct answers: see the section eval", script=EVALUATED),
    **_absent(
        "per_device_eval_batch_size prediction_loss_only eval_do_concat_batches "
        "eval_use_gather_object eval_accumulation_steps batch_eval_metrics bf16_full_eval do_train do_eval "
        "do_predict",
        "all rows are evaluated, as memory allows",
        inert=True,
    ),
    **_absent(
        "save_only_model enable_jit_checkpoint load_best_model_at_end ignore_data_skip "
        "restore_callback_states_from_checkpoint",
        "checkpoints are always whole, and the last model is kept",
    ),
    **_absent("metric_for_best_model greater_is_better", "the last model is kept", inert=True),
    **_absent(
        "optim_args adam_epsilon optim_target_modules label_smoothing_factor neftune_noise_alpha",
        "it cannot be changed",
    ),
    **_absent("disable_dropout", "models are trained without dropout", inert=True),
    **_absent("cast_lm_head_to_fp32 tf32", "log-probs are computed in float32", inert=True),
    **_absent("router_aux_loss_coef", "a router has no auxiliary loss here", inert=True),
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
        "fp16 fp16_full_eval load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant "
        "bnb_4bit_quant_storage",
        "numbers are float32 or bfloat16",
    ),
    **_absent(
        "model_init_kwargs",
        "models are loaded without code of their own and as they are",
        script=as_read("how a model is loaded by name"),
    ),
    **_absent(
        "trust_remote_code model_revision",
        "models are loaded without code of their own and as they are",
    ),
    **_absent(
        "lora_dropout lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora",
        "lora has rank, alpha and targets, nothing else",
    ),
}
"""Name -> the argument, for all names that are neither settings of the same meaning nor part of the loss."""
