"""The device to compute on, and its memory."""

from __future__ import annotations

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
