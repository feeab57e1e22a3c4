"""Loading a user's own function: `module.py:function`, from the project folder only."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from covey.types import ConfigError


def load_function(spec: str, folder: Path) -> Callable[..., Any]:
    """The function ``spec`` names, its file relative to ``folder`` (that of the config).

    Raises ConfigError naming the file, the function or the line that failed to import.
    """
    file, _, name = spec.partition(":")
    path = (folder / file).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"{spec}: no such file {path}; write it as module.py:function")
    module = _load(path)
    function = getattr(module, name, None)
    if not callable(function):
        offered = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(f"{spec}: {path.name} defines no function {name!r}; it has {', '.join(offered)}")
    function.__covey_name__ = spec
    return function


def _load(path: Path) -> ModuleType:
    name = f"covey_user_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path}: importing it failed: {type(error).__name__}: {error}") from error
    return module
