"""TRL's names (GRPOConfig of 1.16, ModelConfig, the script's arguments) and what each is in covey.

A name of TRL's either means exactly what it means there, or it is refused with covey's key and the
difference. The names of the loss are read together, under TRL's defaults for those that are not given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from covey_verify.errors import ConfigError

SAME: Mapping[str, str] = {
    "model_name_or_path": "model",
    "output_dir": "output",
    "seed": "seed",
    "dtype": "dtype",
    "reward_funcs": "rewards",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "num_generations": "rollout.group_size",
    "num_generations_eval": "eval.samples",
    "max_completion_length": "rollout.max_tokens",
    "max_tool_calling_iterations": "rollout.tools.max_calls",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "mask_truncated_completions": "rollout.mask_truncated",
    "max_steps": "train.steps",
    "learning_rate": "train.lr",
    "lr_scheduler_type": "train.schedule",
    "optim": "train.optimizer",
    "max_grad_norm": "train.grad_clip",
    "num_iterations": "train.inner_epochs",
    "gradient_checkpointing": "train.recompute_layers",
    "activation_checkpointing": "train.recompute_layers",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep",
    "eval_steps": "eval.every",
}
"""Names that mean the same; they are renamed, and a note says so."""

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
"""TRL's value -> covey's, for names whose values are words; other values are refused."""

PER_UPDATE = frozenset({"max_steps", "save_steps", "eval_steps"})
"""Counted in optimizer steps by TRL, in rollout batches by covey: the same with one update per batch."""

TrlLoss: TypeAlias = Mapping[str, object]
"""Values of TRL's names of the loss, as YAML gives them."""
LOSS: TrlLoss = {
    "loss_type": "dapo",
    "beta": 0.0,
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "use_bias_correction_kl": True,
    "sync_ref_model": False,
    "ref_model_sync_steps": 512,
    "ref_model_mixup_alpha": 0.6,
    "entropy_coef": 0.0,
    "off_policy_mask_threshold": None,
}
"""The names that together make TRL's loss, with TRL's defaults; see ``algorithm_of``."""

