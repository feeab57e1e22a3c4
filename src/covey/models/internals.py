"""Facts that torch knows of its objects and has no public name for."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after a module; only a call of the module itself runs them."""
    return bool(module._forward_pre_hooks or module._forward_hooks)  # noqa: SLF001 - no public name


def version_of(tensor: Tensor) -> int:
    """Count the times that a tensor was written to in place."""
    return tensor._version  # noqa: SLF001 - no public name


_MASTERS = weakref.WeakValueDictionary[int, Tensor]()
"""id of a low-precision parameter -> its float32 copy, as long as an optimizer holds both.

An attribute of the parameter would be saved and copied with a user's model.
"""


def give_master(parameter: Tensor, master: Tensor) -> None:
    """Let a low-precision parameter's float32 copy be found by ``master_of``."""
    _MASTERS[id(parameter)] = master


def master_of(parameter: Tensor) -> Tensor | None:
    """The float32 tensor that learns for a parameter: itself, or its copy; None if it has no copy."""
    return parameter if parameter.dtype == torch.float32 else _MASTERS.get(id(parameter))


def all_finite(values: Tensor) -> bool:
    """Whether all values are finite.

    ``isfinite`` would take twice the memory of the values, and the largest weights would be a run's peak.
    """
    return not values.numel() or bool(torch.stack(values.detach().aminmax()).isfinite().all())
