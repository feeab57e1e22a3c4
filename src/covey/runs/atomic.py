"""Writing so that a reader never sees half of anything: a file or folder is there whole, or not.

A folder is written beside its place, every file synced, a manifest with sizes and checksums last,
then renamed; a crash at any instant leaves the old state or the new one.
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
from covey.system.opening import naming

TEMPORARY = ".tmp-"
LEFTOVER = re.compile(r"\.tmp-.+\.\d+", re.DOTALL)
"""Names that writers give to what they have begun: the target's, and their process."""


def write_file(path: Path, content: str | bytes) -> None:
    """Replace a file's content atomically: that of a link's file, and a device is written to.

    Texts are written as UTF-8. OSError names the path.
    """
    written = content.encode() if isinstance(content, str) else content
    device = path.exists() and not path.is_file() and not path.is_dir()
    target = path if device else Path(os.path.realpath(path))
    temporary = target.with_name(f"{TEMPORARY}{target.name}.{os.getpid()}")
    try:
        if device:
            path.write_bytes(written)
            return
        temporary.write_bytes(written)
        sync(temporary)
        if temporary.read_bytes() != written:
            raise OSError(errno.EIO, "the disk, or the memory, does not give back what was written")
        temporary.replace(target)
        sync(target.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def append_whole(path: Path, line: bytes) -> None:
    """Add a line to a file, all of it or nothing. OSError names the path."""
    with path.open("ab", buffering=0) as file, naming(path):
        before, left = file.tell(), line
        try:
            while left:  # a disk that is nearly full takes a part, and refuses the rest
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), before)
            raise


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, that survive a power loss; it may be there already."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


@contextmanager
def committed_folder(target: Path) -> Iterator[Path]:
    """A temporary folder to write into; it becomes ``target`` when the block ends without error."""
    temporary = target.with_name(f"{TEMPORARY}{target.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
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
    """Remove a folder so that no reader finds it half removed."""
    doomed = folder.with_name(f"{TEMPORARY}trash-{folder.name}.{os.getpid()}")
    folder.rename(doomed)
    _remove(doomed)


def clear_leftovers(folder: Path) -> None:
    """Remove what writers that died have left behind."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if LEFTOVER.fullmatch(path.name):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)
