"""Reading a step of the rollout log: the rows at once, token arrays when they are asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from covey.errors import CheckpointError, ConfigError
from covey.runs.folder import ROLLOUT


@dataclass(frozen=True)
class RolloutLog:
    """The completions of one training step."""

    path: Path
    """Of the JSONL file; the arrays lie next to it."""
    rows: tuple[Mapping[str, Any], ...]
    """One a completion, in the order of the arrays."""

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """Number of a group -> its completions' places in ``rows``."""
        found: dict[int, list[int]] = {}
        for place, row in enumerate(self.rows):
            found.setdefault(row["group"], []).append(place)
        return found

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Everything in the npz. Raises CheckpointError where that is missing or damaged."""
        path = self.path.with_suffix(".npz")
        try:
            with np.load(path, allow_pickle=False) as archive:
                return dict(archive)
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}). Put the file back") from None

    def of_completion(self, place: int) -> dict[str, np.ndarray]:
        """The arrays by token of one completion, (T,) each."""
        ends = self.arrays["ends"]
        part = slice(int(ends[place - 1]) if place else 0, int(ends[place]))
        return {name: a[part] for name, a in self.arrays.items() if a.ndim == 1 and len(a) == ends[-1]}


def recorded_steps(folder: Path) -> list[int]:
    """The steps whose completions a run has logged, in order."""
    place = folder / "rollouts"
    names = (ROLLOUT.fullmatch(p.name) for p in place.iterdir()) if place.is_dir() else ()
    return sorted(int(match[1]) for match in names if match and match[2] == "jsonl")


def read_rollouts(folder: Path, step: int) -> RolloutLog:
    """The completions of a step. Raises ConfigError where there are none, CheckpointError for damage."""
    path = folder / "rollouts" / f"step_{step:06d}.jsonl"
    if not path.is_file():
        raise ConfigError(f"{folder}: no completions of step {step} in its rollout log")
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise CheckpointError(f"{path}:{number}: damaged. Put the file back") from None
    return RolloutLog(path, tuple(rows))
