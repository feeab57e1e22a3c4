"""The loader of a user's own functions, `folder/file.py:function` or `package.module:function`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from covey_verify.errors import ConfigError

SOURCE = "__covey_source__"
"""Attribute of a module that was loaded here: the content of its file at that time."""
IMPORTING: list[Path] = []
"""Files of the user that are being imported now."""


def load_function(spec: str, folder: Path) -> Callable[..., object]:
    """Return the function that ``spec`` names, its file relative to ``folder`` (the config's folder).

    Raises ConfigError naming the file, the function or the line that failed to import.
    """
    file, _, name = spec.partition(":")
    path = (folder / file).resolve()
    with _torch_as_before():
        if path.suffix != ".py" and all(part.isidentifier() for part in file.split(".")):
            module = _import_module(spec, file, folder)
        elif path.suffix != ".py" or not path.is_file():
            raise ConfigError(f"{spec}: no such file {path}; write it as module.py:function")
        else:
            module = _load(path)
    function = getattr(module, name, None)
    if not callable(function):
        offered = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(f"{spec}: {file} defines no function {name!r}; it has {', '.join(offered)}")
    # An object with slots, or a built-in function, takes no attribute; only the objective needs this one.
    with suppress(AttributeError, TypeError):
        function.__covey_name__ = spec
    return function


@contextmanager
def _torch_as_before() -> Iterator[None]:
    """Undo what an import sets in torch for the whole process, if torch is loaded: the program computes too.

    A file with `torch.set_default_dtype` or `torch.set_grad_enabled` may be meant for its own process.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    computes_gradients = torch.is_grad_enabled()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(computes_gradients)
        torch.set_num_threads(threads)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)


def name_of(function: object) -> str:
    """Return a function's name; for an object its class's name, for a partial its function's name.

    >>> import functools
    >>> name_of(name_of), name_of(Path()), name_of(functools.partial(print, 1))
    ('name_of', 'PosixPath', 'print')
    """
    called = getattr(function, "func", function)
    return getattr(called, "__name__", type(called).__name__)


def _import_module(spec: str, module: str, folder: Path) -> ModuleType:
    """Return a module by its import path, searched in ``folder`` first."""
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
    for module in tuple(sys.modules.values()):
        # The program's own modules must not run a second time. A module that was loaded here has to, if its
        # file has been edited since, such as between two runs of a notebook.
        variables = getattr(module, "__dict__", {})
        file = variables.get("__file__")
        same_file = isinstance(file, str) and file.endswith(path.name) and Path(file).resolve() == path
        if same_file and variables.get(SOURCE, source) == source:
            return module
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


def code_folder(module: str) -> Path:
    """Return the folder of a file's code, or the folder of an imported module's topmost package."""
    if module.endswith(".py"):
        return Path(module).parent
    # A package without __init__.py has no file; then it is the module's own folder.
    names = (module.partition(".")[0], module)
    files = [getattr(sys.modules[name], "__file__", None) for name in names]
    return Path(next(file for file in files if file)).parent
