"""Configs and scripts of TRL: the fields of its configs by `covey.trl`, and what surrounds them."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from covey.config.trl import OLD_NAMES, advice_on, trl_fields, trl_table
from covey.migration.migrated import MigrationResult, nest_keys
from covey.migration.read_script import CALLS, TRAINERS, Expression, Function
from covey.migration.read_settings import yaml_value
from covey.trl import configs
from covey.trl.configs import TrainerArguments, all_fields
from covey.trl.meanings import MEANINGS, UnsupportedArgument, refusal
from covey.trl.settings import NEVER, NO_CLIP, SCHEDULES, SETTINGS, config_notes
from covey_verify.errors import ConfigError

CONFIGS = tuple(f"{name}Config" for name in TRAINERS)
LORA: Mapping[str, tuple[str, ...]] = {
    "lora.rank": ("r", "lora_r"),
    "lora.alpha": ("lora_alpha",),
    "lora.targets": ("target_modules", "lora_target_modules"),
}
"""Setting -> the argument of peft's LoraConfig, or the field of TRL's ModelConfig."""
WITH_LORA = ("lora_dropout", "modules_to_save", "use_rslora", "use_dora", "bias")
PLACES = ("path", "name", "split", "revision")
FAKE_ROWS = 10**6
"""Rows of a schedule whose number of steps is not used."""


def from_trl(settings: Mapping[str, object], script: str = "") -> MigrationResult:
    """Return covey's settings for those of a TRL config, or of the script of this name.

    Raises ConfigError for a combination that covey does not have, and for a value of another type.
    """
    m = MigrationResult(dict(settings) if set(CALLS) & _calls(settings) else nest_keys(settings))
    name = _config_name(m.unread)
    fields = _fields(m, name)
    try:
        args = getattr(configs, name)(**{"output_dir": "runs/trl", **fields})
        schedule = SCHEDULES[name](args, FAKE_ROWS)
        config = SETTINGS[name](args, schedule)
    except UnsupportedArgument as error:
        raise ConfigError(str(error)) from None
    _steps(m, args, config)
    m.config = {key: value for key, value in config.items() if value not in (NEVER, NO_CLIP)}
    m.notes += config_notes(args, schedule)
    trainer = name.replace("Config", "Trainer")
    model = m.take(f"{trainer}.model", m.take("model_name_or_path"))
    _take_text(m, "model", model)
    if name in ("GRPOConfig", "RLOOConfig"):
        m.config["rewards"] = _rewards(m, trainer, script, args.reward_weights)
    _lora(m)
    _data(m, trainer)
    _name_rest(m)
    return m


def _calls(settings: Mapping[str, object]) -> set[str]:
    return {key.partition(".")[0] for key in settings}


def _config_name(settings: Mapping[str, object]) -> str:
    """Return the config of a script, or the first one that has all fields of a file, with one of its own."""
    called = _calls(settings)
    for name in CONFIGS:
        if {name, name.replace("Config", "Trainer")} & called:
            return name
    known_fields = {field for field in settings if any(field in trl_fields(name) for name in CONFIGS)}
    shared = set(trl_table("common"))
    fitting = [name for name in CONFIGS if known_fields <= set(trl_fields(name))]
    with_own_fields = [name for name in fitting if known_fields - shared]
    return next(iter(with_own_fields or [name for name in fitting if name == "SFTConfig"] or CONFIGS))


def _fields(m: MigrationResult, name: str) -> dict[str, object]:
    """Return the config's fields that covey supports, and name the others."""
    table, fields = all_fields(name), dict[str, object]()
    for key in list(m.unread):
        field = key.removeprefix(f"{name}.")
        if field not in table or (field == key and "." in key):
            continue
        kind, default = table[field]
        value = m.take(key)
        if isinstance(value, Expression):
            m.notes.append(f"{field}: the script computes it, {value.text}; this is TRL's default, {default}")
            continue
        kinds = set(kind.split(" | "))
        if kinds & {"int", "float"} and "str" not in kinds:
            value = yaml_value(value) if isinstance(value, str) else value
            if not isinstance(value, int | float | None):
                raise ConfigError(f"{field} = {value!r}: TRL's {name} has {kind} there")
        why = refusal(name, field)
        if why and value is not None and value != default:
            m.unsupported[f"{field}: {value}"] = why
        else:
            fields[field] = value
    return fields


