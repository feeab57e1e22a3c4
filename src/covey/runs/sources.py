"""The source files of a user's functions: those that define them, and the project's modules they import.

Files that a function opens by itself are not known.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from covey import types
from covey.system.integrity import digest_of
from covey_verify import types as verify_types

OURS = (Path(types.__file__).resolve().parent, Path(verify_types.__file__).resolve().parent)
LIBRARIES = tuple(
    Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)


def sources(functions: Iterable[object], folder: Path) -> set[Path]:
    """Return the files of users' functions and of the project modules that they import.

    Imports are found in their text. Modules imported in another way are found because they are loaded and lie
    below the folder of such a file.
    """
    own_files = {path for f in functions for path in _files_of(f, folder)}
    named = _with_imports(own_files, folder)
    trees = tuple({f"{str(path.parent).rstrip(os.sep)}{os.sep}" for path in own_files})
    # A copy of the values: another thread may import while this iterates.
    modules = list(sys.modules.values()) if trees else []
    files = [getattr(module, "__file__", None) for module in modules]
    loaded = [_real_path(file) for file in files if file]
    beside = {Path(file) for file in loaded if file.startswith(trees) and not is_library_file(Path(file))}
    return {p for p in named | beside if p.is_file()}


@cache
def _real_path(file: str) -> str:
    """Return where a module's file really is. Some 4,000 are loaded, and each stage of a run asks for all."""
    return os.path.realpath(file)


@cache
def code_of(function: Callable[..., object], folder: Path) -> str:
    """Return the sha256 of a user's function and its imports, as first read; empty for covey's own."""
    files = _with_imports(_files_of(function, folder), folder)
    return " ".join(sorted(digest_of(path) for path in files if path.is_file()))


def _with_imports(files: set[Path], folder: Path) -> set[Path]:
    # Where the project's modules are found: the config's folder, and what the user added to sys.path.
    places = [folder, *(Path(p) for p in sys.path if p and not is_library_file(Path(p)))]
    files_read = set[Path]()
    waiting = set(files)
    while waiting:
        path = waiting.pop()
        files_read.add(path)
        waiting |= {p for p in _imported_files(path, places) if not is_library_file(p)} - files_read
    return files_read


def _files_of(function: object, folder: Path) -> set[Path]:
    """Return the user's files of a function: that which a config names, and that which defines it."""
    spec = getattr(function, "__covey_name__", "")
    named = (folder / spec.partition(":")[0]).resolve() if ":" in spec else None
    files = (named, origin_of(function))
    return {path for path in files if path is not None and not is_library_file(path)}


def origin_of(function: object) -> Path | None:
    """Return the file of a function's module, or of an object's class; None if there is none."""
    # Look through functools.partial and through decorators.
    plain = getattr(function, "func", function)
    plain = inspect.unwrap(plain) if callable(plain) else plain
    name = getattr(plain, "__module__", None) or type(plain).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).resolve() if file else None


def is_library_file(path: Path) -> bool:
    """Whether a file belongs to Python, to an installed package or to covey."""
    path = path.resolve()
    return any(path.is_relative_to(folder) for folder in (*LIBRARIES, *OURS)) or not {
        "site-packages",
        "dist-packages",
    }.isdisjoint(path.parts)


def _imported_files(file: Path, places: Iterable[Path]) -> Iterator[Path]:
    """Yield the modules that a file's import statements may mean, also those inside functions."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        names = list[str]()
        up = 0
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            up = node.level
            # `from a import b` may name the module a.b, or an attribute of a: both are tried.
            names = [f"{base}.{alias.name}".strip(".") for alias in node.names] + [base] * bool(base)
        for name in names:
            # One leading dot means the file's own folder, each further one a folder above it.
            yield from _module(name.split("."), [file.parents[up - 1]] if up else [file.parent, *places])


def _module(parts: list[str], folders: Iterable[Path]) -> Iterator[Path]:
    """Yield a module's file and those of its packages, from the first place that has any of them."""
    for folder in folders:
        packages = [folder.joinpath(*parts[:n], "__init__.py") for n in range(1, len(parts) + 1)]
        files = [p.resolve() for p in (*packages, folder.joinpath(*parts).with_suffix(".py")) if p.is_file()]
        if files:
            yield from files
            return
