"""Opening files that others may have written: regular files below a folder, no links, bounded in size.

Every reader of a run's folder uses it. So looking at a folder cannot show a file from elsewhere (a link) or
block forever (a pipe, a device). Nor can it take all memory (a sparse file, deeply nested text). Every error
names the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from covey.errors import CheckpointError
from covey.system.machine import available_memory

T = TypeVar("T")
RECORD_BYTES = 64 << 20
"""Most bytes of a record that is one JSON object or one YAML mapping."""
MAX_DEPTH = 100
"""Most levels of nesting in JSON; covey writes fewer than ten."""
JSON_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]')
"""A string of JSON, or a bracket. Strings come first, so that brackets inside them do not count."""
TRANSIENT_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR}
"""Errors of a network file system for a read that may succeed when it is tried again."""
MAX_TRIES = 3
"""Attempts at a read that fails with one of them."""
PAUSE_SECONDS = 0.1
"""Seconds between two attempts."""


@cache
def stream_bytes() -> int:
    """Return the most bytes of a log or of a step's arrays: a quarter of this machine's memory."""
    return max(RECORD_BYTES, available_memory() // 4)


def read_below(folder: Path, name: str, most: int) -> bytes:
    """Return the content of a file below a folder.

    Raises FileNotFoundError, CheckpointError as ``open_below``, and OSError, with the file's name, if reads
    keep failing.
    """

    def read_content() -> bytes:
        with open_below(folder, name, most) as file:
            return file.read()

    return read_with_retries(read_content, folder / name)


def count_lines(folder: Path, name: str) -> int:
    """Count the lines of a file below a folder. Raises as ``read_below``."""
    return read_below(folder, name, stream_bytes()).count(b"\n")


def digest_below(folder: Path, name: str) -> str:
    """Return the sha256 of a file below a folder, read in chunks. Raises as ``read_below``."""

    def read_digest() -> str:
        with open_below(folder, name, None) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return read_with_retries(read_digest, folder / name)


@contextmanager
def open_below(folder: Path, name: str, most: int | None) -> Iterator[BufferedReader]:
    """Open a file below a folder for reading; it may have ``most`` bytes (None: any number).

    Raises FileNotFoundError. Raises CheckpointError naming the file if it, or a folder on the way to it, is a
    link, or if it is larger or no regular file.
    """
    path = folder / name
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise CheckpointError(f"{path}: {name!r} is not a file of {folder}")
    # One folder after the other, each opened within the last: no link can be swapped in between the check
    # and the use of a path.
    parent = _open_named(path, lambda: os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        for part in parts[:-1]:
            inside = _open_entry(part, os.O_RDONLY | os.O_DIRECTORY, parent, path)
            os.close(parent)
            parent = inside
        # O_NONBLOCK: opening a pipe without a writer would block before its kind can be checked.
        handle = _open_entry(parts[-1], os.O_RDONLY | os.O_NONBLOCK, parent, path)
    finally:
        os.close(parent)
    with os.fdopen(handle, "rb") as file:
        _check_regular(os.fstat(handle), path, most)
        yield file


def read_regular(path: Path, most: int) -> bytes:
    """Return the content of a file that a user named, links followed. Raises as ``read_below``."""
    handle = _open_named(path, lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    with os.fdopen(handle, "rb") as file, name_file_in_errors(path):
        _check_regular(os.fstat(handle), path, most)
        return file.read()


def load_json(content: bytes, parse_int: Callable[[str], object] | None = None) -> Any:
    """Return a JSON value; ``parse_int`` is passed to ``json.loads``.

    Raises ValueError, also if it is nested more deeply than covey ever writes.
    """
    if is_deep(content):
        raise ValueError("nested too deeply")
    return json.loads(content, parse_int=parse_int)


def is_deep(content: bytes) -> bool:
    """Whether JSON is nested more than ``DEEPEST`` levels, checked before it is parsed."""
    # Counting brackets is fast, and enough for nearly all files: the depth cannot exceed their number.
    return content.count(b"[") + content.count(b"{") > MAX_DEPTH and _depth(content) > MAX_DEPTH


def open_to_readers(folder: Path) -> None:
    """Give weights that only their owner can read the permissions of their folder.

    safetensors 0.8 writes every file so, whatever the umask. A server may run as another user.
    """
    usual = folder.stat().st_mode & 0o666
    for path in folder.rglob("*.safetensors"):
        if path.stat().st_mode & 0o777 == 0o600:
            path.chmod(usual)


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Give the file's name to an OSError that has none: one of a read, a write or a sync."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_with_retries(read: Callable[[], T], path: Path) -> T:
    """Call ``read``, and again after a failure that may pass. Raises OSError naming the file."""
    with name_file_in_errors(path):
        for _ in range(MAX_TRIES - 1):
            try:
                return read()
            except OSError as error:
                if error.errno not in TRANSIENT_ERRORS:
                    raise
                time.sleep(PAUSE_SECONDS)
        return read()


def _open_entry(part: str, flags: int, parent: int, path: Path) -> int:
    """Open a file or folder in an open folder, unless it is a link, and return its descriptor."""
    try:
        return os.open(part, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError as error:
        # Systems differ in the error for a link, so the path itself is looked at.
        with suppress(OSError):
            if stat.S_ISLNK(os.stat(part, dir_fd=parent, follow_symlinks=False).st_mode):
                raise CheckpointError(
                    f"{path}: {part} is a link, and only the folder's own files are read. Put the file there"
                ) from None
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket
            raise CheckpointError(f"{path} is not a regular file") from None
        raise OSError(error.errno, error.strerror, str(path)) from None


def _check_regular(status: os.stat_result, path: Path, most: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    if most is not None and status.st_size > most:
        raise CheckpointError(f"{path} has {status.st_size:,} bytes, and at most {most:,} are read")


def _open_named(path: Path, opening: Callable[[], int]) -> int:
    try:
        return opening()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _depth(content: bytes) -> int:
    deepest = depth = 0
    for mark in JSON_MARKS.finditer(content):
        first = mark[0][:1]
        # A string's mark begins with a quote, and changes nothing.
        depth += (first in b"[{") - (first in b"]}")
        deepest = max(deepest, depth)
    return deepest
