"""Atomic writes of files and folders: a reader finds them complete, or not at all.

A folder is written next to its place under a temporary name. Every file is synced, a manifest with sizes and
checksums comes last, then the folder is renamed. A crash at any instant leaves the old state or the new one.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from covey.system.integrity import MANIFEST, manifest_of
from covey.system.machine import runs_here
from covey.system.opening import name_file_in_errors, open_to_readers

TEMPORARY = ".tmp-"
LEFTOVER = re.compile(r"\.tmp-.+\.\d+", re.DOTALL)
"""Temporary names: that of the target, the writer's host and the id of its process (``_temporary``)."""


def write_file(path: Path, content: str | bytes) -> None:
    """Replace a file's content atomically. A link's target is replaced; a device is written to directly.

    Texts are written as UTF-8. OSError names the path.
    """
    data = content.encode() if isinstance(content, str) else content
    device = path.exists() and not path.is_file() and not path.is_dir()
    target = path if device else Path(os.path.realpath(path))
    temporary = _temporary(target)
    try:
        if device:
            path.write_bytes(data)
            return
        temporary.write_bytes(data)
        sync(temporary)
        # Read back before the rename: once renamed, the old content is lost.
        if temporary.read_bytes() != data:
            raise OSError(errno.EIO, "the disk or the memory returns other bytes than were written")
        temporary.replace(target)
        sync(target.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def append_whole(path: Path, line: bytes) -> None:
    """Append a line to a file: all of it, or nothing. OSError names the path."""
    with path.open("ab", buffering=0) as file, name_file_in_errors(path):
        before = file.tell()
        rest = line
        try:
            while rest:  # a disk that is nearly full takes a part, and refuses the rest
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), before)
            raise


def make_folder(path: Path) -> None:
    """Make a folder and its parents so that they survive a power loss. It may exist already."""
    # A new folder is durable once the names in its parent are synced.
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


@contextmanager
def committed_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into; it becomes ``target`` if the block ends without an error."""
    temporary = _temporary(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        open_to_readers(temporary)
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        (temporary / MANIFEST).write_text(manifest_of(temporary))
        for path in (*files, temporary / MANIFEST, *{p.parent for p in files}, temporary):
            sync(path)
        if target.exists():
            discard(target)
        temporary.rename(target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def discard(folder: Path) -> None:
    """Remove a folder so that no reader finds it half removed: it is renamed first."""
    trash = _temporary(folder.with_name(f"trash-{folder.name}"))
    folder.rename(trash)
    _remove(trash)


def clear_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders of writers that died."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if LEFTOVER.fullmatch(path.name):
            _remove(path)


def clear_killed(target: Path) -> None:
    """Remove the temporary folders of writers of ``target`` that no longer run.

    Those of other machines on a shared file system stay, because their processes cannot be seen from here.
    """
    beginning = _beginning(target)
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        number = path.name.removeprefix(beginning)
        if path.name.startswith(beginning) and number.isdecimal() and not runs_here(int(number)):
            _remove(path)


def _temporary(target: Path) -> Path:
    """Return the name that this process, on this machine, writes ``target`` under."""
    return target.with_name(f"{_beginning(target)}{os.getpid()}")


def _beginning(target: Path) -> str:
    # Machines that share a file system count their processes separately. No host's name contains "@".
    return f"{TEMPORARY}{target.name}@{os.uname().nodename}."


def link(source: str | Path, target: str | Path) -> None:
    """Give a file that nobody changes in place another name, or copy it."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copy2(source, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def sync(path: Path) -> None:
    """Sync a file's content, or the names in a folder, to disk, so that they survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with name_file_in_errors(path):
            os.fsync(handle)
    finally:
        os.close(handle)
