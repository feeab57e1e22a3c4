"""Short ids of parametrized tests: values of all kinds by what tells them apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FunctionType

import numpy as np
import torch

LONGEST = 40
"""Characters of an id that a reader still takes in."""
NAMED_BY_PYTEST = (int, float, complex, bytes, Enum, re.Pattern, type, FunctionType)


def id_of(value: object) -> str | None:
    """Return a value's id; None for one that pytest names well, or that has no words of its own."""
    if value is None or isinstance(value, NAMED_BY_PYTEST):
        return None
    # pytest writes ids to a file, which half of a surrogate pair would break.
    words = " ".join(_words(value).split()).encode("unicode_escape").decode()
    if " at 0x" in words:  # an address differs in each process
        return None
    # Templates and messages that begin alike differ at their ends.
    return words if len(words) <= LONGEST else f"{words[:24].rstrip()}..{words[-14:].lstrip()}"


def _words(value: object) -> str:
    """Return a value as words, the same in every process."""
    if isinstance(value, Mapping):
        return ",".join(f"{_words(key)}={_words(v)}" for key, v in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(_words, value))
    if isinstance(value, set | frozenset):
        return ",".join(sorted(map(_words, value)))
    if isinstance(value, torch.Tensor | np.ndarray):
        return _words(value.tolist())
    if is_dataclass(value) and type(value).__str__ is object.__str__:
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        changed = {f.name: values[f.name] for f in fields(value) if f.default is not values[f.name]}
        return _words(changed) or type(value).__name__
    return getattr(value, "__name__", str(value).removeprefix("torch."))
