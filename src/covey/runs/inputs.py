"""Record a run's data, rewards and other functions by content, to say what differs when it is called again.

Unlike the inventory of files, this covers only what is used: a script's functions, not the whole script. It
is taken when a run begins and when it ends, since functions may change their own state (a cache, a counter).
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from covey.config.load import ResolvedConfig
from covey.config.python_objects import RowsObject
from covey.rewards.contract import Reward
from covey.runs.atomic import write_file
from covey.runs.content import content_parts, rows_hash
from covey.runs.inventory import is_library_file, origin_of
from covey.sampling.tools.definitions import load_tools
from covey.system.integrity import changes, digest_of, read_sealed, sealed
from covey.system.processes import is_rank_zero
from covey.tasks.source import data_files
from covey_verify.errors import ConfigError, CoveyError
from covey_verify.usercode import load_function, name_of

INPUTS = "inputs.json"
"""File in the run's folder."""


class OtherInputs(ConfigError):
    """A run would continue with other rows or functions than it began with."""


def inputs_of(loaded: ResolvedConfig) -> dict[str, str]:
    """Return description -> hash for given rows, data files and the parts of the user's functions."""
    data = loaded.config.data
    inputs = dict[str, str]()
    for key, value in (("data.train", data.train), ("data.test", data.test)):
        if isinstance(value, RowsObject):
            inputs[f"rows of {key}"] = rows_hash(value.rows)
    inputs |= {str(path): digest_of(path) for path in data_files(loaded) if path.is_file()}
    return inputs | _of_functions(loaded)


def _of_functions(loaded: ResolvedConfig) -> dict[str, str]:
    functions = [(name, function) for name, function in _functions(loaded) if not _is_ours(function)]
    return {f"{name}: {part}": value for name, f in functions for part, value in content_parts(f).items()}


def _functions(loaded: ResolvedConfig) -> Iterator[tuple[str, object]]:
    """Yield the functions that a config names or holds, with a name for each."""
    for entry in loaded.config.rewards:
        spec = next(iter(entry), None) if isinstance(entry, Mapping) else entry
        if isinstance(spec, str) and ":" in spec:
            with suppress(CoveyError):  # what is wrong with it is said where it is loaded for use
                yield f"reward {spec}", load_function(spec, loaded.folder)
        elif isinstance(spec, Reward):
            yield f"reward {spec.name}", spec.function
        elif callable(spec):
            yield f"reward {name_of(spec)}", spec
    for bound in loaded.algorithm.all_functions:
        yield f"function {name_of(bound.function)}", bound.function
    if (tools := loaded.config.rollout.tools) is not None:
        with suppress(CoveyError):
            yield from ((f"tool {n}", t.function) for n, t in load_tools(tools, loaded.folder).items())


def _is_ours(function: object) -> bool:
    """Whether a function is covey's or a library's: then its version says enough."""
    file = origin_of(function)
    return file is not None and is_library_file(file)


def record_inputs(loaded: ResolvedConfig, before: Mapping[str, str]) -> None:
    """Write down the inputs with which a run began, and their state at its end."""
    if is_rank_zero():
        current = {**before, **_of_functions(loaded)}
        record = {"python": {"version": _python()}, "begun": dict(before), "ended": current}
        with suppress(OSError):  # a full disk has its own message
            write_file(loaded.config.output / INPUTS, sealed(record))


def changed_inputs(loaded: ResolvedConfig) -> list[str]:
    """Describe the inputs that match neither the begin nor the end of the folder's run."""
    path = loaded.config.output / INPUTS
    if not path.is_file():
        return []
    recorded = _read_inputs(path)
    if recorded["python"]["version"] != _python():  # bytecode is another; the environment says so
        return []
    current = inputs_of(loaded)
    # An input that equals its state at the end is unchanged too: the run itself changed it, as a cache.
    begun, ended = (changes(recorded[when], current) for when in ("begun", "ended"))
    return [f"{name} {what}" for name, what in begun.items() if name in ended]


def refuse_other_inputs(loaded: ResolvedConfig, ended: bool) -> None:
    """Raise OtherInputs if a run would continue, or return its result, with other inputs."""
    if not (changed := changed_inputs(loaded)):
        return
    output = loaded.config.output
    held = "has ended with" if ended else "holds a run with"
    anew = "choose another output, or begin anew in Python by overwrite=True"
    rest = "" if ended else f". `covey.resume({str(output)!r}, ...)` continues it with what is given now"
    raise OtherInputs(
        f"{output} {held} other rewards or data: {'; '.join(changed)}. To train with them {anew}{rest}"
    )


def _read_inputs(path: Path) -> dict[str, dict[str, str]]:
    return read_sealed(path, dict[str, dict[str, str]], "Put the file back, or remove it")


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])
