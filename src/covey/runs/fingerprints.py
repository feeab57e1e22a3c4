"""Fingerprints of a run's inputs: hashes that are equal in every process while the input stays the same.

Of a file, the bytes count. Of a function, its bytecode, defaults, closure and the globals that it names
count, and those of the functions among them. Its place in a file or notebook and the code of libraries do
not count, nor does any address.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

import numpy as np
import torch

from covey.config.python_objects import RowsObject
from covey.runs.sources import is_library_file
from covey.system.integrity import digest_of
from covey_verify.contract import MARK

MAX_VALUES = 100_000
"""Number of values that are hashed by content; further ones count by their type only."""
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, range, type(...), PurePath)


def fingerprints(inputs: Mapping[str, object]) -> dict[str, str]:
    """Return name -> hash of some inputs; a function has a name and a hash for each part that may change."""
    return {
        f"{name}: {part}" if part else name: value
        for name, thing in inputs.items()
        for part, value in fingerprint_of(thing).items()
    }


def fingerprint_of(thing: object) -> dict[str, str]:
    """Return the parts of an input that may change, each described in words, with a hash.

    A file, and rows, are one part, which needs no words.
    """
    if isinstance(thing, Path):
        return {"": digest_of(thing)}
    if isinstance(thing, RowsObject):
        # Each by itself, since only so many values are hashed by content.
        return {"": _hash(*map(hash_of, thing.rows))}
    if isinstance(thing, functools.partial):
        return {**fingerprint_of(thing.func), "the bound arguments": hash_of((thing.args, thing.keywords))}
    if isinstance(thing, types.MethodType):
        return {**fingerprint_of(thing.__func__), "the object of the method": hash_of(thing.__self__)}
    if isinstance(thing, types.FunctionType):
        return {name: hash_of(value) for name, value in _parts(thing)}
    return {"the object": hash_of(thing)}


def hash_of(value: object) -> str:
    """Return a hash of a value's content."""
    return _Content().of(value)


def _parts(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    module_globals = function.__globals__
    yield "the code", code
    yield "the defaults", (function.__defaults__, function.__kwdefaults__)
    yield "what @reward declares", vars(function).get(MARK)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"`{name}` of the closure", cell.cell_contents
        except ValueError:  # nothing is assigned yet
            yield f"`{name}` of the closure", None
    # co_names mixes globals and attributes. For `helpers.score(x)` both names are in it, so of a user's
    # module only the attributes that the function may use are hashed.
    names = _names(code)
    for name in sorted(names & set(module_globals)):
        value = module_globals[name]
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
            value = {n: v for n, v in vars(value).items() if n in names}
        yield f"the global `{name}`", value


def _names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes in a function's code, and in that of functions inside it."""
    inside = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inside))


def _is_library(module: str) -> bool:
    """Whether a module is Python's, an installed package's or ours."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "__main__" and (file is None or is_library_file(Path(file)))


class _Content:
    """Hashes of values that may contain each other, and themselves."""

    def __init__(self) -> None:
        self.open: list[int] = []
        """Ids of the values being hashed, outermost first: a value that contains itself is found here."""
        self.count = 0

    def of(self, value: object) -> str:
        """Return the hash of a value: its type and its content."""
        self.count += 1
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, PLAIN_TYPES):
            return _hash(name, repr(value))
        if id(value) in self.open or self.count > MAX_VALUES:
            return _hash(name, "again")
        self.open.append(id(value))
        try:
            return _hash(name, *self._inside(value))
        finally:
            self.open.pop()

    def _inside(self, value: object) -> Iterator[str]:
        if isinstance(value, Mapping):
            # Sorted by hash: two equal mappings or sets may iterate in different orders.
            yield from sorted(self.of(k) + self.of(v) for k, v in value.items())
        elif isinstance(value, list | tuple):
            yield from map(self.of, value)
        elif isinstance(value, set | frozenset):
            yield from sorted(map(self.of, value))
        elif isinstance(value, np.ndarray) and value.dtype != object:
            yield f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        elif isinstance(value, torch.Tensor):
            # Viewed as bytes, because numpy has no bfloat16.
            flat = value.detach().cpu().contiguous().view(-1)
            yield f"{value.dtype} {tuple(value.shape)}"
            yield hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
        elif isinstance(value, types.CodeType):
            yield from self._code(value)
        elif isinstance(value, types.FunctionType | type):
            # The name without the enclosing function. Library code counts by name only: the environment
            # record has the library's version.
            yield value.__qualname__.rpartition("<locals>.")[2]
            if not _is_library(value.__module__):
                yield from self._hash_definition(value)
        elif isinstance(value, types.ModuleType):
            yield value.__name__
        else:
            yield from self._object(value)

    def _code(self, code: types.CodeType) -> Iterator[str]:
        # No line numbers or file name: moving a function does not change it.
        yield code.co_code.hex()
        yield " ".join((*code.co_names, "/", *code.co_varnames, "/", *code.co_freevars))
        yield from map(self.of, code.co_consts)

    def _hash_definition(self, value: types.FunctionType | type) -> Iterator[str]:
        """Hash the parts of a user's function or class."""
        if isinstance(value, types.FunctionType):
            yield from (self.of(part) for _, part in _parts(value))
            return
        attributes = {n: v for n, v in vars(value).items() if n not in COMMON_ATTRIBUTES}
        yield self.of(attributes)
        yield from (self.of(base) for base in value.__bases__)

    def _object(self, value: object) -> Iterator[str]:
        """Hash an instance: its class, and the state that pickle would save."""
        if isinstance(value, staticmethod | classmethod):
            yield self.of(value.__func__)
        elif isinstance(value, property):
            yield self.of((value.fget, value.fset))
        elif isinstance(value, types.MethodType):
            yield self.of((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            yield self.of((value.func, value.args, value.keywords))
        else:
            yield self.of(type(value))
            yield self.of(_state(value))


def _state(value: object) -> object:
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # a lock, an open file
        return getattr(value, "__dict__", None)
    if isinstance(reduced, str):
        return reduced
    # (callable, arguments, state, list items, dict items): the callable is the class, hashed above.
    items = [list(iterator) for iterator in reduced[3:5] if iterator]
    return [*reduced[1:3], *items]


COMMON_ATTRIBUTES = {
    "__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__qualname__", "__abstractmethods__", "_abc_impl",
}  # fmt: skip
"""Attributes of a class that say nothing about its behaviour."""


def _hash(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return digest.hexdigest()
