"""The user's cache folder: files between runs that nobody else can write."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path


def cache_candidates() -> list[Path]:
    """Possible folders for files that are kept between runs, the best first."""
    base = os.environ.get("XDG_CACHE_HOME") or (Path.home() / ".cache" if os.environ.get("HOME") else None)
    shared = Path(tempfile.gettempdir()) / f"covey-{os.getuid()}"
    return [Path(base) / "covey", shared] if base else [shared]


def cache_folder() -> Path:
    """The folder of files that are kept between runs. Raises OSError if no folder is safe."""
    for folder in cache_candidates():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.stat()
        except OSError:
            continue
        if _is_private(status) and os.access(folder, os.W_OK):
            return folder
        if status.st_uid == os.getuid() and not _is_private(status):
            print(f"note: others may write to {folder}, so it is not used: chmod go-w it", file=sys.stderr)
    raise OSError("no cache folder that only you can write to")


def read_private_file(path: Path) -> bytes:
    """The content of a file that only this user can change. Raises OSError for any other."""
    # No links, and no wait on a pipe. The open file is checked, as the path could be replaced meanwhile.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or not _is_private(status):
            raise PermissionError(path)
        return file.read()


def write_private_file(path: Path, content: bytes) -> None:
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


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
