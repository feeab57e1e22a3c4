"""The state of a run, from the files in its folder: whether it is training, and on which machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from covey.errors import EXIT_FILE
from covey.runs.folder import RESULT
from covey.runs.owner import owner_of
from covey.runs.reader import resumable
from covey.system.machine import runs_here

RunStatus = Literal["training", "finished", "stopped", "interrupted"]


def run_state(folder: Path) -> RunStatus:
    """Return whether a run is training, has finished, was stopped by a guard, or was interrupted.

    The file ``OWNER`` names the process. Taking the lock to find out could make a starting trainer fail.
    """
    if (folder / RESULT).is_file():
        return "finished"
    status: RunStatus = "interrupted" if resumable(folder) else "stopped"
    # A run removes this file when it begins.
    if status == "stopped" and (folder / EXIT_FILE).is_file():
        return status
    owner = owner_of(folder)
    if owner is None:
        return status
    # The processes of another host cannot be seen from here, so they are assumed to run.
    if owner.host != os.uname().nodename:
        return "training"
    return "training" if runs_here(owner.process) else status


def host_elsewhere(folder: Path) -> str:
    """Return the other host on which a run trains, by its file ``OWNER``; empty if it does not."""
    owner = owner_of(folder)
    if owner is None or owner.host == os.uname().nodename or run_state(folder) != "training":
        return ""
    return owner.host
