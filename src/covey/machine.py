"""How much of the machine this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import product
from math import ceil
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MOST_THREADS = 1024
"""Few enough to be started: of too many, whatever asks for a thread next ends the process."""
OWN_GROUPS = Path("/proc/self/cgroup")


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
    """CPUs that this process may run on: its affinity (taskset, a batch system), and its quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min([count, *map(ceil, _quotas())]))


def available_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less by a limit of a container or job."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for found in _of_groups("memory", ("memory.max",), ("memory.limit_in_bytes",)):
        limits += found
    return min(limits)


def _quotas() -> Iterator[float]:
    """CPUs' worth of time that the control groups of this process allow."""
    for quota, period in _of_groups("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        if quota > 0:  # version 1 says -1 where there is none
            yield quota / period


def _of_groups(controller: str, *versions: tuple[str, ...]) -> Iterator[list[int]]:
    """The numbers in files of this process's control groups and of those around them, in which limits hold
    too. ``versions``: the files of either version of control groups.
    """
    for group, files in product(_groups(controller), versions):
        try:
            yield [int(number) for file in files for number in (group / file).read_text().split()]
        except (OSError, ValueError):  # not there, or `max`
            continue


def _groups(controller: str) -> Iterator[Path]:
    """Folders of control groups, a process's own before those around it.

    Version 2 has one hierarchy, which has no name, version 1 one for each controller; a machine may have
    both. A container often sees its own group as the root, under whose path nothing lies then.
    """
    own = {"": "", controller: ""}
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        own |= {name: path.lstrip("/") for name in controllers.split(",") if name in own}
    for name, path in own.items():
        root = CGROUPS / name
        yield from (g for g in (root / path, *(root / path).parents) if g.is_relative_to(root))
