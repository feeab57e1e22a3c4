"""The parts of TRL's scripts around a trainer: the argument parser, and the config of peft."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from covey.trl.meanings import UnsupportedArgument


class TrlParser(HfArgumentParser):  # type: ignore[misc]
    """Reads dataclasses from a command line and, with `--config FILE`, from a YAML file; the former wins.

    The file's mapping `env` sets environment variables.
    """

    def __init__(self, dataclass_types: object = None, **options: object) -> None:
        types = dataclass_types if isinstance(dataclass_types, Iterable) else [dataclass_types]
        super().__init__(dataclass_types=[kind for kind in types if kind is not None], **options)

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """Return an object of each dataclass. Raises ValueError for a name in the file that none has."""
        words = list(sys.argv[1:] if args is None else args)
        unknown: list[str] = []
        if "--config" in words:
            index = words.index("--config")
            unknown = self._take_defaults(Path(words[index + 1]))
            del words[index : index + 2]
        if unknown and fail_with_unknown_args and not return_remaining_strings:
            raise ValueError(f"Unknown arguments from config file: {unknown}")
        parsed = self.parse_args_into_dataclasses(words, return_remaining_strings=return_remaining_strings)
        return (*parsed[:-1], [*unknown, *parsed[-1]]) if return_remaining_strings else parsed

    def _take_defaults(self, file: Path) -> list[str]:
        """Set a file's values as defaults; return the names that no dataclass has, with their values."""
        values = yaml.safe_load(file.read_text("utf-8"))
        if not isinstance(values, dict):
            raise UnsupportedArgument(f"Config file {file} must contain a YAML mapping.")
        for name, value in (values.pop("env", None) or {}).items():
            os.environ[name] = str(value)
        actions = {action.dest: action for action in self._actions}
        for name in actions.keys() & values.keys():
            actions[name].default = values[name]
            actions[name].required = False
        return [word for name in values if name not in actions for word in (f"--{name}", str(values[name]))]


def get_peft_config(model_args: Any) -> Any:
    """Return peft's LoraConfig for a ModelConfig; None without `use_peft`."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    extra = {}
    if model_args.lora_target_parameters is not None:
        extra["target_parameters"] = model_args.lora_target_parameters
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        **extra,
    )


def get_quantization_config(model_args: Any) -> None:
    """Return None. Raises UnsupportedArgument if a ModelConfig asks for quantized weights."""
    if model_args.load_in_4bit or model_args.load_in_8bit:
        raise UnsupportedArgument("load_in_4bit, load_in_8bit: weights are float32 or bfloat16")


def get_kbit_device_map() -> None:
    """Return None, since a model is on one device."""
