"""The state of a run, from the files in its folder: whether it is training, and on which machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from covey.errors import RECORD, CheckpointError
from covey.runs.folder import OWNER, RESULT
from covey.runs.reader import resumable
from covey.system.opening import RECORD_BYTES, read_below

RunState = Literal["training", "finished", "stopped", "interrupted"]


def run_state(folder: Path) -> RunState:
    """Return whether a run is training, has finished, was stopped by a guard, or was interrupted.

    The file ``OWNER`` names the process. Taking the lock to find out could make a starting trainer fail.
    """
    if (folder / RESULT).is_file():
        return "finished"
    ended: RunState = "interrupted" if resumable(folder) else "stopped"
    if ended == "stopped" and (folder / RECORD).is_file():  # which a run removes when it begins
        return ended
    owner = _owner(folder)
    if owner is None:
        return ended
    process, host = owner
    if host != os.uname().nodename:
        return "training"  # it is believed to be at work: its processes cannot be seen from here
    try:
        os.kill(process, 0)  # only tests whether the process exists
    except PermissionError:
        return "training"  # by another user
    except (OSError, OverflowError):
        return ended
    return "training"


def _owner(folder: Path) -> tuple[int, str] | None:
    """Return the process and the host that the file ``OWNER`` names; None if it names none."""
    try:  # "process PID on HOST"
        words = read_below(folder, OWNER, RECORD_BYTES).decode().split()
        return int(words[1]), words[3]
    except (OSError, ValueError, IndexError, CheckpointError):
        return None


def host_elsewhere(folder: Path) -> str:
    """Return the other host on which a run trains, by its file ``OWNER``; empty if it does not."""
    owner = _owner(folder)
    if owner is None or owner[1] == os.uname().nodename or run_state(folder) != "training":
        return ""
    return owner[1]
