"""How much of the machine this process may use."""

from __future__ import annotations

import os
from collections.abc import Mapping

from covey_verify.machine import available_cpus, group_limits

MOST_THREADS = 1024
"""Few enough to be started: of too many, whatever asks for a thread next ends the process."""


def available_threads(environment: Mapping[str, str] = os.environ, processes: int = 1) -> int:
    """Threads to compute with: `asked_threads`, or `available_cpus`, which so many processes share."""
    return asked_threads(environment) or max(1, available_cpus() // processes)


def asked_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """OMP_NUM_THREADS, as libraries with OpenMP read it; None where it names no number that can be taken."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip().lstrip("0")
    if not first.isdecimal() or len(first) > len(str(MOST_THREADS)) or int(first) > MOST_THREADS:
        return None
    return int(first)


def available_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less by a limit of a container or job."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for found in group_limits("memory", ("memory.max",), ("memory.limit_in_bytes",)):
        limits += found
    return min(limits)
