"""The part of the machine that this process may use."""

from __future__ import annotations

import os
from collections.abc import Mapping

from covey_verify.machine import available_cpus, group_limits

MAX_THREADS = 1024
"""Most threads that are asked for: with too many, the next thread of any library ends the process."""


def available_threads(environment: Mapping[str, str] = os.environ, processes: int = 1) -> int:
    """Return the threads to compute with: OMP_NUM_THREADS, or the CPUs, shared by so many processes."""
    return requested_threads(environment) or max(1, available_cpus() // processes)


def requested_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return OMP_NUM_THREADS as OpenMP reads it; None if it has no number up to ``MAX_THREADS``."""
    # It may be a list, one number per level of nesting. int refuses texts of thousands of digits, so the
    # length is checked first.
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip().lstrip("0")
    if not first.isdecimal() or len(first) > len(str(MAX_THREADS)) or int(first) > MAX_THREADS:
        return None
    return int(first)


def available_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    # The names of control groups version 2, then version 1.
    for group_limit in group_limits("memory", ("memory.max",), ("memory.limit_in_bytes",)):
        limits += group_limit
    return min(limits)


def runs_here(process: int) -> bool:
    """Return whether a process of this number runs on this machine, under any user."""
    try:
        os.kill(process, 0)  # only tests whether the process exists
    except PermissionError:  # by another user
        return True
    except (OSError, OverflowError):
        return False
    return True
