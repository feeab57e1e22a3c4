"""The inputs of a run, as `env.json` records them, and which of them have changed.

Files count by their bytes, because any change may end the exactness of a resumed run. Given rows and
functions also count by content: of a script, only the functions that the run uses. That tells whether another
call means the same run. Contents are taken when a process begins and when it ends, since functions may change
their own state (a cache, a counter).
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from covey.config.load import ResolvedConfig
from covey.config.python_objects import ModelObject, RowsObject
from covey.models.hashes import weights_hash
from covey.models.load import model_files
from covey.models.model_objects import adapter_of, checked_model
from covey.rewards.contract import Reward
from covey.rewards.scorer import Rewards
from covey.rollouts.learned import is_learned
from covey.runs.compatibility import update_environment
from covey.runs.fingerprints import fingerprints
from covey.runs.reader import read_environment
from covey.runs.sources import OURS, is_library_file, origin_of, sources
from covey.sampling.prompts import EncodedProblem
from covey.sampling.tools.definitions import load_tools
from covey.system.integrity import changes, digest_of
from covey.system.processes import is_rank_zero
from covey.tasks.source import data_files
from covey_verify.errors import ConfigError, CoveyError
from covey_verify.usercode import load_function, name_of


class OtherInputs(ConfigError):
    """A run would continue with other rows or functions than it began with."""


def files_of(resolved: ResolvedConfig, rewards: Rewards) -> dict[str, str]:
    """Return name -> sha256 of every file the run has read; project files by their path in its folder."""
    folder = resolved.folder
    files = _data_files(resolved)
    files |= {_name(path, folder): path for path in sources((f for _, f in _functions(resolved)), folder)}
    model = resolved.config.model
    objects = dict[str, str]()
    if isinstance(model, ModelObject):
        objects = _of_given(model, adapters=resolved.config.lora is not None or adapter_of(model) is not None)
    elif model != "tiny":
        files |= _of_model("model", model, folder)
    for reward in rewards:
        if is_learned(reward):
            files |= _of_model(reward.name, reward.settings["model"], folder)
    return fingerprints(dict(sorted(files.items()))) | objects | {"covey's own code": _own_code()}


def contents_of(resolved: ResolvedConfig) -> dict[str, str]:
    """Return description -> hash of given rows and of the parts of the user's functions."""
    data = resolved.config.data
    settings = {"data.train": data.train, "data.test": data.test}
    rows = {f"rows of {k}": value for k, value in settings.items() if isinstance(value, RowsObject)}
    return fingerprints(rows) | _contents_of_functions(resolved)


def _contents_of_functions(resolved: ResolvedConfig) -> dict[str, str]:
    return fingerprints({name: f for name, f in _functions(resolved) if not _is_ours(f)})


def contents_record(resolved: ResolvedConfig, begun: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    """Return the contents with which a process began, and their present state."""
    return {"begun": begun, "ended": {**begun, **_contents_of_functions(resolved)}}


def record_end(resolved: ResolvedConfig, begun: Mapping[str, str]) -> None:
    """Record the state of the contents as a process ends."""
    if is_rank_zero():
        with suppress(OSError, CoveyError):  # a full disk, or a damaged record, has its own message
            update_environment(resolved.config.output, contents=contents_record(resolved, begun))


def changed_inputs(resolved: ResolvedConfig) -> list[str]:
    """Describe the data files, rows and functions that differ from those of the folder's run."""
    record = read_environment(resolved.config.output) or {}
    contents = record.get("contents")
    if contents is None:
        return []
    data = _data_files(resolved)
    files = {name: digest for name, digest in record["files"].items() if name in data}
    existing = {name: path for name, path in data.items() if path.is_file()}
    changed = [f"{name} {what}" for name, what in changes(files, fingerprints(existing)).items()]
    if _minor(record["python"]) != _minor(platform.python_version()):
        return changed  # the bytecode is another; the environment says so
    current = contents_of(resolved)
    # What equals its state at the end is unchanged too: the run itself changed it, as a cache.
    begun, ended = (changes(contents[when], current) for when in ("begun", "ended"))
    return changed + [f"{name} {what}" for name, what in begun.items() if name in ended]


def refuse_other_inputs(resolved: ResolvedConfig, ended: bool) -> None:
    """Raise OtherInputs if a run would continue, or return its result, with other inputs."""
    changed = changed_inputs(resolved)
    if not changed:
        return
    output = resolved.config.output
    held = "has ended with" if ended else "holds a run with"
    anew = "choose another output, or begin anew in Python by overwrite=True"
    rest = "" if ended else f". `covey.resume({str(output)!r}, ...)` continues it with what is given now"
    raise OtherInputs(
        f"{output} {held} other rewards or data: {'; '.join(changed)}. To train with them {anew}{rest}"
    )


def _is_ours(function: object) -> bool:
    """Whether a function is covey's or a library's: then its version says enough."""
    file = origin_of(function)
    return file is not None and is_library_file(file)


def _data_files(resolved: ResolvedConfig) -> dict[str, Path]:
    return {_name(path, resolved.folder, resolved.pipeline_folder): path for path in data_files(resolved)}


def _minor(version: object) -> list[str]:
    """Return the parts of a Python version that its bytecode depends on."""
    return str(version).split(".")[:2]


def problems_hash(problems: Iterable[EncodedProblem]) -> str:
    """Return a hash of the training data: prompts as tokens, in their order, with their columns."""
    digest = hashlib.sha256()
    for prompted in problems:
        columns = {k: str(v) for k, v in prompted.problem.columns.items()}
        digest.update(prompted.tokens.tobytes())
        digest.update(json.dumps([prompted.problem.id, columns]).encode())
    return digest.hexdigest()


def _functions(resolved: ResolvedConfig) -> Iterator[tuple[str, object]]:
    """Yield the functions that a config names or holds, with a name for each."""
    for entry in resolved.config.rewards:
        spec = next(iter(entry), None) if isinstance(entry, Mapping) else entry
        if isinstance(spec, str) and ":" in spec:
            with suppress(CoveyError):  # what is wrong with it is said where it is loaded for use
                yield f"reward {spec}", load_function(spec, resolved.folder)
        elif isinstance(spec, Reward):
            yield f"reward {spec.name}", spec.function
        elif callable(spec):
            yield f"reward {name_of(spec)}", spec
    for part in resolved.algorithm.all_functions:
        yield f"function {name_of(part.function)}", part.function
    tools = resolved.config.rollout.tools
    if tools is not None:
        with suppress(CoveyError):
            yield from ((f"tool {n}", t.function) for n, t in load_tools(tools, resolved.folder).items())


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
