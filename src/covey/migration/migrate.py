"""`covey migrate`: write another trainer's config as one of covey, and say what has no counterpart."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from covey.config.load import load_config
from covey.migration.axolotl import from_axolotl
from covey.migration.migrated import MigrationResult, as_yaml, nest_keys
from covey.migration.read_settings import read_settings
from covey.migration.verl import from_verl
from covey_verify.errors import ConfigError

Trainer = Literal["trl", "verl", "axolotl"]
READERS: Mapping[str, Callable[[Mapping[str, object]], MigrationResult]] = {
    "verl": from_verl,
    "axolotl": from_axolotl,
}
MARKS: Mapping[Trainer, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref.", "data.train_files", "model.partial_pretrain"),
    "axolotl": ("base_model",),
}
"""Beginnings of keys by which a trainer's config is known."""
UNSET = re.compile(r"\$\{?\w+\}?")
"""A shell variable that no line of a script has set."""


def migrate(file: Path, trainer: Trainer | None = None) -> tuple[str, MigrationResult]:
    """Return the text of a YAML file for covey, and the settings that it was made from.

    Raises ConfigError if the file has no settings, or if covey does not accept what follows from them.
    """
    settings = read_settings(file)
    recognized: Trainer = "trl"
    for name, marks in MARKS.items():
        if any(key.startswith(marks) for key in settings):
            recognized = name
    trainer = trainer or recognized
    if trainer == "trl":
        from covey.migration.trl import from_trl  # loads torch

        migrated = from_trl(settings, file.name)
    else:
        migrated = READERS[trainer](settings)
    open_names = sorted({name for value in migrated.config.values() for name in UNSET.findall(str(value))})
    if open_names:
        migrated.notes.append(f"{', '.join(open_names)}: set by the script's environment; fill in the value")
    try:
        load_config(values=nest_keys(migrated.config), folder=file.parent, names_only=True)
    except ConfigError as error:
        raise ConfigError(f"{file}, read as {trainer}'s: {error}") from None
    return as_yaml(migrated, f"{file.name} ({trainer})"), migrated