INSTEAD: Mapping[str, str] = {
    "warmup_steps": "write train.warmup_steps, whose first step has the rate lr / N (TRL's has 0)",
    "warmup_ratio": "write train.warmup_steps, a number of steps",
    "weight_decay": "write train.weight_decay, which decays every weight (TRL spares biases and norms)",
    "adam_beta1": "write both as train.betas: [0.9, 0.999]",
    "adam_beta2": "write both as train.betas: [0.9, 0.999]",
    "num_train_epochs": "write train.steps; an epoch is (rows / rollout.prompts_per_step) of them",
    "per_device_train_batch_size": (
        "write rollout.prompts_per_step, in prompts of rollout.group_size completions each; memory is "
        "bounded by train.tokens_per_micro_batch"
    ),
    "gradient_accumulation_steps": (
        "write rollout.prompts_per_step for the size of a batch; it is split by train.tokens_per_micro_batch "
        "without changing the result"
    ),
    "generation_batch_size": "write rollout.prompts_per_step and rollout.group_size",
    "steps_per_generation": "write train.updates_per_batch, the optimizer steps of a rollout batch",
    "save_strategy": "leave it out; train.save_every says how often",
    "eval_strategy": "leave it out; eval.every says how often (0: before and after training only)",
    "evaluation_strategy": "leave it out; eval.every says how often (0: before and after training only)",
    "do_eval": "leave it out; eval.every says how often",
    "eval_on_start": "leave it out; covey always measures before and after training",
    "bf16": "write dtype: bfloat16, which stores the weights so, and trains a float32 copy",
    "torch_dtype": "write dtype",
    "use_cpu": "write device: cpu",
    "top_entropy_quantile": (
        "write algorithm: {select_tokens: {name: top_entropy, share: 0.2}, token_weights: "
        "[selected_only]}, a fraction of the whole update (TRL's is of each micro-batch)"
    ),
    "use_adaptive_entropy": (
        "write algorithm: {entropy: {target: 0.2}}, whose bonus fades out above the target (TRL's stops)"
    ),
    "entropy_target": "write algorithm: {entropy: {target: 0.2}}; its controller is not TRL's",
    "entropy_coef_min": "write algorithm: {entropy: {target: 0.2}}; its bounds, 0 and 0.1, are fixed",
    "entropy_coef_max": "write algorithm: {entropy: {target: 0.2}}; its bounds, 0 and 0.1, are fixed",
    "entropy_coef_delta": "write algorithm: {entropy: {target: 0.2}}; its step, 0.005, is fixed",
    "reward_weights": "write the weights with the rewards: rewards: [{name: weight}, ...]",
    "use_peft": "write lora: {rank: 16, alpha: 32}",
    "lora_r": "write lora: {rank: 16, alpha: 32}; naming lora switches it on",
    "lora_alpha": "write lora: {rank: 16, alpha: 32}; naming lora switches it on",
    "lora_target_modules": "write lora: {targets: [q_proj, v_proj]}; the default is all linear layers",
    "dataset_name": "write data.train, a file, or data.task",
    "dataset_train_split": "write data.train, a file",
    "dataset_test_split": "write data.test, a file",
    "reward_model_name_or_path": "write it in rewards: see docs/rewards.md",
    "use_vllm": "write rollout.sampler.url, the addresses of servers: [http://127.0.0.1:8000]",
    "vllm_server_base_url": "write rollout.sampler.url, as [http://127.0.0.1:8000]",
    "resume_from_checkpoint": "give the same command again, or `covey resume RUN`",
    "max_prompt_length": "leave it out; data.long_prompts says what happens to prompts that do not fit",
    "log_completions": "leave it out; every completion is kept in the run's rollouts/",
    "full_determinism": "leave it out; runs are deterministic",
}
"""Names of something covey has in another form: what to write."""

_NO_VLLM = "completions are sampled by covey itself, or on the servers that rollout.sampler.url names"
ALWAYS = "metrics, completions and curves are always written to the run's folder"
_ENGINE = "the engine fits itself to model and memory"
_FORWARD = "the forward pass is covey's own, without padding"
_LOADER = "data is read whole; there is no loader"
_MEMORY = "micro-batches shrink by themselves where memory is short"
_PROCESSES = "write launch.processes, or start covey under torchrun; weights are split by FSDP2"
_TOGETHER = "how processes talk to each other is covey's own, and does not change the result"
_DATA_FLOW = "data is read whole and shuffled by the seed"
_FIXED = "it cannot be changed"

