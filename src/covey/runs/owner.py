"""The owner of a run's folder: a file in it names the process that has used it last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from covey.errors import CheckpointError
from covey.runs.atomic import write_file
from covey.system.opening import RECORD_BYTES, read_below

OWNER = ".owner"
"""The file's name."""


class Owner(NamedTuple):
    """A process on a machine."""

    process: int
    host: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def name_owner(folder: Path) -> None:
    """Write into a run's folder that this process uses it."""
    write_file(folder / OWNER, str(Owner(os.getpid(), os.uname().nodename)))


def owner_of(folder: Path) -> Owner | None:
    """Return the process that has used a run's folder last; None if its file is missing or names none."""
    try:  # "process PID on HOST"
        words = read_below(folder, OWNER, RECORD_BYTES).decode().split()
        return Owner(int(words[1]), words[3])
    except (OSError, ValueError, IndexError, CheckpointError):
        return None
