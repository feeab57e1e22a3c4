"""A user's own functions, `folder/file.py:function` or `package.module:function`: loading and naming them."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from covey_verify.errors import ConfigError

SOURCE = "__covey_source__"
"""Attribute of a module that was loaded here: what its file said then."""
IMPORTING: list[Path] = []
"""Files of the user that are being executed for their functions."""


def load_function(spec: str, folder: Path) -> Callable[..., object]:
    """The function ``spec`` names, its file relative to ``folder`` (that of the config).

    Raises ConfigError naming the file, the function or the line that failed to import.
    """
    file, _, name = spec.partition(":")
    path = (folder / file).resolve()
    if path.suffix != ".py" and all(part.isidentifier() for part in file.split(".")):
        module = _imported(spec, file, folder)
    elif path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"{spec}: no such file {path}; write it as module.py:function")
    else:
        module = _load(path)
    function = getattr(module, name, None)
    if not callable(function):
        offered = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(f"{spec}: {file} defines no function {name!r}; it has {', '.join(offered)}")
    with suppress(AttributeError):  # an object with slots; only functions of the objective need it
        function.__covey_name__ = spec
    return function


def uncalled(spec: str, settings: Iterable[str]) -> Callable[..., object]:
    """A stand-in for the function ``spec`` names, which is not loaded: it has that name and these settings.

    For whoever reads the record of a run, and must not run its code. Raises ConfigError for settings that no
    function has, and when it is called.
    """

    def stand_in(**_: object) -> object:
        raise ConfigError(f"{spec}: only its name was read; it is loaded where a run is trained or resumed")

    try:
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in settings]
    except ValueError as error:
        raise ConfigError(f"{spec}: {error}") from None
    vars(stand_in).update(__covey_name__=spec, __signature__=inspect.Signature(parameters))
    stand_in.__module__ = spec.partition(":")[0]
    return stand_in


def spec_of(function: object, folder: Path) -> str | None:
    """How a config in ``folder`` names a function; None if none does: a lambda, a closure, an object.

    >>> spec_of(load_function, Path()), spec_of(lambda: 0, Path())
    ('covey.config.usercode:load_function', None)
    """
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = Path(getattr(module, "__file__", None) or "")
    if module is None or getattr(module, name, None) is not function or file.suffix != ".py":
        return None
    if module.__package__:  # its relative imports work under its own name only
        return f"{module.__spec__.name if module.__spec__ else module.__name__}:{name}"
    path, here = file.resolve(), folder.resolve()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{name}"


def name_of(function: object) -> str:
    """A function's name; that of an object's class, and of what a partial calls.

    >>> import functools
    >>> name_of(name_of), name_of(Path()), name_of(functools.partial(print, 1))
    ('name_of', 'PosixPath', 'print')
    """
    called = getattr(function, "func", function)
    return getattr(called, "__name__", type(called).__name__)


def refuse_while_importing() -> None:
    """Raise ConfigError if a run is begun by a file that is only being imported for its functions."""
    if IMPORTING:
        raise ConfigError(
            f"{IMPORTING[-1].name} begins a run when it is imported, but only its functions are wanted: put "
            'what begins the run below `if __name__ == "__main__":`'
        )


def _imported(spec: str, module: str, folder: Path) -> ModuleType:
    """A module by its import path, found from ``folder`` too."""
    sys.path.insert(0, str(folder.resolve()))
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"{spec}: {module} cannot be imported here: {type(error).__name__}: {error}. Write it as "
            "module.py:function, or install the package"
        ) from error
    finally:
        sys.path.pop(0)


def _load(path: Path) -> ModuleType:
    source = path.read_bytes()
    for known in tuple(sys.modules.values()):
        # What the program itself has imported, or is, shall not run a second time; what was loaded here and
        # has been edited since, as between two runs of a notebook, shall.
        about = getattr(known, "__dict__", {})
        file = about.get("__file__")
        same = isinstance(file, str) and file.endswith(path.name) and Path(file).resolve() == path
        if same and about.get(SOURCE, source) == source:
            return known
    name = f"covey_user_{path.stem}_{abs(hash(str(path))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    setattr(module, SOURCE, source)
    IMPORTING.append(path)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: importing it failed: {type(error).__name__}: {error}") from error
    finally:
        IMPORTING.pop()
    return module
