"""The runs of a sweep, a config under several settings and seeds, checked before the first begins."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from covey.config.load import ResolvedConfig, resolved_values
from covey.config.start import Start
from covey.system.processes import started_together
from covey_verify.errors import ConfigError

MAX_RUNS = 1000
"""Largest number of runs in a sweep."""
MAX_NAME_LENGTH = 150
"""Characters from which on the name of a folder is shortened."""
OWN_KEYS = {
    "seed": "use --seeds N; every combination gets the same N seeds",
    "output": "the sweep names the folders below --output by their settings",
}
"""Settings that a sweep chooses itself -> what to do instead."""


class SweepAxis(NamedTuple):
    """A setting and its values in a sweep, as the user wrote them."""

    key: str
    values: tuple[str, ...]


class PlannedRun(NamedTuple):
    """A planned run of a sweep."""

    cell: tuple[str, ...]
    seed: int
    start: Start
    resolved: ResolvedConfig

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.resolved.config.output


def swept_settings(texts: Sequence[str]) -> list[SweepAxis]:
    """Return the axes that texts of the form `key=value,value` name. Raises ConfigError for other texts."""
    axes = list[SweepAxis]()
    for text in texts:
        key, equals, listed = text.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not key or not equals:
            raise ConfigError(f"--set {text!r}: write a setting and its values: train.lr=1e-4,2e-4")
        values = tuple(_in_one_notation(piece) for piece in pieces(listed))
        if "" in values:
            raise ConfigError(f"--set {text!r}: a value is empty; write {key}=first,second")
        repeated = [v for n, v in enumerate(values) if v in values[:n]]
        if repeated:
            raise ConfigError(f"--set {text!r}: {repeated[0]} occurs twice")
        if key in OWN_KEYS:
            raise ConfigError(f"--set {text!r}: {OWN_KEYS[key]}")
        if any(key == other.key for other in axes):
            raise ConfigError(f"--set {key} is given twice; give all its values at once: {key}=1,2")
        axes.append(SweepAxis(key, values))
    return axes


def pieces(text: str) -> list[str]:
    """Return the values between commas; commas within brackets and quotes do not separate.

    >>> pieces("1e-4, 2e-4"), pieces("[0.9,0.95],[0.9,0.99]"), pieces("'a,b',c")
    (['1e-4', '2e-4'], ['[0.9,0.95]', '[0.9,0.99]'], ["'a,b'", 'c'])
    """
    parts = [""]
    depth = 0  # of open brackets
    quote = ""  # the quotation mark that is open
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _in_one_notation(text: str) -> str:
    """Return a number in one notation, however it was written; any other value as it is."""
    try:
        value = float(text)
    except ValueError:
        return text
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


class Grid(NamedTuple):
    """All planned runs of a sweep."""

    home: Path
    keys: tuple[str, ...]
    runs: list[PlannedRun]


def planned_runs(start: Start, sets: Sequence[str], seeds: int) -> Grid:
    """Return the runs of every combination with every seed, with checked configs. Raises ConfigError."""
    axes = swept_settings(sets)
    base = start.load().config
    cells = list(product(*(axis.values for axis in axes)))
    if seeds < 1 or len(cells) * seeds > MAX_RUNS:
        raise ConfigError(
            f"--seeds {seeds} with {len(cells)} combinations: give at least 1 seed and at most "
            f"{MAX_RUNS:,} runs"
        )
    if base.launch.processes > 1 or started_together():
        raise ConfigError(
            "launch.processes: a sweep runs in one process. Set --launch.processes 1 and do not use "
            "torchrun, or train each run by `covey train` with its own --output"
        )
    runs = list[PlannedRun]()
    for cell, seed in product(cells, range(base.seed, base.seed + seeds)):
        settings = [f"--{axis.key}={value}" for axis, value in zip(axes, cell, strict=True)]
        folder = base.output / _folder_name(axes, cell, seed)
        run = start.with_settings((*settings, f"--seed={seed}", f"--output={folder}"))
        runs.append(PlannedRun(cell, seed, run, run.load()))
    _refuse_duplicates(runs)
    return Grid(base.output, tuple(axis.key for axis in axes), runs)


def _refuse_duplicates(runs: Sequence[PlannedRun]) -> None:
    """Raise ConfigError if two runs have the same config, as when a value was spelled in two ways."""
    folders = dict[str, Path]()  # the settings of a run, without its folder -> the folder
    for run in runs:
        settings = [{**resolved_values(stage), "output": None} for stage in run.resolved.stages()]
        identity = json.dumps(settings, default=str, sort_keys=True)
        other = folders.setdefault(identity, run.folder)
        if other != run.folder:
            raise ConfigError(f"{other.name} and {run.folder.name} are the same run; remove one of them")


def _folder_name(axes: Sequence[SweepAxis], cell: Sequence[str], seed: int) -> str:
    """Return the settings as a folder's name, with only the last word of a key if that is unique."""
    ends = [axis.key.rpartition(".")[2] for axis in axes]
    keys = [axis.key if ends.count(end) > 1 else end for axis, end in zip(axes, ends, strict=True)]
    named = [(key, re.sub(r"[^\w.+-]+", "_", value)) for key, value in zip(keys, cell, strict=True)]
    name = ",".join(f"{key}={value}" for key, value in (*named, ("seed", seed)))
    # A name that lost characters or is too long gets a hash, so that it stays unique.
    complete = list(cell) == [slug for _, slug in named]
    if not complete or len(name) > MAX_NAME_LENGTH:
        digest = hashlib.sha256("\0".join(cell).encode()).hexdigest()[:8]
        name = f"{name[:MAX_NAME_LENGTH]},{digest},seed={seed}"
    return name
