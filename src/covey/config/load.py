"""From YAML, command-line options and Python values to a Config that knows its origins.

Every error names the file and line (or the option), the key, and the nearest right one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from covey.config.algorithm import build_algorithm, contradictions, describe, hint
from covey.config.schema import Config, Section
from covey.config.usercode import name_of, spec_of
from covey.objective.algorithms import Algorithm
from covey.types import ConfigError

MAX_BYTES = 1 << 20
OBJECT = "an object in Python: "
"""In a recorded config, before the name of something that no file can hold."""

ALIASES: Mapping[str, str] = {
    "model_name_or_path": "model",
    "output_dir": "output",
    "reward_funcs": "rewards",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "mask_truncated_completions": "rollout.mask_truncated",
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "num_iterations": "train.inner_epochs",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.grad_clip",
    "warmup_steps": "train.warmup_steps",
    "save_steps": "train.save_every",
    "eval_steps": "eval.every",
    "beta": "algorithm.kl.coef",
    "epsilon": "algorithm.surrogate.clip_low",
    "epsilon_high": "algorithm.surrogate.clip_high",
    "loss_type": "algorithm.name",
}
"""TRL's names for ours; used with a note."""


@dataclass
class Loaded:
    """A checked config, its algorithm, where each value came from, and notes for the user."""

    config: Config
    algorithm: Algorithm
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    folder: Path = Path()
    """Where relative paths and user code are looked for: the config file's folder."""
    checkpoint: Path | None = None
    """Of a run that has not ended: its weights are taken instead of those of the config's model."""

    def stages(self) -> list[Loaded]:
        """The stages of a pipeline, each a full config; the run itself if it has none."""
        if not self.config.stages:
            return [self]
        base = self.config.model_dump(exclude={"stages"}, exclude_unset=True)
        stages = []
        for number, overrides in enumerate(self.config.stages, start=1):
            where = f"stages[{number}]"
            merged = merge(base, dict(overrides))
            origins = {**self.origins, **dict.fromkeys((k for k, _ in flatten(overrides)), where)}
            stages.append(_validate(merged, origins, self.folder, where))
        return stages


def load(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> Loaded:
    """Read a YAML file, then Python values, then `--dotted.key value` overrides; check everything.

    Relative paths are looked for in ``folder``; by default the file's, without one the working directory.

    >>> load(overrides=["--train.lr", "3e-4"]).config.train.lr
    0.0003
    """
    raw, origins = read_yaml(file) if file is not None else ({}, {})
    for key, value, origin in (*_items(values or {}), *_options(overrides)):
        _put(raw, key, value)
        origins[key] = origin
    notes = _rename(raw, origins)
    _refuse_lost_objects(raw)
    folder = folder or (file.resolve().parent if file is not None else Path.cwd())
    loaded = _validate(raw, origins, folder, str(file) if file else "config")
    loaded.notes = notes
    loaded.stages()
    return loaded


def read_yaml(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A YAML mapping and, for every key path, `file:line`. Duplicate keys are refused."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    origins: dict[str, str] = {}
    try:
        aliases = (isinstance(e, yaml.AliasEvent) for e in yaml.parse(text, Loader=yaml.SafeLoader))
        if len(text) > MAX_BYTES or ("*" in text and any(aliases)):
            raise ConfigError(f"{file}: a config has no anchors and at most {MAX_BYTES} bytes")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = _construct(node, file, (), origins) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: a config is a mapping of keys, this is a {type(raw).__name__}")
    return raw, origins


def _construct(node: yaml.Node, file: Path, path: tuple[str, ...], origins: dict[str, str]) -> Any:
    origins[".".join(path)] = f"{file}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in mapping:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"{file}:{line}: {'.'.join((*path, key))} is set twice")
            mapping[key] = _construct(value_node, file, (*path, key), origins)
            origins[".".join((*path, key))] = f"{file}:{key_node.start_mark.line + 1}"
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_construct(n, file, (*path, str(i)), origins) for i, n in enumerate(node.value)]
    return yaml.SafeLoader("").construct_object(node)


def _options(tokens: Sequence[str]) -> Iterable[tuple[str, Any, str]]:
    """`--a.b value`, `--a.b=value` and `--flag` pairs; values are YAML, but texts are taken as they stand."""
    left = list(tokens)
    while left:
        token = left.pop(0)
        if not token.startswith("--"):
            raise ConfigError(f"{token!r}: expected an option like --train.lr 1e-6")
        key, equals, text = token[2:].partition("=")
        if not equals:
            text = left.pop(0) if left and not left[0].startswith("--") else "true"
        try:
            text.encode()
            value = yaml.safe_load(text)
        except UnicodeEncodeError:
            raise ConfigError(f"--{key}: {text!r} is not UTF-8") from None
        except yaml.YAMLError:
            value = text
        if isinstance(value, str) and text[0] not in "'\"":
            value = text  # YAML would cut `a #1` and fold lines
        yield key.replace("-", "_"), value, f"--{key}"


def _items(values: Mapping[str, Any]) -> Iterable[tuple[str, Any, str]]:
    for key, value in values.items():
        setting = Config.model_fields.get(key)
        if isinstance(value, Mapping) and setting and _section(setting):
            yield from ((f"{key}.{k}", v, f"{key}.{k}") for k, v in value.items())
        else:
            yield key, value, key


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        below = raw.get(parent)
        if parent in ("algorithm", "surrogate", "advantage", "ratio", "reduce") and isinstance(below, str):
            below = {"name": below}
        raw[parent] = below = below if isinstance(below, dict) else {}
        raw = below
    raw[last] = value


def _rename(raw: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Move TRL's names to ours; a note for each."""
    notes = []
    for old, new in ALIASES.items():
        if old in raw:
            value = raw.pop(old)
            no_kl = new == "algorithm.kl.coef" and not value
            key = "algorithm.kl" if no_kl else new
            _put(raw, key, None if no_kl else value)
            origins[key] = origins.pop(old, old)
            notes.append(f"{origins[key]}: {old} is {key} here")
    return notes


def _validate(raw: dict[str, Any], origins: dict[str, str], folder: Path, where: str) -> Loaded:
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, origins, where))) from None
    try:
        algorithm = build_algorithm(config.algorithm, folder)
        updates = config.train.inner_epochs * config.train.updates_per_batch
        problems = contradictions(algorithm, config.rollout.group_size, updates)
        if config.guards.kl_action == "raise_coef":
            if algorithm.kl is None:
                problems.append("guards.kl_action raise_coef: there is no algorithm.kl to raise")
            elif algorithm.kl.target is not None:
                problems.append("guards.kl_action raise_coef: algorithm.kl.target moves it already")
        if config.method == "rl" and not config.stages and problems:
            raise ConfigError("\n".join(problems))
    except ConfigError as error:
        key = str(error).partition(":")[0]
        place = _origin(key, origins)
        raise ConfigError(f"{place}: {error}" if place else str(error)) from None
    return Loaded(config, algorithm, origins, folder=folder)


