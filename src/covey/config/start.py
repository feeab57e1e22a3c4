"""The inputs that a run was started with, from which `covey resume` starts it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from covey.config.layers import merge
from covey.config.load import ResolvedConfig, load_config
from covey.config.python_objects import plain
from covey.errors import START_FILE
from covey.system.integrity import read_sealed
from covey_verify.errors import ConfigError


@dataclass(frozen=True)
class Start:
    """A config file, settings from the command line and values from Python; later ones win."""

    config: Path | None = None
    settings: Sequence[str] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    folder: Path | None = None
    """The folder for relative paths; None: the config file's folder."""

    def load(self, names_only: bool = False) -> ResolvedConfig:
        """Return the checked config; ``load_config`` describes ``names_only``. Raises ConfigError."""
        return load_config(self.config, self.settings, self.values, self.folder, names_only)

    def with_settings(
        self, settings: Sequence[str] = (), values: Mapping[str, object] | None = None
    ) -> Start:
        """Return a start with further settings, which win."""
        return replace(
            self, settings=(*self.settings, *settings), values=merge(dict(self.values), values or {})
        )

    def record(self) -> dict[str, object]:
        """Return the start as JSON, with functions by name."""
        folder = self.folder or (self.config.resolve().parent if self.config else Path.cwd())
        return {
            "config": str(self.config.resolve()) if self.config else None,
            "settings": list(self.settings),
            "values": plain(self.values, folder),
            "folder": str(folder),
        }


def read_start(run: Path) -> Start:
    """Return the inputs that a run was started with.

    Raises ConfigError if they are not recorded, CheckpointError if the record is damaged.
    """
    if not (run / START_FILE).is_file():
        raise ConfigError(f"{run}: this folder has no run of covey (no {START_FILE})")
    remedy = f"Restore the file, or repeat the first command with --output {run}"
    return read_sealed(run / START_FILE, Start, remedy)
