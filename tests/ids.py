"""Short ids of parametrized tests, made of the parts in which their values differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FunctionType

import numpy as np
import torch

LONGEST = 40
"""Largest number of characters of an id."""
NAMED_BY_PYTEST = (int, float, complex, bytes, Enum, re.Pattern, type, FunctionType)


def id_of(value: object) -> str | None:
    """Return a value's id; None if pytest's own id is good, or if the value has no stable text."""
    if value is None or isinstance(value, NAMED_BY_PYTEST):
        return None
    # pytest writes ids to a file, which half of a surrogate pair would break.
    words = " ".join(_words(value).split()).encode("unicode_escape").decode()
    if " at 0x" in words:  # an address differs in each process
        return None
    # Templates and messages with the same beginning differ at their ends, so both ends are shown.
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
