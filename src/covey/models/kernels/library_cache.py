"""The cache of compiled kernels: libraries between runs, each with its digest."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from covey.system.cache import read_private_file, write_private_file


def kept_library(target: Path, otherwise: str) -> bytes | None:
    """The kept library if it is intact and ours; else None, with a note if there was a file."""
    try:
        content = read_private_file(target)
        digest = read_private_file(_digest_of(target))
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
    write_private_file(target, content)
    write_private_file(_digest_of(target), hashlib.sha256(content).hexdigest().encode())


def _digest_of(target: Path) -> Path:
    return target.with_suffix(".sha256")
