"""The processors that this process may use, their name, and other limits of its control groups."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from itertools import product
from math import ceil
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def available_cpus() -> int:
    """Return the number of CPUs that affinity (taskset, a batch system) and quota leave to this process."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min([count, *map(ceil, _quotas())]))


def processor_name() -> str:
    """Return the processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _quotas() -> Iterator[float]:
    """Yield the CPU quotas of this process's control groups, in CPUs."""
    for quota, period in group_limits("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        if quota > 0:  # version 1 of cgroups reports -1 if there is no quota
            yield quota / period


def group_limits(controller: str, *versions: tuple[str, ...]) -> Iterator[list[int]]:
    """Yield the numbers in files of this process's control groups, and of the parents, which limit it too.

    ``versions`` are the files of either version of control groups.
    """
    for group, files in product(_groups(controller), versions):
        try:
            yield [int(number) for file in files for number in (group / file).read_text().split()]
        except (OSError, ValueError):  # not there, or `max`
            continue


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of control groups, this process's own before its parents.

    Version 2 has one hierarchy without a name, version 1 has a hierarchy for each controller; a machine may
    have both. A container often sees its own group as the root, so the path of its group does not exist
    there.
    """
    paths = {"": "", controller: ""}
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        # As in "4:cpu,cpuacct:/user.slice" (version 1) or "0::/user.slice" (version 2).
        _, controllers, path = line.split(":", 2)
        paths |= {name: path.lstrip("/") for name in controllers.split(",") if name in paths}
    for name, path in paths.items():
        root = CGROUPS / name
        group = root / path
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))
