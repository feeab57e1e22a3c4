"""`covey doctor`: check each part of this machine, with a next step if something is missing."""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from covey.system.machine import MAX_THREADS, available_memory, available_threads, requested_threads
from covey.types import VERSION
from covey_verify.errors import SandboxUnavailable
from covey_verify.machine import available_cpus, processor_name

MIN_MEMORY = 2e9
"""Bytes of memory that the demo needs."""
MIN_DISK = 1e9
"""Bytes of disk for a few checkpoints of a small model."""
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
EXTRAS = {"peft": "lora", "sympy": "math", "trl": "bench"}


class Diagnosis(NamedTuple):
    """One part of the machine."""

    part: str
    status: Literal["OK", "WARN", "FAIL"]
    detail: str
    next_step: str = ""

    def __str__(self) -> str:
        """Return the diagnosis as text for people.

        >>> print(Diagnosis("memory", "WARN", "1.0 GB", "close other programs"))
        WARN  memory    1.0 GB
                        next: close other programs
        """
        rest = f"\n{'':16}next: {self.next_step}" if self.next_step else ""
        return f"{self.status:<6}{self.part:<10}{self.detail}{rest}"


def examine() -> list[Diagnosis]:
    """Check every part; a failure in one does not keep the others from being checked."""
    return [_diagnose(part) for part in (versions, device, kernels, threads, memory, disk, sandbox)]


def _diagnose(part: Callable[[], Diagnosis]) -> Diagnosis:
    try:
        return part()
    except Exception as error:  # the command is to find whatever is broken
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Diagnosis(part.__name__, "FAIL", reason[:200], "reinstall covey into a fresh environment")


def versions() -> Diagnosis:
    """Check Python, covey and the libraries it computes with."""
    names = [f"covey {VERSION}", f"Python {platform.python_version()}"]
    lacking = []
    for name in (*NEEDED, *EXTRAS):
        try:
            names.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lacking.append(name)
    if needed := [name for name in lacking if name in NEEDED]:
        return Diagnosis("versions", "FAIL", f"{', '.join(needed)} missing", "pip install covey")
    absent = "; ".join(f"{name} is optional: pip install 'covey[{EXTRAS[name]}]'" for name in lacking)
    return Diagnosis("versions", "OK", ", ".join(names), absent)


def device() -> Diagnosis:
    """Check for a GPU that torch can use, else describe the CPU."""
    import torch

    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        return Diagnosis("device", "OK", f"{facts.name}, {facts.total_memory / 1e9:.0f} GB")
    if Path("/proc/driver/nvidia").exists():
        step = "install the torch build for your driver's CUDA: pytorch.org/get-started"
        return Diagnosis(
            "device", "WARN", "an NVIDIA GPU that this torch cannot use; runs will use the CPU", step
        )
    return Diagnosis("device", "OK", f"CPU: {processor_name()}")


def kernels() -> Diagnosis:
    """Check the compiled kernels; on a machine with a GPU they are no reason to warn."""
    import torch

    diagnosis = _kernels()
    if not torch.cuda.is_available():
        return diagnosis
    words = f"only runs with `device: cpu` use them, others take the GPU. {diagnosis.detail}"
    return diagnosis._replace(status="OK", detail=words)


