"""Write TRL's config fields, with types and defaults, into covey's tables.

VENV_WITH_TRL/bin/python benchmarks/trl_tests/fields.py src/covey/config/trl_fields
"""

from __future__ import annotations

import argparse
import enum
import types
import typing
from dataclasses import MISSING, fields
from pathlib import Path

import trl
from transformers import TrainingArguments
from trl.scripts.grpo import GRPOScriptArguments

CONFIGS = ("GRPOConfig", "RLOOConfig", "SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig")
OF_SCRIPTS = ("ScriptArguments", "ModelConfig")
PLAIN = {bool: "bool", int: "int", float: "float", str: "str", type(None): "None"}


def plain_type(hint: object) -> str:
    """Return a type without enums and third-party classes, which stand for text or a mapping."""
    if hint in PLAIN:
        return PLAIN[typing.cast("type", hint)]
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        parts = {plain_type(part) for part in typing.get_args(hint)}
        several = parts - {"None"}
        if len(several) > 1 and "str" in several:  # as an argument parser reads it
            return "str | None" if "None" in parts else "str"
        order = ["bool", "int", "float", "dict", "list[str]", "list[float]", "list[int]", "str", "None"]
        return " | ".join(sorted(parts, key=order.index))
    if origin is list:
        inner = plain_type(typing.get_args(hint)[0])
        return f"list[{inner if inner in ('str', 'int', 'float') else 'str'}]"
    if origin is tuple:
        return "list[float]"
    if origin is dict or hint is dict:
        return "dict"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "str"
    if origin is typing.Literal:
        return "bool" if all(isinstance(a, bool) for a in typing.get_args(hint)) else "str"
    return "dict"


def table(config: type) -> dict[str, str]:
    """Return field -> "type = default" of a config."""
    hints = typing.get_type_hints(config)
    lines = {}
    for field in fields(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if isinstance(default, enum.Enum):
            default = default.value
        lines[field.name] = f"{plain_type(hints[field.name])} = {default!r}"
    return lines


def main(folder: Path) -> None:
    """Write common.txt with the lines that all trainers share, and a file with the others of each."""
    tables = {name: table(getattr(trl, name)) for name in CONFIGS}
    shared = {n: v for n, v in tables[CONFIGS[0]].items() if all(t.get(n) == v for t in tables.values())}
    known = {field.name for field in fields(TrainingArguments)}
    shared = {n: v for n, v in shared.items() if n in known}
    files = {"common": shared} | {
        name: {n: v for n, v in own.items() if n not in shared} for name, own in tables.items()
    }
    files |= {name: table(getattr(trl, name)) for name in OF_SCRIPTS}
    own = table(GRPOScriptArguments)
    files["GRPOScriptArguments"] = {n: v for n, v in own.items() if n not in files["ScriptArguments"]}
    for name, lines in files.items():
        text = "".join(f"{field}: {value}\n" for field, value in lines.items())
        (folder / f"{name}.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
