"""What a run was started with, as `covey resume` needs it to start the same again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from covey.config.given import plain
from covey.config.layers import merge
from covey.config.load import Loaded, load_config
from covey.errors import START
from covey.system.integrity import read_record
from covey_verify.errors import ConfigError


@dataclass(frozen=True)
class Start:
    """A config file, settings of the command line, and values from Python; later ones win."""

    config: Path | None = None
    settings: Sequence[str] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    folder: Path | None = None
    """Where relative paths are looked for; None: the config file's folder."""

    def load(self, names_only: bool = False) -> Loaded:
        """The checked config; ``names_only`` as in ``load_config``. Raises ConfigError."""
        return load_config(self.config, self.settings, self.values, self.folder, names_only)

    def changed(self, settings: Sequence[str] = (), values: Mapping[str, object] | None = None) -> Start:
        """The same with further settings, which win."""
        return replace(
            self, settings=(*self.settings, *settings), values=merge(dict(self.values), values or {})
        )

    def record(self) -> dict[str, object]:
        """As JSON: functions by where they can be found."""
        folder = self.folder or (self.config.resolve().parent if self.config else Path.cwd())
        return {
            "config": str(self.config.resolve()) if self.config else None,
            "settings": list(self.settings),
            "values": plain(self.values, folder),
            "folder": str(folder),
        }


def read_start(run: Path) -> Start:
    """What a run was started with.

    Raises ConfigError where that is not recorded, CheckpointError where the record is damaged.
    """
    if not (run / START).is_file():
        raise ConfigError(f"{run}: no run in this folder that covey began (no {START})")
    remedy = f"Put the file back, or give the first command again with --output {run}"
    return read_record(run / START, Start, remedy)
