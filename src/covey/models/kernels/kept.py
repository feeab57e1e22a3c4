"""The cache of compiled kernels: files between runs, in a folder that only this user can write to."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from pathlib import Path


def cache_places() -> list[Path]:
    """Possible folders for libraries and their trials, the best first."""
    base = os.environ.get("XDG_CACHE_HOME") or (Path.home() / ".cache" if os.environ.get("HOME") else None)
    shared = Path(tempfile.gettempdir()) / f"covey-{os.getuid()}"
    return [Path(base) / "covey", shared] if base else [shared]


def cache_folder() -> Path:
    """The folder of libraries and their trials. Raises OSError if no folder is safe."""
    for folder in cache_places():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = folder.stat()
        except OSError:
            continue
        if _ours_alone(found) and os.access(folder, os.W_OK):
            return folder
        if found.st_uid == os.getuid() and not _ours_alone(found):
            print(f"note: others may write to {folder}, so it is not used: chmod go-w it", file=sys.stderr)
    raise OSError("no cache folder for compiled operations that only you can write to")


def kept_library(target: Path, otherwise: str) -> bytes | None:
    """The kept library if it is intact and ours; else None, with a note if there was a file."""
    try:
        content = own_file(target)
        digest = own_file(_digest_of(target))
        if hashlib.sha256(content).hexdigest().encode() == digest:
            return content
    except OSError:
        pass
    tell_damaged(target, otherwise)
    return None


def tell_damaged(path: Path, otherwise: str) -> None:
    """Print a line about a file that cannot be used; print nothing if there is no file."""
    if os.path.lexists(path):
        print(f"note: {path} is damaged or not ours alone; {otherwise}", file=sys.stderr, flush=True)


def keep_library(target: Path, content: bytes) -> None:
    """Write a library, then its digest."""
    keep_file(target, content)
    keep_file(_digest_of(target), hashlib.sha256(content).hexdigest().encode())


def own_file(path: Path) -> bytes:
    """The content of a file that only this user can change. Raises OSError for any other."""
    # No links, and no wait on a pipe. The open file is checked, as the path could be replaced meanwhile.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or not _ours_alone(found):
            raise PermissionError(path)
        return file.read()


def keep_file(path: Path, content: bytes) -> None:
    """Write a file atomically and durably; only its owner can read it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    # The rename itself is durable only once the folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _ours_alone(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest_of(target: Path) -> Path:
    return target.with_suffix(".sha256")
