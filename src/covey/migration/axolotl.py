"""Configs of axolotl: supervised, preference and GRPO runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from covey.migration.migrated import MigrationResult
from covey_verify.errors import ConfigError

FILES = {".jsonl", ".json", ".csv", ".parquet"}
METHODS: Mapping[str, str] = {
    "grpo": "rl", "dpo": "dpo", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "simpo": "simpo",
}  # fmt: skip
EQUIVALENTS: Mapping[str, str] = {
    "base_model": "model",
    "output_dir": "output",
    "learning_rate": "train.lr",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.grad_clip",
    "warmup_steps": "train.warmup_steps",
    "max_steps": "train.steps",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep",
    "gradient_checkpointing": "train.recompute_layers",
    "seed": "seed",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
}
SAMPLED: Mapping[str, str] = {
    "trl.num_generations": "rollout.group_size",
    "trl.max_completion_length": "rollout.max_tokens",
    "trl.temperature": "rollout.temperature",
    "trl.num_iterations": "train.inner_epochs",
}
SILENT = (
    "deepspeed*", "fsdp*", "bf16", "fp16", "tf32", "flash_attention*", "xformers*", "sample_packing*",
    "pad_to_*", "eval_batch_size", "wandb_*", "logging_steps", "strict", "hub_*", "dataset_prepared_path",
    "dataset_processes", "model_type", "tokenizer_type", "trust_remote_code", "vllm.*",
    "trl.use_vllm", "trl.vllm_*", "group_by_length", "resume_from_checkpoint", "early_stopping_patience",
    "lora_target_linear", "liger_*", "*_kernel", "use_kernels", "attn_implementation", "loss_watchdog*",
    "gradient_checkpointing_kwargs*", "eval_sample_packing", "remove_unused_columns", "ddp_*", "dp_*",
    "lora_model_dir", "processor_type", "plugins", "adapter", "evals_per_epoch", "saves_per_epoch",
)  # fmt: skip
REASONS: Mapping[str, str] = {
    "sequence_len": "an answer is never truncated; rollout.max_tokens bounds what is sampled",
    "load_in_*": "weights are float32 or bfloat16, which takes more memory; covey preview says how much",
    "lora_dropout": "adapters have no dropout",
    "lora_target*": "lora.targets is all linear layers; set it to choose others",
    "special_tokens*": "covey adds no tokens to a model",
    "val_set_size": "set data.test to a file of held-out rows",
    "datasets*": "the first file is data.train; join others",
    "trl.*": "see covey explain with the name that follows trl.",
}


def from_axolotl(settings: Mapping[str, object]) -> MigrationResult:
    """Return covey's settings for axolotl's. Raises ConfigError for a method that covey does not have."""
    m = MigrationResult({name: value for name, value in settings.items() if value is not None})
    kind = str(m.take("rl", ""))
    if kind and kind not in METHODS:
        raise ConfigError(f"rl: {kind} has no counterpart in covey; there are {', '.join(METHODS)}")
    method = METHODS.get(kind, "sft")
    m.config["method"] = method
    m.same(EQUIVALENTS)
    _steps(m)
    schedule = m.take("lr_scheduler", "cosine")
    if schedule in ("linear", "cosine", "constant"):
        m.config["train.schedule"] = schedule
    else:
        m.unsupported[f"lr_scheduler: {schedule}"] = "train.schedule is linear, cosine or constant"
    floor = m.number("cosine_min_lr_ratio", 0.0)
    if floor and schedule == "cosine":
        m.config["train.schedule"] = {"cosine": floor}
    optimizer = str(m.take("optimizer", "adamw_torch"))
    if "8bit" in optimizer:
        m.config["train.optimizer"] = "adamw_8bit"
    betas = [m.number(name, usual) for name, usual in (("adam_beta1", 0.9), ("adam_beta2", 0.999))]
    m.config["train.betas"] = betas
    rows = int(m.number("micro_batch_size", 1) * m.number("gradient_accumulation_steps", 1))
    if method == "rl":
        _translate_sampling(m, rows)
    else:
        m.config["train.batch_size"] = rows
    if method in ("dpo", "kto") and (beta := m.take("rl_beta", m.take("dpo_beta"))) is not None:
        m.config["loss"] = {"beta": beta}
    _data(m)
    return m.finish(SILENT, REASONS)


def _steps(m: MigrationResult) -> None:
    """Take over settings of another type: warm-up as a fraction, checkpointing that also offloads."""
    warmup = m.config.get("train.warmup_steps")
    fraction = m.number("warmup_ratio", 0.0)
    if isinstance(warmup, float) and warmup < 1:
        fraction = warmup
        del m.config["train.warmup_steps"]
    if fraction:
        m.notes.append(f"train.warmup_steps: {fraction:g} of the steps")
    if "train.recompute_layers" in m.config:
        m.config["train.recompute_layers"] = bool(m.config["train.recompute_layers"])
    epochs = m.take("num_epochs")
    if epochs is not None and "train.steps" not in m.config:
        m.notes.append(f"train.steps: it counts batches; {epochs} epochs have that many times the rows")


def _translate_sampling(m: MigrationResult, completions: int) -> None:
    m.same(SAMPLED)
    size = int(m.number("trl.group_size", 0)) or m.config.get("rollout.group_size", 8)
    assert isinstance(size, int)
    m.config["rollout.prompts_per_step"] = max(1, completions // size)
    beta = m.number("trl.beta", 0.0)
    kl = {"coef": beta, "estimator": "k3"} if beta else None
    m.config["algorithm"] = {"name": "grpo", "dialect": "trl-1.16", "kl": kl}
    rewards, weights = m.take("trl.reward_funcs", []), m.take("trl.reward_weights")
    names = [str(r).replace(".", ".py:", 1) if "." in str(r) else str(r) for r in _list(rewards)]
    shares = _list(weights) or [1.0] * len(names)
    m.config["rewards"] = [{name: weight} for name, weight in zip(names, shares, strict=False)]


def _list(value: object) -> list[object]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _address(entry: Mapping[str, object], path: str) -> str:
    """Return a file's path, or the address of a data set on the hub."""
    if path.count("/") != 1 or path.startswith(".") or Path(path).suffix in FILES:
        return path
    options = {"config": entry.get("name"), "split": entry.get("split")}
    query = {name: value for name, value in options.items() if value is not None}
    revision = f"@{entry['revision']}" if entry.get("revision") else ""
    return f"hub:{path}{revision}" + (f"?{urlencode(query)}" if query else "")


def _data(m: MigrationResult) -> None:
    data_sets = _list(m.take("datasets"))
    first = data_sets[0] if data_sets and isinstance(data_sets[0], Mapping) else {}
    path = first.get("path")
    if isinstance(path, str):
        m.config["data.train"] = _address(first, path)
        if len(data_sets) > 1:
            m.unsupported["datasets: more than one"] = "covey reads one file; join them"
    chat = m.take("chat_template")
    if chat is not None or first.get("type") == "chat_template":
        m.config["data.chat"] = True
