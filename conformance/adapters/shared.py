"""What the adapters share: inputs as tensors, gradients, and modules in place of those that are not needed.

A peer's source lies in the folder of CONFORMANCE_PEER. Only the modules that hold its formulas are imported;
everything that they import besides is replaced by a module in which every name is ``Anything``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Case = dict[str, Any]


def tensor(case: Case, name: str) -> Tensor:
    return torch.tensor(case["inputs"][name], dtype=torch.float64)


def mask_of(case: Case) -> Tensor:
    return tensor(case, "mask")


def by_token(case: Case) -> Tensor:
    """The advantages that are given, (N, T), 0 off the mask."""
    shares = tensor(case, "advantages")
    return (shares[:, None] if shares.ndim == 1 else shares) * mask_of(case)


def with_gradient(loss: Tensor, trained: Tensor) -> dict[str, Any]:
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, trained)[0]}


def group_size(case: Case) -> int:
    """The one size of all groups. Raises NotImplementedError where they differ."""
    group = case["inputs"]["group"]
    sizes = {group.count(g) for g in group}
    if len(sizes) > 1:
        raise NotImplementedError
    return sizes.pop()


def only_for(case: Case, framework: str, presets: Sequence[str]) -> None:
    """Raise NotImplementedError for another framework's case, and for an algorithm that this one lacks."""
    if case.get("framework", framework) != framework or case.get("preset", presets[0]) not in presets:
        raise NotImplementedError


def within(axes: Case, **allowed: Sequence[Any]) -> None:
    """Raise NotImplementedError if an axis has another value than those allowed."""
    for axis, names in allowed.items():
        value = axes.get(axis)
        name = value["name"] if isinstance(value, dict) and "name" in value else value
        if name not in names:
            raise NotImplementedError


class Anything:
    """A class, decorator, context or constant of a module that is not needed."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given and callable(given[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Hollow(ModuleType):
    """A module in which every name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {}) if name[:1].isupper() else Anything()


def peer(package: str, *hollow: str) -> Path:
    """Prepare the imports of a peer's modules: the package without its ``__init__``, others hollow."""
    folder = Path(os.environ.get("CONFORMANCE_PEER", ""))
    if not (folder / package).is_dir():
        raise ImportError(f"set CONFORMANCE_PEER to the folder that holds {package}/, its source")
    sys.path.insert(0, str(folder))
    for name in hollow:
        sys.modules[name] = Hollow(name)
        sys.modules[name].__path__ = []
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    return folder


def bare(*names: str) -> None:
    """Make packages that hold nothing but the path of their modules."""
    for name in names:
        module = ModuleType(name)
        module.__path__ = [str(Path(os.environ["CONFORMANCE_PEER"], *name.split(".")))]
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
