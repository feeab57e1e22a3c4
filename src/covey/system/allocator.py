"""The C library's allocator: how much freed memory a process keeps for itself."""

from __future__ import annotations

import ctypes
import platform

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
_TRIM_THRESHOLD = -1


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks: mapping fresh pages for every tensor costs more than the products."""
    if _is_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 27)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 30)


def give_back_freed_memory() -> None:
    """Return to the system what glibc has kept, so that a process is as large as what it holds."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
