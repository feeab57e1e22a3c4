"""The list of all files that a run reads, with their sha256, so that a resume can tell what has changed.

These are the data files, the model's folder, the sources of users' functions with their imports from the
project, and covey's own sources. Files that a user's function opens by itself are not known.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from covey import types
from covey.config.load import ResolvedConfig
from covey.config.python_objects import ModelObject
from covey.models.load import model_files
from covey.models.model_objects import adapter_of, checked_model
from covey.models.policy import weights_hash
from covey.rewards.scorer import Rewards
from covey.rollouts.learned import is_learned
from covey.sampling.prompts import Prompted
from covey.sampling.tools.definitions import load_tools
from covey.system.integrity import digest_of
from covey.tasks.source import data_files
from covey_verify import types as verify_types

OURS = (Path(types.__file__).resolve().parent, Path(verify_types.__file__).resolve().parent)
LIBRARIES = tuple(
    Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)


def inventory(loaded: ResolvedConfig, rewards: Rewards) -> dict[str, str]:
    """Return name -> sha256 of every file the run has read; project files by their path in its folder."""
    files = {_name(path, loaded.folder, loaded.pipeline_folder): path for path in data_files(loaded)}
    tools = loaded.config.rollout.tools
    called = load_tools(tools, loaded.folder).values() if tools is not None else ()
    functions = [f.function for f in (*rewards, *loaded.algorithm.all_functions, *called)]
    files |= {_name(path, loaded.folder): path for path in sources(functions, loaded.folder)}
    model = loaded.config.model
    objects = dict[str, str]()
    if isinstance(model, ModelObject):
        objects = _of_given(model, adapters=loaded.config.lora is not None or adapter_of(model) is not None)
    elif model != "tiny":
        files |= _of_model("model", model, loaded.folder)
    for reward in rewards:
        if is_learned(reward):
            files |= _of_model(reward.name, reward.settings["model"], loaded.folder)
    digests = {name: digest_of(path) for name, path in sorted(files.items())}
    return digests | objects | {"covey's own code": _own_code()}


def sources(functions: Iterable[Callable[..., object]], folder: Path) -> set[Path]:
    """Return the files of users' functions and of the project modules that they import.

    Imports are found in their text. Modules imported in another way are found because they are loaded and lie
    below the folder of such a file.
    """
    own_files = {path for f in functions for path in _begin(f, folder)}
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
    files = _with_imports(set(_begin(function, folder)), folder)
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


def _begin(function: Callable[..., object], folder: Path) -> Iterator[Path]:
    """Yield the user's files of a function: that which a config names, and that which defines it."""
    spec = getattr(function, "__covey_name__", "")
    named = (folder / spec.partition(":")[0]).resolve() if ":" in spec else None
    for path in (named, origin_of(function)):
        if path is not None and not is_library_file(path):
            yield path


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


def _of_model(role: str, name: str, folder: Path) -> dict[str, Path]:
    return {f"{role}/{file}": path for file, path in model_files(name, folder).items()}


def _of_given(model_object: ModelObject, adapters: bool) -> dict[str, str]:
    """Return hashes of a model object: of its config and tokenizer, with adapters of its weights too."""
    model, tokenizer = checked_model(model_object)
    texts = {
        "model/config.json": model.config.to_json_string(use_diff=False),
        "model/tokenizer": json.dumps([tokenizer.get_vocab(), tokenizer.chat_template], sort_keys=True),
    }
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    # Without adapters the weights are what is trained, and each checkpoint has them; with adapters the base
    # is needed again on a resume and has to be the same.
    weights = {k: v for k, v in model.state_dict().items() if "lora_" not in k}
    return hashes | ({"model/weights": weights_hash(weights)} if adapters else {})


@cache
def _own_code() -> str:
    """Return a hash of the sources that this process runs."""
    digest = hashlib.sha256()
    for package in OURS:
        for path in sorted(package.rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(f"{path.relative_to(package.parent)} {digest_of(path)}\n".encode())
    return digest.hexdigest()


def _name(path: Path, folder: Path, pipeline: Path | None = None) -> str:
    """Return a file's name relative to the project, or to the pipeline if an earlier stage left it.

    So the record stays true if the project or the pipeline is moved.
    """
    path = path.resolve()
    folder = folder.resolve()
    if pipeline is not None and path.is_relative_to(pipeline.resolve()):
        return f"../{path.relative_to(pipeline.resolve())}"
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def fingerprint(problems: Iterable[Prompted]) -> str:
    """Return a hash of the training data: prompts as tokens, in their order, with their columns."""
    digest = hashlib.sha256()
    for prompted in problems:
        columns = {k: str(v) for k, v in prompted.problem.columns.items()}
        digest.update(prompted.tokens.tobytes())
        digest.update(json.dumps([prompted.problem.id, columns]).encode())
    return digest.hexdigest()
