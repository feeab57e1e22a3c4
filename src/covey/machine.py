"""How much of the machine this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
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


def available_cpus() -> int:
    """CPUs that this process may run on: its affinity (taskset, a batch system), and a container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min([count, *map(ceil, _quotas())]))


def available_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less by a container's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int((CGROUPS / file).read_text()))
        except (OSError, ValueError):  # not there, or `max`
            continue
    return min(limits)


def _quotas() -> Iterator[float]:
    """CPUs' worth of time that the control groups of this process allow."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    folder = CGROUPS / own
    for group in (folder, *folder.parents):
        try:
            quota, period = (group / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        except (OSError, ValueError):  # not there, or `max`
            continue
