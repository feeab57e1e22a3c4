"""Describe the settings of a run for its page: which differ from their defaults, and what these do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.config.algorithm import describe
from covey.config.load import flatten
from covey.config.rows import schema_rows
from covey.objective.algorithms import PRESETS
from covey.objective.penalties import KL
from covey.runs.reader import recorded_yaml

Record = dict[str, Any]


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
        {"setting": key, "value": written(value), "says": "", "differs": False} for key, value in others
    ]


def differing_settings(folder: Path) -> list[Record]:
    """Return the settings of a run that differ from their defaults, or have none. Raises ConfigError."""
    recorded: Mapping[str, Any] = recorded_yaml(folder)
    found = []
    for row in schema_rows():
        default = list(row.default) if isinstance(row.default, tuple) else row.default
        value: Any = recorded
        for part in row.key.split("."):  # a section that is not there, or null, has its defaults
            value = value[part] if isinstance(value, Mapping) and part in value else default
        if value != default and str(value) != str(default) and row.key not in ("output", "algorithm"):
            found.append({"setting": row.key, "value": written(value), "says": row.setting.effect})
    return [*found, *(algorithm_rows(recorded) if recorded.get("method") == "rl" else ())]


def algorithm_rows(recorded: Mapping[str, Any]) -> Iterator[Record]:
    """Yield the preset nearest to a run's algorithm, and the settings in which they differ."""
    axes = recorded.get("algorithm") or {}
    most = (recorded.get("rollout") or {}).get("max_tokens")
    known = {name: describe(preset, most) for name, preset in PRESETS.items()}
    name = min(
        known, key=lambda n: sum(_flat(axes.get(axis)) != _flat(own) for axis, own in known[n].items())
    )
    yield {"setting": "algorithm.name", "value": name, "says": PRESETS[name].paper}
    preset = PRESETS[name]
    # Compare a KL that the user added with the default KL, so that only its changed settings show.
    if axes.get("kl") and preset.kl is None:
        preset = replace(preset, kl=KL())
    given, own = _flat(axes), _flat(describe(preset, most))
    for key in (k for k, v in given.items() if v != own.get(k)):
        yield {"setting": f"algorithm.{key}", "value": written(given[key]), "says": ""}


def _flat(value: object, path: str = "") -> dict[str, object]:
    """Return a nested mapping as one with dotted keys."""
    if not isinstance(value, Mapping):
        return {path: list(value) if isinstance(value, tuple) else value}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{path}.{key}".strip(".")).items()}


def written(value: object) -> str:
    """Return a value as text: JSON unless it is text already."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