ABSENT: Mapping[str, tuple[str, ...]] = {
    _NO_VLLM: (
        *("vllm_mode", "vllm_server_port", "vllm_server_host", "vllm_server_timeout", "vllm_group_port"),
    ),
    _ENGINE: (
        *("vllm_model_impl", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization"),
        *("vllm_max_model_length", "vllm_tensor_parallel_size", "cache_implementation"),
        *("use_transformers_continuous_batching", "use_transformers_paged", "ds3_gather_for_generation"),
        *("transformers_continuous_batching_config", "use_cache"),
    ),
    f"{_NO_VLLM}; for another sampler's drift there is algorithm.correction": (
        *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
        "vllm_importance_sampling_cap",
    ),
    "sampling has rollout.temperature, top_p, top_k and stop, nothing else": (
        *("min_p", "repetition_penalty", "generation_kwargs", "vllm_structured_outputs_regex"),
    ),
    ALWAYS: (
        *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node"),
        *("logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level", "log_level_replica"),
        *("disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id"),
        *("trackio_static_space_id", "log_multimodal", "num_completions_to_print", "log_unique_prompts"),
        *("log_completions_hub_repo", "skip_memory_metrics", "debug"),
    ),
    "nothing is uploaded": (
        *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
        *("hub_always_push", "hub_revision"),
    ),
    _PROCESSES: (*("accelerator_config", "parallelism_config", "fsdp", "fsdp_config", "deepspeed"),),
    _TOGETHER: (
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        *("ddp_backend", "ddp_timeout", "local_rank", "average_tokens_across_devices"),
        *("save_on_each_node", "ignore_bias_buffers"),
    ),
    _DATA_FLOW: (
        *("shuffle_dataset", "data_seed", "dataloader_drop_last", "label_names", "dataset_config"),
        *("train_sampling_strategy", "length_column_name", "dataset_streaming"),
    ),
    _LOADER: (
        *("remove_unused_columns", "dataloader_num_workers", "dataloader_pin_memory"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_in_order"),
        "dataloader_multiprocessing_context",
    ),
    "evaluation counts correct answers: see the section eval": (
        *("eval_delay", "per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches"),
        *("eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"),
        *("bf16_full_eval", "fp16_full_eval", "do_train", "do_predict"),
    ),
    "checkpoints are always whole, and the last model is kept": (
        *("save_only_model", "enable_jit_checkpoint", "load_best_model_at_end", "metric_for_best_model"),
        *("greater_is_better", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
    ),
    _FIXED: (
        *("lr_scheduler_kwargs", "optim_args", "adam_epsilon", "optim_target_modules"),
        *("label_smoothing_factor", "neftune_noise_alpha", "disable_dropout", "cast_lm_head_to_fp32"),
        *("router_aux_loss_coef", "tf32"),
    ),
    _FORWARD: (
        *("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel"),
        *("liger_kernel_config", "attn_implementation", "pad_to_multiple_of"),
    ),
    _MEMORY: (
        *("auto_find_batch_size", "torch_empty_cache_steps", "gradient_checkpointing_kwargs"),
        "activation_checkpointing_kwargs",
    ),
    "numbers are float32 or bfloat16": (
        *("fp16", "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
        "bnb_4bit_quant_storage",
    ),
    "models are loaded without code of their own and as they are": (
        *("model_init_kwargs", "trust_remote_code", "model_revision"),
    ),
    "lora has rank, alpha and targets, nothing else": (
        *("lora_dropout", "lora_target_parameters", "lora_modules_to_save", "lora_task_type"),
        *("use_rslora", "use_dora"),
    ),
}
"""Why there is no such setting -> the names."""

OLDER = frozenset({"max_prompt_length", "warmup_ratio", "torch_dtype", "evaluation_strategy"})
"""Names of earlier versions, still found in scripts."""

LEFT_OUT = frozenset(
    {name for why in (ALWAYS, _ENGINE, _FORWARD, _LOADER, _MEMORY, _TOGETHER) for name in ABSENT[why]}
    | {name for name, remedy in INSTEAD.items() if remedy.startswith("leave it out")}
)
"""Names that change nothing of what is learned: a script's may be left out for it."""

_ABSENT = {name: why for why, names in ABSENT.items() for name in names}
NAMES = frozenset({*SAME, *LOSS, *INSTEAD, *_ABSENT})
"""All of them."""


def told(name: str) -> str:
    """What to do about a name of TRL's where it is no setting of covey's; '' of other names.

    >>> told("use_vllm")[:18], told("lr")
    ("for TRL's use_vllm", '')
    """
    if name in LOSS:
        return f"TRL's {name} belongs at the top of a config, in place of algorithm"
    if name in SAME:
        return f"TRL's {name} is {SAME[name]} here"
    if name in INSTEAD:
        return f"for TRL's {name} {INSTEAD[name]}"
    return f"TRL's {name} is not here: {_ABSENT[name]}" if name in _ABSENT else ""


def value_of(name: str, value: object) -> object:
    """TRL's value of a name in ``SAME`` as covey's. Raises ConfigError for one that covey does not have."""
    known = VALUES.get(name)
    if known is None or (isinstance(value, str) and value in known.values()):
        return value
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{SAME[name]}: TRL's {name} {value!r} is not here, only {', '.join(known)}")
    return known[value]


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
