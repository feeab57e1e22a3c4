"""What a run was started with, as `covey resume` needs it to start the same again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from covey.config.layers import merge
from covey.config.load import Loaded, load, plain
from covey.endings import START
from covey.types import ConfigError


@dataclass(frozen=True)
class Start:
    """A config file, settings of the command line, and values from Python; later ones win."""

    config: Path | None = None
    settings: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """Where relative paths are looked for; None: the config file's folder."""

    def load(self) -> Loaded:
        """The checked config. Raises ConfigError."""
        return load(self.config, self.settings, self.values, self.folder)

    def changed(self, settings: Sequence[str] = (), values: Mapping[str, Any] | None = None) -> Start:
        """The same with further settings, which win."""
        return replace(
            self, settings=(*self.settings, *settings), values=merge(dict(self.values), values or {})
        )

    def record(self) -> dict[str, Any]:
        """As JSON: functions by where they can be found."""
        folder = self.folder or (self.config.resolve().parent if self.config else Path.cwd())
        return {
            "config": str(self.config.resolve()) if self.config else None,
            "settings": list(self.settings),
            "values": plain(self.values, folder),
            "folder": str(folder),
        }


def read_start(run: Path) -> Start:
    """What a run was started with. Raises ConfigError where that is not recorded."""
    try:
        record = json.loads((run / START).read_text())
        config = Path(record["config"]) if record["config"] else None
        return Start(config, list(record["settings"]), dict(record["values"]), Path(record["folder"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{run}: no run in this folder that covey began (no {START})") from None