def _kernels() -> Diagnosis:
    """Check the compiled kernels, and whose matrix products are used."""
    from covey.models.kernels import build
    from covey.models.kernels.choice import MIN_SPEEDUP

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library = build.tested_kernels()
    if library is not None:
        # Dtype -> kinds of products for which torch was measured faster than covey's kernel.
        choice = library.trial.choice()
        rates = "; ".join(
            f"{dtype} {_in_words(rates_of_kinds, choice.get(dtype, ()))}"
            for dtype, rates_of_kinds in library.trial.rates.items()
        )
        words = f"{library.instructions}, {library.origin}"
        words += f". Products, one thread, GFLOP/s of covey to torch's: {rates}"
        if (gain := library.trial.rounding_gain) > MIN_SPEEDUP:
            words += f". `precision: auto` rounds to bfloat16 (mixed): they take 1/{gain:.1f} of the time"
        if unequal := sorted({name for name in library.trial.differs.values() if name}):
            words += (
                f". Sampling and training differ in the last bits: {unequal}; old log-probs are recomputed"
            )
            return Diagnosis("kernels", "WARN", words, "choose another compiler, such as CC=clang")
        return Diagnosis("kernels", "OK", words)
    if os.environ.get(build.OFF):
        return Diagnosis("kernels", "WARN", f"{build.OFF} is set; {build.COST}", f"unset {build.OFF}")
    if caught:
        step = "report it with this output"
        return Diagnosis("kernels", "WARN", str(caught[0].message), step)
    return Diagnosis("kernels", "WARN", f"{build.no_compiler()}; {build.COST}", build.REMEDY)


def _in_words(rates: Mapping[str, tuple[float, float]], by_torch: Collection[str]) -> str:
    return ", ".join(
        f"{kind} {'torch' if kind in by_torch else 'covey'} ({own_rate:.0f} to {torch_rate:.0f})"
        for kind, (own_rate, torch_rate) in rates.items()
    )


def threads() -> Diagnosis:
    """Check the number of threads, and whether other programs compute too."""
    count = available_threads()
    cpus = available_cpus()
    present = os.cpu_count() or 1
    words = f"{count} of {present} CPUs" + (" (affinity or a container's quota)" if cpus < present else "")
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.strip() and requested_threads() is None:
        step = f"unset OMP_NUM_THREADS, or set it to {cpus}"
        fault = f"OMP_NUM_THREADS={setting:.30} is not a number from 1 to {MAX_THREADS}, so it is ignored"
        return Diagnosis("threads", "WARN", f"{words}; {fault}", step)
    if count > cpus:
        step = f"unset OMP_NUM_THREADS, or set it to {cpus}"
        return Diagnosis("threads", "WARN", f"{count} threads on {cpus} CPUs", step)
    # Runnable processes, averaged over the last minute.
    load = os.getloadavg()[0]
    if load > present / 2:
        step = "times will be longer than those in docs/performance.md"
        return Diagnosis("threads", "WARN", f"{words}; other programs keep {load:.1f} of them busy", step)
    return Diagnosis("threads", "OK", words)


def memory() -> Diagnosis:
    """Check the memory that this process may use, and how much of it is free."""
    free = limit = available_memory()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        # MemAvailable is in KiB, and of the machine; a container's limit may be lower.
        free = min(free, next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable")))
    except (OSError, StopIteration):
        pass
    space = f"{free / 1e9:.1f} GB free of {limit / 1e9:.1f}"
    if free < MIN_MEMORY:
        return Diagnosis("memory", "WARN", space, "close other programs; the demo needs about 1 GB")
    return Diagnosis("memory", "OK", space)


def disk() -> Diagnosis:
    """Check whether runs can be written here."""
    folder = Path.cwd()
    if not os.access(folder, os.W_OK):
        return Diagnosis(
            "disk", "FAIL", f"{folder} cannot be written to", "set --output to a folder that you may write to"
        )
    free = shutil.disk_usage(folder).free
    space = f"{free / 1e9:.1f} GB free in {folder}"
    if free < MIN_DISK:
        return Diagnosis(
            "disk", "WARN", space, "free some space, or set --output to a folder on another disk"
        )
    return Diagnosis("disk", "OK", space)


def sandbox() -> Diagnosis:
    """Check where code that a model wrote could run."""
    from covey_verify.sandbox.choice import choose

    try:
        chosen = choose()
    except SandboxUnavailable as error:
        reason = str(error).splitlines()[0]
        step = "only rewards that run a model's code need one: docs/sandbox.md"
        return Diagnosis("sandbox", "WARN", f"no sandbox works here: {reason[:200]}", step)
    return Diagnosis("sandbox", "OK", f"{chosen.sandbox.name}, probed")
