"""TRL's configs as dataclasses, with the fields, types and defaults of TRL 1.16 (`covey.config.trl`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, field, fields, is_dataclass, make_dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from covey.config.trl import Fields, trl_fields, trl_table
from covey.trl.meanings import MEANINGS, UnsupportedArgument, refusal

OLDER_FIELDS: Fields = {
    "warmup_ratio": ("float | None", None),
    "max_prompt_length": ("int | None", None),
}
"""Fields of earlier versions of TRL that many scripts use: name -> (type, default)."""
FIELD_TYPES: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, dict)},
    "None": None,
    "list[str]": list[str],
    "list[float]": list[float],
}
"""Name of a type in the tables of fields -> the type."""
JSON_FIELDS = (
    "model_init_kwargs", "chat_template_kwargs", "generation_kwargs", "accelerator_config",
    "lr_scheduler_kwargs",
)  # fmt: skip
"""Fields that may be JSON on a command line."""


class TrainerArguments:
    """The base of trainers' configs, with the methods that TRL's configs have."""

    output_dir: str

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Tell the type checker that there are fields: they come from tables, which it cannot read."""

    def __post_init__(self) -> None:
        """Read JSON texts. Raises UnsupportedArgument for a value that covey does not support."""
        for name in JSON_FIELDS:
            value = getattr(self, name, None)
            if isinstance(value, str) and value.startswith("{"):
                setattr(self, name, json.loads(value))
        self.output_dir = str(self.output_dir or "trainer_output")
        self.check()

    def check(self) -> None:
        """Raise UnsupportedArgument for a value that covey does not support."""
        for name, value in self.changed_fields().items():
            why = refusal(type(self).__name__, name)
            if why:
                raise UnsupportedArgument(f"{type(self).__name__}: {name}={value!r}: {why}")

    def changed_fields(self) -> dict[str, Any]:
        """Return the fields whose value is not TRL's default."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]  # subclasses are dataclasses
        defaults = self.defaults()
        return {
            name: value for name, value in values.items() if value is not None and value != defaults[name]
        }

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return TRL's defaults."""
        return {name: default for name, (_, default) in all_fields(cls.__name__).items()}

    def notes(self) -> list[str]:
        """Return a note for each given field that has another meaning here, or none."""
        rows = ((name, MEANINGS[type(self).__name__][name]) for name in self.changed_fields())
        return [f"{name}: {row.text}" for name, row in rows if row.note]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields with their values."""
        return asdict(self)  # type: ignore[call-overload]  # as above

    def to_json_string(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return all fields as values that trackers accept."""
        kinds = (bool, int, float, str)
        return {n: v if isinstance(v, kinds) else str(v) for n, v in self.to_dict().items()}


def config_from(args: object, config_class: Any) -> TrainerArguments:
    """Return a config of a class, made from transformers' TrainingArguments if it is not one already.

    Raises UnsupportedArgument for an object of another kind.
    """
    if isinstance(args, config_class):
        return args
    if not is_dataclass(args):
        raise UnsupportedArgument(f"args: give a {config_class.__name__}, not {type(args).__name__}")
    names = {f.name for f in fields(config_class)}
    values = {f.name: enum_value(getattr(args, f.name)) for f in fields(args) if f.name in names}
    defaults = config_class.defaults()
    # transformers fills these fields in itself, so their values say nothing about the user's wish.
    filled_in = {"accelerator_config", "parallelism_config", "fsdp_config", "fsdp"}
    return config_class(**{n: v for n, v in values.items() if n not in filled_in and v != defaults[n]})


def enum_value(value: object) -> object:
    """Return an enum's value, and any other value as it is."""
    return getattr(value, "value", value)


def all_fields(config: str) -> Fields:
    """Return the fields of a config, including those of earlier versions."""
    return {**trl_fields(config), **OLDER_FIELDS}


def _field(default: object) -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default))
    return field(default=default)


def _make_dataclass(name: str, rows: Fields, base: type = TrainerArguments) -> Any:
    """Return a dataclass with a table's fields, so that argument parsers find types and defaults."""
    lines = [
        (name, reduce(or_, (FIELD_TYPES[part] for part in kind.split(" | "))), _field(default))
        for name, (kind, default) in rows.items()
    ]
    config_class = make_dataclass(name, lines, bases=(base,))
    # The name under which pickle finds the class.
    config_class.__module__ = __name__
    config_class.__doc__ = f"TRL's {name}: its fields and defaults."
    return config_class


GRPOConfig = _make_dataclass("GRPOConfig", all_fields("GRPOConfig"))
RLOOConfig = _make_dataclass("RLOOConfig", all_fields("RLOOConfig"))
SFTConfig = _make_dataclass("SFTConfig", all_fields("SFTConfig"))
DPOConfig = _make_dataclass("DPOConfig", all_fields("DPOConfig"))
KTOConfig = _make_dataclass("KTOConfig", all_fields("KTOConfig"))
RewardConfig = _make_dataclass("RewardConfig", all_fields("RewardConfig"))
ScriptArguments = _make_dataclass("ScriptArguments", trl_table("ScriptArguments"), object)
ModelConfig = _make_dataclass("ModelConfig", trl_table("ModelConfig"), object)
