"""The settings of a run for its page, each with its description; changed settings come first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from covey.config.algorithm import algorithm_rows, describe
from covey.config.rows import flatten, schema_fields, schema_rows
from covey.insight.cells import CODE_FILES
from covey.insight.pages.thinning import Record
from covey.objective.algorithms import PRESETS
from covey.objective.penalties import KL
from covey.objective.setting import setting_of
from covey.runs.reader import read_environment, recorded_yaml

IMPORTANT = ("model", "method", "algorithm", "rewards", "data", "rollout", "train", "loss", "lora", "seed")
"""Sections in the order in which a reader asks for them; the others follow as the schema has them."""


def recorded_values(folder: Path) -> list[Record]:
    """Return all settings of a run, changed ones first, each part by importance.

    Raises CoveyError if they are damaged.
    """
    differing = differing_settings(folder)
    prefixes = tuple(f"{row['setting']}." for row in differing)
    recorded = recorded_yaml(folder)
    # A setting that is a mapping differs as a whole.
    others = [(k, v) for k, v in flatten(recorded) if not f"{k}.".startswith(prefixes)]
    rows = [{**row, "differs": True} for row in differing]
    rows += [{**_row(key, value, sentence_on(key, recorded)), "differs": False} for key, value in others]
    return sorted(rows, key=lambda row: (not row["differs"], _importance(row["setting"])))


def _importance(key: str) -> int:
    """Return the place of a setting's section among the sections."""
    section = key.partition(".")[0]
    return IMPORTANT.index(section) if section in IMPORTANT else len(IMPORTANT)


def sentence_on(key: str, recorded: Mapping[str, Any]) -> str:
    """Return the sentence on a setting of a run, or on the nearest setting around it."""
    if key.startswith("algorithm."):
        axes = _flat(recorded.get("algorithm") or {}) if recorded.get("method") == "rl" else {}
        return _effect(key.removeprefix("algorithm."), axes)
    while key and key not in schema_effects():
        key = key.rpartition(".")[0]
    return schema_effects().get(key, "")


@cache
def schema_effects() -> dict[str, str]:
    """Return dotted key -> the sentence on each setting or section of the config that has one."""
    effects = {key: setting_of(field.metadata).effect for key, field in schema_fields().items()}
    return {key: effect for key, effect in effects.items() if effect}


def differing_settings(folder: Path) -> list[Record]:
    """Return the settings of a run that differ from their defaults, or have none. Raises ConfigError."""
    recorded = recorded_yaml(folder)
    rows = []
    for row in schema_rows():
        default = list(row.default) if isinstance(row.default, tuple) else row.default
        value: object = recorded
        for part in row.key.split("."):  # a section that is not there, or null, has its defaults
            value = value[part] if isinstance(value, Mapping) and part in value else default
        if value != default and str(value) != str(default) and row.key not in ("output", "algorithm"):
            rows.append(_row(row.key, value, row.setting.effect))
    return [*rows, *(_algorithm_differences(recorded) if recorded.get("method") == "rl" else ())]


def setup_but_seed(recorded: Mapping[str, object], folder: Path) -> str:
    """Return a text that two runs have in common if they differ in nothing but the seed."""
    files = (read_environment(folder) or {}).get("files", {})
    code = {name: digest for name, digest in files.items() if name.endswith(CODE_FILES)}
    settings = {name: value for name, value in recorded.items() if name not in ("seed", "output")}
    text = json.dumps([settings, code], sort_keys=True, default=str)
    # A stage names the models of its pipeline's other stages, which lie in the folder of that seed.
    if folder.name.partition("-")[0].isdecimal():
        text = text.replace(f"{Path(str(recorded.get('output'))).parent}/", "")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def nearest_preset(recorded: Mapping[str, Any]) -> str:
    """Return the name of the preset with the most axes in common with a run's algorithm."""
    axes = recorded.get("algorithm") or {}

    def distance(name: str) -> int:
        usual = describe(PRESETS[name], _max_tokens(recorded))
        return sum(_flat({axis: axes.get(axis)}) != _flat({axis: value}) for axis, value in usual.items())

    return min(PRESETS, key=distance)


def _algorithm_differences(recorded: Mapping[str, Any]) -> Iterator[Record]:
    """Yield the preset nearest to a run's algorithm, and the settings in which they differ."""
    name = nearest_preset(recorded)
    preset = PRESETS[name]
    yield _row("algorithm.name", name, preset.paper)
    axes = recorded.get("algorithm") or {}
    # Compare a KL that the user added with the default KL, so that only its changed settings show.
    if axes.get("kl") and preset.kl is None:
        preset = replace(preset, kl=KL())
    values = _flat(axes)
    usual = _flat(describe(preset, _max_tokens(recorded)))
    for key, value in values.items():
        if value != usual.get(key):
            yield _row(f"algorithm.{key}", value, _effect(key, values))


def _effect(key: str, values: Mapping[str, object]) -> str:
    """Return the sentence on a setting of an algorithm, empty for one of a user's own function."""
    axis = key.rpartition(".")[0]
    # A setting belongs to the function on its axis, or to the record that the axis is; the axis to nobody.
    owners = ("", values.get(f"{axis}.name"), axis.partition(".")[0])
    setting = f"algorithm.{key}".removesuffix(".name")
    rows = (row for row in algorithm_rows() if row.key == setting and row.owner in owners)
    return next((row.setting.effect for row in rows), "")


def _max_tokens(recorded: Mapping[str, Any]) -> int | None:
    return (recorded.get("rollout") or {}).get("max_tokens")


def _row(key: str, value: object, effect: str) -> Record:
    return {"setting": key, "value": value_text(value), "says": effect}


def _flat(values: Mapping[str, object]) -> dict[str, object]:
    """Return settings by dotted key, with lists for tuples as YAML has them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flatten(values)}


def value_text(value: object) -> str:
    """Return a value as text: JSON unless it is text already."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
