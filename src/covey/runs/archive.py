"""The folders with what a run did before its rollbacks.

Steps after the checkpoint to which the run went back lie in `rollbacks/NUMBER`, a run folder of its own with
all logs and completions, and its best evaluated checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from covey.runs.atomic import discard, link, make_folder, sync, write_file
from covey.runs.compatibility import update_environment
from covey.runs.folder import STREAMS, RunFolder, checkpoints, step_of
from covey.runs.pending import forget_completions
from covey.runs.trust import MARKS

ARCHIVE = "rollbacks"


def archive_of(run: Path, number: int) -> Path:
    """Return the folder with what a run did before its ``number``-th rollback, counted from 1."""
    return run / ARCHIVE / str(number)


def archive_steps(folder: RunFolder, part: Path, back_to: int) -> None:
    """Move what the run did after ``back_to`` steps into the folder ``part``, and copy its logs.

    It may be killed at any point; a second call does the rest. The logs of the run itself stay as they are; a
    resume truncates them.
    """
    run = folder.path
    for name in ("rollouts", "checkpoints"):
        make_folder(part / name)
    for name in (*STREAMS, "config.yaml", "env.json", MARKS):
        if (run / name).exists() and not (part / name).exists():
            write_file(part / name, (run / name).read_bytes())
    for path, step in folder.rollout_files().items():
        target = part / "rollouts" / path.name
        if step > back_to:
            path.rename(target)
        elif not target.exists():
            link(path, target)
    best = folder.best()
    for path in checkpoints(run):
        if best is not None and step_of(path) == best.step > back_to:
            path.rename(part / "checkpoints" / path.name)
        elif step_of(path) > back_to or not back_to:
            discard(path)
    forget_completions(run)
    # Those before the change would be compared with those after it.
    update_environment(run, contents=None)
    for moved in (part / "rollouts", part / "checkpoints", run / "rollouts", run / "checkpoints"):
        sync(moved)
