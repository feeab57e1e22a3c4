"""Configs with TRL's names, which `covey train` reads as they are, in covey's own names."""

from __future__ import annotations

from collections.abc import Mapping

from covey.config.load import flatten, load_config, resolved_values
from covey.migration.migrated import MigrationResult, nest_keys


def from_trl(settings: Mapping[str, object]) -> MigrationResult:
    """Return covey's settings for TRL's. Raises ConfigError for a name with another meaning in covey."""
    loaded = load_config(values=nest_keys(settings))
    values = dict(flatten(resolved_values(loaded)))
    named = [key for key in values if any(key == o or key.startswith(f"{o}.") for o in loaded.origins)]
    migrated = MigrationResult({})
    migrated.config = {key: values[key] for key in named}
    migrated.notes = list(loaded.notes)
    return migrated
