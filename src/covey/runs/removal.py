"""Remove a run: its files, so that another one can begin in its folder; or its folder, into the trash."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from covey.errors import EXIT_FILE, START_FILE
from covey.runs.archive import ARCHIVE
from covey.runs.atomic import discard, make_folder, sync
from covey.runs.compatibility import refuse_foreign
from covey.runs.folder import CURVE, LOCK, RESULT, STREAMS, RunFolder, take_lock
from covey.runs.owner import OWNER
from covey.runs.pending import PENDING
from covey.runs.reader import recorded_yaml, stages_in
from covey.runs.rollbacks import ROLLBACKS
from covey.runs.tags import TAGS
from covey.runs.trackers import IDENTITY
from covey.runs.trust import MARKS
from covey.tasks.source import EXAMPLES_FILE
from covey_verify.errors import ConfigError

FILES = (
    *STREAMS,
    IDENTITY,
    MARKS,
    "config.yaml",
    "env.json",
    CURVE,
    START_FILE,
    EXIT_FILE,
    RESULT,
    EXAMPLES_FILE,
    ROLLBACKS,
    TAGS,
)
OTHERS = (LOCK, OWNER, "report.html")
"""Files of a run's folder that stay when another run begins there."""
TRASH = ".trash"
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


def move_to_trash(folder: Path, root: Path) -> tuple[Path, Path]:
    """Move a run's folder, or a pipeline's with all its stages, into `.trash` next to it; delete nothing.

    Return its old and its new place. Raises ConfigError if it is not below ``root``, reached by a link, or
    holds anything that no run writes; FolderBusy if the run is at work.
    """
    home = pipeline_of(folder)
    if home == root or not home.is_relative_to(root) or home.resolve() != home:
        raise ConfigError(f"{home} is not a folder below {root}. Show the folder above it to delete it here")
    foreign = sorted(_foreign(home))
    if foreign:
        raise ConfigError(
            f"{home} has {', '.join(foreign[:3])}, which no run writes: it is not deleted from here. Move "
            "those files, or delete the folder yourself"
        )
    with ExitStack() as held:
        for locked in {folder, home, *stages_in(home)}:
            held.callback(take_lock(locked).release)
        trash = home.parent / TRASH
        if trash.is_symlink():
            raise ConfigError(f"{trash} is a link. Remove it first")
        make_folder(trash)
        target = trash / f"{home.name}-{time.time_ns()}"
        home.rename(target)
        sync(home.parent)
    return home, target


def put_back(home: Path, trashed: Path) -> None:
    """Undo ``move_to_trash``. Raises ConfigError if something is in the old place."""
    if home.exists() or home.is_symlink():
        raise ConfigError(f"{home} exists again, so {trashed} stays where it is")
    trashed.rename(home)
    sync(home.parent)


def pipeline_of(folder: Path) -> Path:
    """Return the folder of the pipeline that a run is a stage of, or the run's own."""
    return folder.parent if folder in stages_in(folder.parent) else folder


def _foreign(home: Path) -> Iterator[str]:
    """Yield what is in a run's folder, or in those of its stages, that no run writes."""
    stages = stages_in(home)
    for stage in stages or [home]:
        if not {"method", "train"} <= set(recorded_yaml(stage)):
            yield f"{stage.name}/config.yaml"
    expected = {*FILES, *FOLDERS, *OTHERS}
    for stage in (home, *stages):
        for path in stage.iterdir():
            if path not in stages and (path.name not in expected or path.is_symlink()):
                yield path.relative_to(home.parent).as_posix()
