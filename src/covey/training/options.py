"""Options of a run that are not part of its config: what the command line and the callers add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from covey.system.fault_injection import Faults
from covey.training.observer import Observer


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one process that a caller adds to a config."""

    strict: bool = False
    """Refuse anything but an exact continuation."""
    changes: bool = False
    """Allow changes of settings that end the exactness of a resumed run."""
    start: Mapping[str, object] = field(default_factory=dict)
    """Config and settings that `covey resume` needs to repeat the command."""
    home: Path = Path()
    """The folder of the whole run, which contains those of its stages."""
    faults: Faults = field(default_factory=Faults)
    same_inputs: bool = False
    """Refuse to continue a run with other rewards or data."""
    observer: Observer = field(default_factory=Observer)
    trains: bool = True
    """False if rows are only measured, which may be all good or all bad."""


DEFAULTS = RunOptions()
