"""A model is loaded whole, as it was written, and only if there is room for it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from covey.errors import ConfigError
from covey.integrity import MANIFEST, damage

MOST: dict[str, int] = {"num_hidden_layers": 2048, "hidden_size": 1 << 18, "vocab_size": 1 << 24}
"""Larger models are a mistake in config.json, or an attack; their skeleton alone takes for ever."""
LEAST_BYTES = 1 / 4
"""A weight takes at least so many bytes, however it is quantized."""


def check_intact(folder: Path) -> None:
    """Raise ConfigError if a folder that covey wrote is not as it was written; others have no manifest."""
    if (folder / MANIFEST).is_file() and (problem := damage(folder, ("config.json",))):
        raise ConfigError(
            f"model: {problem}. Put the file back; if you changed it yourself, remove {folder / MANIFEST}"
        )


def check_size(loader: Any, config: PretrainedConfig, folder: Path) -> None:
    """Raise ConfigError, before any weight is built, if there is no room or the weights cannot be there."""
    for name, most in MOST.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and not 0 < value <= most:
            raise ConfigError(f"model: {folder / 'config.json'}: {name} is {value}; 1 to {most} is expected")
    with torch.device("meta"):
        skeleton: PreTrainedModel = loader.from_config(config)
    count = sum(p.numel() for p in skeleton.parameters())
    if 4 * count > (there := memory_there(torch.device("cpu"))):
        raise ConfigError(
            f"model: {folder} has {count:,} weights, {4 * count / 1e9:,.0f} GB while they are loaded, and "
            f"this machine has {there / 1e9:,.0f} GB. Take a smaller model"
        )
    held = sum(p.stat().st_size for p in folder.glob("*.safetensors")) if folder.is_dir() else 0
    if held and count * LEAST_BYTES > held:
        raise ConfigError(
            f"model: {folder / 'config.json'} describes {count:,} weights and the files beside it have "
            f"{held:,} bytes. They are not of the same model"
        )


def check_whole(model: PreTrainedModel, found: dict[str, Any], source: str) -> None:
    """Raise ConfigError unless every weight came from the files, none was left over, all are finite."""
    missing = sorted(found["missing_keys"])
    if missing:
        raise ConfigError(
            f"model: {source}: {_named(missing)} missing from its weights, and would be random. Get the "
            "whole model, or a config.json that fits"
        )
    if found["mismatched_keys"]:
        name, held, wanted = min(found["mismatched_keys"])
        raise ConfigError(
            f"model: {source}: {name} has shape {tuple(held)} in its weights and {tuple(wanted)} by its "
            "config.json. They are not of the same model"
        )
    kinds = {_kind(name) for name in model.state_dict()}
    further = sorted(name for name in found["unexpected_keys"] if _kind(name) in kinds)
    if further:
        raise ConfigError(
            f"model: {source}: its config.json has no place for {_named(further)} in its weights: there are "
            "more layers than it says"
        )
    check_finite(model, source)


def check_finite(model: PreTrainedModel, source: str) -> None:
    """Raise ConfigError if a weight is not a number."""
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            raise ConfigError(f"model: {source}: {name} has values that are not finite")


def memory_there(device: torch.device) -> int:
    """Bytes of the device, or of the machine as far as this process may use them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(file).read_text()))
        except (OSError, ValueError):  # not there, or `max`
            continue
    return min(limits)


def _kind(name: str) -> str:
    """A weight's name without the number of its layer."""
    return re.sub(r"\d+", "#", name)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
