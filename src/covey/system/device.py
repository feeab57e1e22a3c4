"""The device to compute on, and its memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from covey.system.machine import available_memory
from covey_verify.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """The device of a name; `auto` is the first GPU, or the CPU if there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)  # fails now, not in mid-run, if the device does not exist
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: {name!r}: {str(error).splitlines()[0]}") from None
    return device


def device_memory(device: torch.device) -> int:
    """Memory in bytes of a GPU, or the machine's memory that this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return available_memory()


def present_bytes(device: torch.device) -> int:
    """Return the bytes that this process takes now; where only the most so far is known, that."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return peak_bytes(device)
    # The second number is of pages in memory, also those of mapped files, as a model's weights may be.
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that this process has taken so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