def _explain(error: ValidationError, origins: Mapping[str, str], where: str) -> Iterable[str]:
    for e in error.errors():
        path = ".".join(map(str, e["loc"]))
        place = _origin(path, origins) or where
        if e["type"] == "extra_forbidden":
            yield f"{place}: {path} is not a setting{hint(path, key_paths())}"
        else:
            yield f"{place}: {path} = {_shown(e['input'])}: {e['msg'].lower()}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."


def _origin(path: str, origins: Mapping[str, str]) -> str:
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path, "")


def key_paths() -> list[str]:
    """All dotted keys of the config."""
    return [path for path, _ in settings_of(Config)]


def settings_of(section: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, FieldInfo]]:
    """(dotted key, what pydantic knows of it) of every setting in a section and those below it."""
    for name, setting in section.model_fields.items():
        below = _section(setting)
        yield from settings_of(below, f"{prefix}{name}.") if below else [(f"{prefix}{name}", setting)]


def _section(known: FieldInfo) -> type[Section] | None:
    """The model of a field that is a section; None of a setting."""
    kinds = (known.annotation, *getattr(known.annotation, "__args__", ()))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings, one over the other."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = (
            merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def resolved(loaded: Loaded) -> dict[str, Any]:
    """The whole config as plain values, defaults and the algorithm's axes spelled out."""
    values = json.loads(loaded.config.model_dump_json(exclude={"rewards", "stages"}))
    values["rewards"] = plain(loaded.config.rewards, loaded.folder)
    values["algorithm"] = describe(loaded.algorithm)
    return values


def resolved_yaml(loaded: Loaded) -> str:
    """``resolved`` as YAML, each value with where it was set, if it was."""
    values = resolved(loaded)
    flat = dict(flatten(values))
    comments = (f"# {key}: {origin}\n" for key, origin in loaded.origins.items() if key in flat)
    return "".join(comments) + yaml.safe_dump(values, sort_keys=False, width=1000)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested mappings as (dotted key, value) pairs."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def plain(value: Any, folder: Path) -> Any:
    """A value from Python as a file can hold it; functions by where they are found from ``folder``.

    What no file can hold becomes a text that ``load`` refuses by name.
    """
    if isinstance(value, Mapping):
        return {plain(k, folder): plain(v, folder) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, folder) for v in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    return spec_of(value, folder) or f"{OBJECT}{name_of(value)}"


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.items() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _refuse_lost_objects(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError if a recorded config stands for something that only Python had."""
    for key, value in raw.items():
        if lost := [text.removeprefix(OBJECT) for text in _texts(value) if text.startswith(OBJECT)]:
            run = str(raw.get("output", ""))
            raise ConfigError(
                f"{key}: `{lost[0]}` was given to this run as an object in Python, which no file can hold. "
                f"Give it again from Python: covey.resume({run!r}, {key}=[...]) or covey.evaluate({run!r}, "
                f"{key}=[...]). A function of a .py file needs none of this"
            )
