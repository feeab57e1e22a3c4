"""Functions, rows and other objects by their content: the same in every process, without addresses.

A function is its bytecode, its defaults, what its closure holds and the globals that it names, those of the
functions among them included. Where it stands in a file or a notebook, and what a library does, are not.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath

import numpy as np
import torch

from covey.runs.inventory import is_library_file
from covey_verify.contract import MARK

MOST = 100_000
"""Values that are looked at; of further ones the type counts only."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(...), PurePath)


def parts_of(function: object) -> dict[str, str]:
    """What may change about a callable, in words -> a hash of it."""
    if isinstance(function, functools.partial):
        bound = {"the bound arguments": hash_of((function.args, function.keywords))}
        return {**parts_of(function.func), **bound}
    if isinstance(function, types.MethodType):
        return {**parts_of(function.__func__), "the object of the method": hash_of(function.__self__)}
    if isinstance(function, types.FunctionType):
        return {name: hash_of(value) for name, value in _parts(function)}
    return {"the object": hash_of(function)}


def hash_of(value: object) -> str:
    """A hash of a value's content."""
    return _Content().of(value)


def rows_hash(rows: Iterable[object]) -> str:
    """A hash of rows, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(hash_of(row).encode())
    return digest.hexdigest()


def _parts(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    code, known = function.__code__, function.__globals__
    yield "the code", code
    yield "the defaults", (function.__defaults__, function.__kwdefaults__)
    yield "what @reward declares", vars(function).get(MARK)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"`{name}` of the closure", cell.cell_contents
        except ValueError:  # nothing is assigned yet
            yield f"`{name}` of the closure", None
    names = _names(code)
    for name in sorted(names & set(known)):
        value = known[name]
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
        """What is being looked at, from the outside to the inside."""
        self.count = 0

    def of(self, value: object) -> str:
        """The hash of a value: of its type, and of what is in it."""
        self.count += 1
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, PLAIN):
            return _hash(name, repr(value))
        if id(value) in self.open or self.count > MOST:
            return _hash(name, "again")
        self.open.append(id(value))
        try:
            return _hash(name, *self._inside(value))
        finally:
            self.open.pop()

    def _inside(self, value: object) -> Iterator[str]:
        if isinstance(value, Mapping):
            yield from sorted(self.of(k) + self.of(v) for k, v in value.items())
        elif isinstance(value, list | tuple):
            yield from map(self.of, value)
        elif isinstance(value, set | frozenset):
            yield from sorted(map(self.of, value))
        elif isinstance(value, np.ndarray) and value.dtype != object:
            yield f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        elif isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().view(-1)
            yield f"{value.dtype} {tuple(value.shape)}"
            yield hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
        elif isinstance(value, types.CodeType):
            yield from self._code(value)
        elif isinstance(value, types.FunctionType | type):
            yield value.__qualname__.rpartition("<locals>.")[2]
            if not _is_library(value.__module__):
                yield from self._defined(value)
        elif isinstance(value, types.ModuleType):
            yield value.__name__
        else:
            yield from self._object(value)

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield code.co_code.hex()
        yield " ".join((*code.co_names, "/", *code.co_varnames, "/", *code.co_freevars))
        yield from map(self.of, code.co_consts)

    def _defined(self, value: types.FunctionType | type) -> Iterator[str]:
        """A function or a class of the user's."""
        if isinstance(value, types.FunctionType):
            yield from (self.of(part) for _, part in _parts(value))
            return
        own = {n: v for n, v in vars(value).items() if n not in OF_EVERY_CLASS}
        yield self.of(own)
        yield from (self.of(base) for base in value.__bases__)

    def _object(self, value: object) -> Iterator[str]:
        """An instance: its class, and its state as it would be pickled; of what cannot be, its class."""
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
    return reduced if isinstance(reduced, str) else [*reduced[1:3], *map(list, filter(None, reduced[3:5]))]


OF_EVERY_CLASS = {
    "__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__qualname__", "__abstractmethods__", "_abc_impl",
}  # fmt: skip
"""Names in a class that say nothing of what it does."""


def _hash(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return digest.hexdigest()
