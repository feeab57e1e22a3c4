"""Remove a run from its folder, so that another one can begin there."""

from __future__ import annotations

from pathlib import Path

from covey.errors import RECORD, START
from covey.runs.atomic import discard
from covey.runs.compatibility import refuse_foreign
from covey.runs.folder import CURVE, RESULT, STREAMS, RunFolder
from covey.runs.healing import ARCHIVE, HEALING
from covey.runs.inputs import INPUTS
from covey.runs.origin import MARKS
from covey.runs.pending import PENDING
from covey.runs.reader import stages_in
from covey.runs.trackers import IDENTITY
from covey.tasks.source import EXAMPLES

FILES = (
    *STREAMS,
    IDENTITY,
    MARKS,
    "config.yaml",
    "env.json",
    CURVE,
    START,
    RECORD,
    RESULT,
    INPUTS,
    EXAMPLES,
    HEALING,
)
FOLDERS = ("rollouts", "checkpoints", "final", "export", "skipped", "sync", "tensorboard", PENDING, ARCHIVE)


def remove_run(folder: Path) -> None:
    """Remove the files that a run, or the stages of a pipeline, wrote; everything else in the folder stays.

    Raises ConfigError if no run has left its record, FolderBusy if one is at work.
    """
    if not folder.is_dir():
        return
    for home in (*stages_in(folder), folder):
        refuse_foreign(home)
        lock = RunFolder(home)
        try:
            for name in FOLDERS:
                if (home / name).is_dir():
                    discard(home / name)
            for name in FILES:
                (home / name).unlink(missing_ok=True)
        finally:
            lock.close()