def _steps(m: MigrationResult, args: TrainerArguments, config: dict[str, object]) -> None:
    """Remove the numbers of steps that follow from the number of rows, and say how they do."""
    if args.max_steps > 0:
        return
    del config["train.steps"]
    batch = "rollout.prompts_per_step" if "rollout.prompts_per_step" in config else "train.batch_size"
    m.notes.append(f"train.steps: rows / {batch} for each of {args.num_train_epochs:g} epochs")
    if 0 < (args.warmup_steps or args.warmup_ratio or 0) < 1:
        del config["train.warmup_steps"]
        m.notes.append(f"train.warmup_steps: {args.warmup_steps or args.warmup_ratio:g} of the steps")
    if isinstance(args.save_steps, float) and args.save_steps < 1:
        config.pop("train.save_every", None)


def _take_text(m: MigrationResult, key: str, value: object) -> None:
    if isinstance(value, str):
        m.config[key] = value
    elif value is not None:
        shown = value.text if isinstance(value, Expression) else value
        m.notes.append(f"{key}: the script makes it, {shown}; name a folder or an id of the hub")


def _rewards(m: MigrationResult, trainer: str, script: str, weights: object) -> list[object]:
    """Return the rewards, functions of the script by its name."""
    value = m.take(f"{trainer}.reward_funcs", m.take("reward_funcs"))
    functions = value if isinstance(value, list) else [value]
    names = list[str]()
    for function in functions:
        if isinstance(function, Function):
            names.append(f"{script}:{function.name}")
        elif isinstance(function, str):
            names.append(function.rpartition(".")[2])
        else:
            text = function.text if isinstance(function, Expression) else "no reward"
            m.notes.append(f"rewards: {text}: name your functions, as rewards.py:function")
    if any(isinstance(function, Function) for function in functions):
        m.notes.append(f"rewards: {script} is imported for its functions; it must not train when imported")
    factors = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    return [{name: factor} for name, factor in zip(names, factors, strict=True)] if names else []


def _lora(m: MigrationResult) -> None:
    """Take over adapters: peft's LoraConfig, or the fields of ModelConfig with use_peft."""
    has_adapters = m.take("use_peft") is True or any(key.startswith("LoraConfig.") for key in m.unread)
    for setting, names in LORA.items():
        for name in names:
            value = m.take(f"LoraConfig.{name}", m.take(name))
            if has_adapters and value is not None and not isinstance(value, Expression):
                m.config[setting] = value
    if has_adapters and not any(key.startswith("lora.") for key in m.config):
        m.config["lora"] = {"rank": 16, "alpha": 32}
    for name in WITH_LORA:
        value = m.take(f"LoraConfig.{name}", m.take(name))
        if has_adapters and value not in (None, 0, False, "none"):
            m.unsupported[f"{name}: {value}"] = (
                advice_on(name) or "lora has rank, alpha and targets, nothing else"
            )
    m.take("LoraConfig.task_type", m.take("lora_task_type"))


def _data(m: MigrationResult, trainer: str) -> None:
    """Take over the first data set of the hub that a script or config names."""
    of_script = {name: m.take(f"load_dataset.{name}") for name in PLACES}
    of_config = dict(
        zip(PLACES, map(m.take, ("dataset_name", "dataset_config", "dataset_train_split")), strict=False)
    )
    source = of_script if of_script["path"] is not None else of_config
    path = source.get("path")
    columns = "its rows are read as the hub has them: data.prompt and data.columns name columns"
    if isinstance(path, str):
        options = {"config": source.get("name"), "split": source.get("split")}
        query = {name: value for name, value in options.items() if isinstance(value, str)}
        revision = f"@{source['revision']}" if source.get("revision") else ""
        m.config["data.train"] = f"hub:{path}{revision}" + (f"?{urlencode(query)}" if query else "")
        m.notes.append(f"data.train: {columns}")
    else:
        m.notes.append("data.train: name a file of rows, or a data set of the hub as hub:OWNER/NAME")
    if m.take(f"{trainer}.eval_dataset") is not None:
        m.notes.append("data.test: name the held-out rows as data.train does")
    for name in ("train_dataset", "args", "peft_config", "processing_class"):
        m.take(f"{trainer}.{name}")


def _name_rest(m: MigrationResult) -> None:
    """Name what has no counterpart; arguments of other calls than the trainer's are not its settings."""
    for key in list(m.unread):
        call, _, name = key.rpartition(".")
        value = m.take(key)
        if call == "load_dataset" or name in ("ignore_bias_buffers", "dataset_test_split", "model_revision"):
            continue
        meanings = (MEANINGS[config].get(name) for config in CONFIGS)
        if any(meaning is not None and meaning.kind == "no effect" for meaning in meanings):
            continue
        shown = value.text if isinstance(value, Expression) else value
        shown = value.name if isinstance(value, Function) else shown
        reason = name in OLD_NAMES or advice_on(name)
        m.unsupported[f"{name}: {shown}"] = str(
            reason or f"not known to covey{f', of {call}' if call else ''}"
        )
