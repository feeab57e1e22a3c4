"""The settings of a run for its page: those that differ from their defaults, with descriptions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.config.algorithm import algorithm_rows, describe
from covey.config.load import flatten
from covey.config.rows import schema_rows
from covey.insight.pages.thinning import Record
from covey.objective.algorithms import PRESETS
from covey.objective.penalties import KL
from covey.runs.reader import recorded_yaml


def recorded_values(folder: Path) -> list[Record]:
    """Return all settings of a run; those that differ from their defaults come first and say what they do.

    Raises CoveyError if they are damaged.
    """
    differing = differing_settings(folder)
    named = tuple(f"{row['setting']}." for row in differing)
    flat = flatten(recorded_yaml(folder))
    # A setting that is a mapping differs as a whole.
    others = [(k, v) for k, v in flat if not f"{k}.".startswith(named)]
    return [{**row, "differs": True} for row in differing] + [
        {**_row(key, value, ""), "differs": False} for key, value in others
    ]


def differing_settings(folder: Path) -> list[Record]:
    """Return the settings of a run that differ from their defaults, or have none. Raises ConfigError."""
    recorded = recorded_yaml(folder)
    found = []
    for row in schema_rows():
        default = list(row.default) if isinstance(row.default, tuple) else row.default
        value: Any = recorded
        for part in row.key.split("."):  # a section that is not there, or null, has its defaults
            value = value[part] if isinstance(value, Mapping) and part in value else default
        if value != default and str(value) != str(default) and row.key not in ("output", "algorithm"):
            found.append(_row(row.key, value, row.setting.effect))
    return [*found, *(_algorithm_differences(recorded) if recorded.get("method") == "rl" else ())]


def nearest_preset(recorded: Mapping[str, Any]) -> str:
    """Return the name of the preset with the most axes in common with a run's algorithm."""
    axes = recorded.get("algorithm") or {}

    def distance(name: str) -> int:
        known = describe(PRESETS[name], _max_tokens(recorded))
        return sum(_flat({axis: axes.get(axis)}) != _flat({axis: own}) for axis, own in known.items())

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
    place = f"algorithm.{key}".removesuffix(".name")
    rows = (row for row in algorithm_rows() if row.key == place and row.owner in owners)
    return next((row.setting.effect for row in rows), "")


def _max_tokens(recorded: Mapping[str, Any]) -> int | None:
    return (recorded.get("rollout") or {}).get("max_tokens")


def _row(key: str, value: object, effect: str) -> Record:
    return {"setting": key, "value": written(value), "says": effect}


def _flat(values: Mapping[str, object]) -> dict[str, object]:
    """Return settings by dotted key, with lists for tuples as YAML has them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flatten(values)}


def written(value: object) -> str:
    """Return a value as text: JSON unless it is text already."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
