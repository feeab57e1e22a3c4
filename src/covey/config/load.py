"""The loader of a Config from YAML, command-line options and Python values, with the origin of each value.

Every error names the file and line (or the option), the key, and the nearest valid one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from covey.config import trl
from covey.config.algorithm import (
    algorithm_keys,
    build_algorithm,
    checked_settings,
    departures,
    describe,
    own_code,
)
from covey.config.contradictions import config_problems, example_problems
from covey.config.layers import Layers
from covey.config.methods import COMPARING_METHODS, METHODS
from covey.config.python_objects import plain, refuse_lost
from covey.config.rows import flatten, key_paths
from covey.config.schema import Config
from covey.config.section import Section
from covey.config.sources import items, options, read_yaml
from covey.config.streams import read_streams
from covey.config.trl_loss import algorithm_of
from covey.config.unknown import explain_unknown
from covey.config.unread import reads, unread_settings
from covey.objective.algorithms import Algorithm
from covey.objective.axis_function import AnyAxisFunction, AxisFunction, bind
from covey.objective.corrections import truncated
from covey.system.integrity import sealed_text
from covey.types import Credit
from covey_verify.errors import ConfigError
from covey_verify.web import without_password


@dataclass(frozen=True)
class ResolvedConfig:
    """A checked config with its algorithm, the origin of each value, and notes for the user."""

    config: Config
    algorithm: Algorithm
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    folder: Path = Path()
    """The folder for relative paths and user code: the config file's folder."""
    previous_stage: Path | None = None
    """In a pipeline, the folder of the earlier stage whose final model this stage starts from."""
    pipeline_folder: Path | None = None
    """In a pipeline, the folder that contains all its stages."""
    loss: AnyAxisFunction | None = None
    """The loss of a method that learns from pairs or judged answers."""
    checkpoint: Path | None = None
    """Checkpoint of an unfinished run, whose weights replace the config's model."""
    recorded_run: Path | None = None
    """The folder of the run, if this was read from its record."""
    of_stages: tuple[ResolvedConfig, ...] = ()
    """The config of each stage of a pipeline, which has the run's values and its own; see ``stages``."""

    def stages(self) -> list[ResolvedConfig]:
        """Return the stages of a pipeline, each a full config, or the run itself if it has none."""
        return list(self.of_stages) or [self]

    @property
    def credit(self) -> Credit:
        """The finest unit whose rewards are trained on; completions if no reward is."""
        return self.algorithm.credit if self.config.method == "rl" else "completion"

    def with_place(self, problem: str) -> str:
        """Return a message that begins with a key, prefixed by the file and line where the key was set."""
        return _with_place(problem, self.origins)


def load_config(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, object] | None = None,
    folder: Path | None = None,
    names_only: bool = False,
    settings_only: bool = False,
) -> ResolvedConfig:
    """Read a YAML file, then Python values, then `--dotted.key value` overrides; check everything.

    Relative paths are searched in ``folder``, by default the file's folder, or the working directory without
    a file. With ``names_only``, for readers of a record, a user's functions are not imported. With
    ``settings_only``, objects that only Python had may be missing: nobody opens them.

    >>> load_config(overrides=["--train.lr", "3e-4"]).config.train.lr
    0.0003
    """
    layers = Layers(*read_yaml(file)) if file is not None else Layers({}, {})
    layers.add(items(values or {}), over_stages="stages" not in (values or {}))
    layers.add(options(overrides))
    if not settings_only:
        refuse_lost(layers.raw)
    folder = folder or (file.resolve().parent if file is not None else Path.cwd())
    where = str(file) if file else "config"
    whole = _validate(layers.raw, layers.origins, folder, where, layers.per_update, names_only)
    stages = tuple(
        _validate(raw, origins, folder, f"{where} (stage {name})", layers.per_update, names_only)
        for name, raw, origins in layers.stages()
    )
    resolved = replace(whole, of_stages=stages)
    stream_notes = read_streams(stage.config for stage in resolved.stages())
    return replace(resolved, notes=[*_notes(resolved, layers), *stream_notes])


def _notes(resolved: ResolvedConfig, layers: Layers) -> list[str]:
    """Return all notes on a config for the user, those of the stages with their names."""
    stages_by_name = list(zip(layers.names if resolved.of_stages else [""], resolved.stages(), strict=True))
    stages = [(name, stage.config, stage.origins) for name, stage in stages_by_name]
    return [
        *layers.notes,
        *(
            f"stage {name}: {note}" if name else note
            for name, stage in stages_by_name
            for note in stage.notes
        ),
        *_default_loss_notes(resolved.stages(), layers.of_trl),
        *unread_settings(stages),
        *_warmup_notes(stages),
    ]


def with_settings(resolved: ResolvedConfig, settings: Sequence[str]) -> ResolvedConfig:
    """Return a run or a stage with further settings, given as on the command line. Raises ConfigError."""
    layers = Layers(_set_in(resolved.config), dict(resolved.origins))
    layers.add(options(settings))
    new = _validate(
        layers.raw, layers.origins, resolved.folder, "config", layers.per_update, names_only=False
    )
    return replace(resolved, config=new.config, algorithm=new.algorithm, origins=new.origins, loss=new.loss)


def _set_in(section: Section) -> dict[str, object]:
    """Return the values that were set in a section and in its subsections, in a file's format."""
    values = {name: getattr(section, name) for name in section.model_fields_set}
    return {name: _set_in(v) if isinstance(v, Section) else v for name, v in values.items()}


def _validate(
    raw: Mapping[str, object],
    origins: Mapping[str, str],
    folder: Path,
    where: str,
    per_update: Mapping[tuple[str, str], str],
    names_only: bool,
) -> ResolvedConfig:
    raw, origins, notes = _with_loss_of_trl(raw, dict(origins))
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins, where)) from None
    try:
        algorithm = build_algorithm(config.algorithm, None if names_only else folder)
    except ConfigError as error:
        raise ConfigError(_with_place(str(error), origins)) from None
    unloaded = names_only and own_code(algorithm)
    if not (config.stages or unloaded):  # the needs of a function are unknown until it is loaded
        problems = list(example_problems(config))
        if config.method == "rl":
            problems += [*config_problems(config, algorithm), *_count_problems(config, origins, per_update)]
        if problems:
            raise ConfigError("\n".join(_with_place(p, origins) for p in problems))
    notes = [*notes, *_dialect_notes(config, algorithm)] if config.method == "rl" else []
    if config.method == "rl" and config.rollout.staleness and not config.stages:
        algorithm, more = with_correction(algorithm, config.algorithm)
        notes = [*notes, *more]
    return ResolvedConfig(config, algorithm, origins, notes, folder=folder, loss=_loss(config, origins))


def _dialect_notes(config: Config, algorithm: Algorithm) -> list[str]:
    block = config.algorithm
    if not (isinstance(block, dict) and block.get("dialect")):
        return []
    name = str(block.get("name", "grpo"))
    return [f"algorithm {name} as {block['dialect']} computes it; {departures(algorithm, name)}"]


def with_correction(algorithm: Algorithm, spec: object) -> tuple[Algorithm, list[str]]:
    """Return the algorithm, corrected for stale tokens unless its config chose a correction, and a note."""
    chosen = isinstance(spec, Mapping) and ("correction" in spec or spec.get("old") == "sampler")
    if chosen or algorithm.correction or algorithm.old == "sampler":
        return algorithm, []
    note = (
        "rollout.staleness: no correction is named, so algorithm.correction truncated weights stale tokens "
        "by min(trainer / sampler, 2); `correction: null` trains on them unweighted"
    )
    return replace(algorithm, correction=(bind(truncated),)), [note]


def _loss(config: Config, origins: Mapping[str, str]) -> AnyAxisFunction | None:
    """Return the loss of a method with its settings.

    Raises ConfigError for settings that it does not have.
    """
    function = METHODS[config.method].loss
    if function is None:
        if config.loss and not config.stages:
            message = f"loss: method {config.method} has no loss settings; these methods have: "
            raise ConfigError(_with_place(message + ", ".join(COMPARING_METHODS), origins))
        return None
    try:
        return AxisFunction(function, checked_settings("loss", function, config.loss))
    except ConfigError as error:
        raise ConfigError(_with_place(str(error), origins)) from None


def _with_loss_of_trl(
    raw: Mapping[str, object], origins: dict[str, str]
) -> tuple[dict[str, object], dict[str, str], list[str]]:
    """Return the values with TRL's loss as an `algorithm` block, the origins, and a note."""
    loss, places = _read_loss_of_trl(raw, origins)
    if not loss:
        return dict(raw), origins, []
    algorithm = _translate_loss_of_trl(loss, places)
    names = ", ".join(loss)
    if "algorithm" in raw:
        origin = origins.get("algorithm", "algorithm")
        raise ConfigError(
            f"{', '.join(map(_in_words, places.values()))}: {names} and algorithm ({origin}) both "
            "define the loss: TRL's names mean its whole loss, with its defaults for the rest. Keep one; "
            f"these names alone mean algorithm: {_in_a_line(algorithm)}"
        )
    others = {k: v for k, v in raw.items() if k not in loss}
    note = f"{names}: read as TRL's loss, with its defaults for the rest: algorithm: {_in_a_line(algorithm)}"
    new_origins = {**origins, "algorithm": f"{', '.join(places.values())} (TRL's)"}
    return {**others, "algorithm": algorithm}, new_origins, [note]


def _read_loss_of_trl(
    raw: Mapping[str, object], origins: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the values of TRL's names of the loss, and where they were set.

    Raises ConfigError for a method that has no reinforcement loss.
    """
    loss = {name: raw[name] for name in trl.LOSS if name in raw}
    places = {name: origins.get(name, name) for name in loss}
    method = raw.get("method", "rl")
    if loss and method != "rl" and not raw.get("stages"):
        raise ConfigError(
            f"{_in_words(min(places.values()))}: {', '.join(loss)} set the reinforcement loss; set the "
            f"loss of method {method} by `loss`, for example loss: {{beta: 0.1}}"
        )
    return loss, places


def _translate_loss_of_trl(loss: Mapping[str, object], places: Mapping[str, str]) -> dict[str, object]:
    """Return TRL's loss as an `algorithm` block. Raises ConfigError, with the place of the name at fault."""
    try:
        return algorithm_of(loss)
    except ConfigError as error:
        # The error begins with the name that it is about.
        name = str(error).partition(" ")[0].rstrip(":")
        origin = places.get(name, min(places.values()))
        raise ConfigError(f"{_in_words(origin)}: {error}") from None


def _default_loss_notes(stages: Sequence[ResolvedConfig], of_trl: bool) -> list[str]:
    """Return a note if TRL's names are used without a loss, since covey's default loss is another one."""
    unnamed = any(s.config.method == "rl" and "algorithm" not in s.config.model_fields_set for s in stages)
    if not of_trl or not unnamed:
        return []
    note = (
        "no algorithm is named, so covey's default, dapo, is used: it has clip_high 0.28 and replaces dead "
        "groups"
    )
    return [f"{note}; TRL's default is loss_type: dapo"]


def _warmup_notes(stages: Sequence[tuple[str, Config, Mapping[str, str]]]) -> Iterable[str]:
    """Yield a note for each stage whose warm-up is longer than its training."""
    for name, config, _ in stages:
        train = config.train
        if train.warmup_steps > train.steps and reads(config.method, "train.warmup_steps"):
            rate = train.lr * train.steps / train.warmup_steps
            stage = f"stage {name}: " if name else ""
            yield (
                f"{stage}train.warmup_steps {train.warmup_steps}: the learning rate only reaches {rate:.2g}, "
                f"since train.steps is {train.steps}"
            )


def _in_a_line(algorithm: Mapping[str, object]) -> str:
    """Return a block without empty values as one line of YAML."""
    values = dict[str, object]()
    for axis, value in algorithm.items():
        if isinstance(value, Mapping):
            values[axis] = {setting: entry for setting, entry in value.items() if entry is not None}
        elif value is not None:
            values[axis] = value
    if algorithm["kl"] is None:
        values["kl"] = None  # left out, it would be the preset's
    return yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=10_000).strip()


def _count_problems(
    config: Config, origins: Mapping[str, str], per_update: Mapping[tuple[str, str], str]
) -> Iterable[str]:
    """Yield messages about TRL's counts of optimizer steps, if a rollout batch has several of them."""
    updates = config.train.updates_per_rollout_batch
    if updates == 1:
        return
    for (key, origin), name in per_update.items():
        # Another layer has overridden TRL's name since.
        if origins.get(key, "").partition(" (stage")[0] != origin:
            continue
        yield (
            f"{key}: TRL's {name} counts optimizer steps, but {key} counts rollout batches, each of "
            f"{updates} optimizer steps here; set {key} itself"
        )


MISTAKES_IN_WORDS: Mapping[str, str] = {
    "tuple_type": "write a list, as [first, second]",
    "dict_type": "write a mapping, for example {name: value}",
    "model_type": "write a mapping, for example {name: value}",
    "string_type": "write a string",
    "path_type": "write the path of a file or folder",
    "bool_parsing": "write true or false",
}
"""pydantic's error type -> words for users who do not know Python's types."""


def _explain(error: ValidationError, origins: Mapping[str, str], where: str) -> str:
    """Return one line per mistake, unknown names last, followed by where settings are listed."""
    mistakes = []
    unknown = []
    keys = [*key_paths(), *algorithm_keys()]
    for e in error.errors():
        path = ".".join(map(str, e["loc"]))
        origin = _in_words(_origin(path, origins) or where)
        if e["type"] == "extra_forbidden":
            unknown.append(f"{origin}: {explain_unknown(path, e['input'], keys)}")
        else:
            message = e["msg"].removeprefix("Value error, ")
            text = MISTAKES_IN_WORDS.get(e["type"], message[:1].lower() + message[1:])
            mistakes.append(f"{origin}: {path} = {_shorten_value(e['input'])}: {text}")
    if unknown:
        unknown.append("`covey explain` lists the settings")
    return "\n".join([*mistakes, *unknown])


def _with_place(problem: str, origins: Mapping[str, str]) -> str:
    """Return a message that begins with a key, prefixed by the place where the key was set."""
    origin = _origin(problem.partition(" ")[0].rstrip(":"), origins)
    if not origin or problem.startswith(origin):
        return problem
    return f"{_in_words(origin)}: {problem}"


def _in_words(origin: str) -> str:
    """Return the place where a setting was given, in words."""
    return f"on the command line, {origin}" if origin.startswith("--") else origin


def _shorten_value(value: object) -> str:
    text = without_password(repr(value))
    return text if len(text) < 60 else text[:57] + "..."


def _origin(path: str, origins: Mapping[str, str]) -> str:
    """Return where a key was set, or a key within it, or the section around it; '' if nowhere."""
    inside = next((origin for key, origin in origins.items() if key.startswith(f"{path}.")), "")
    if path not in origins and inside:
        return inside
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins[path] if path else ""


def resolved_values(resolved: ResolvedConfig) -> dict[str, object]:
    """Return the whole config as plain values, including defaults and all axes of the algorithm."""
    values = json.loads(resolved.config.model_dump_json(exclude={"rewards", "stages", "algorithm"}))
    values["rewards"] = plain(resolved.config.rewards, resolved.folder)
    values["algorithm"] = describe(resolved.algorithm, resolved.config.rollout.max_tokens)
    if resolved.previous_stage is not None:  # a relative path, so that a pipeline's folder can be moved
        values["model"] = f"../{resolved.previous_stage.name}/final"
    if resolved.pipeline_folder is not None:
        home_prefix = re.compile(f"^{re.escape(str(resolved.pipeline_folder.resolve()))}/")
        values["rewards"] = replace_in_texts(values["rewards"], home_prefix, "../")
        values["data"] = replace_in_texts(values["data"], home_prefix, "../")
    return values


def replace_in_texts(value: object, old: re.Pattern[str], new: str) -> Any:
    """Return plain values with ``old`` replaced by ``new`` in their texts.

    >>> replace_in_texts({"model": "/runs/r/2-sft/final", "n": 1}, re.compile("^/runs/r/"), "../")
    {'model': '../2-sft/final', 'n': 1}
    """
    if isinstance(value, Mapping):
        return {k: replace_in_texts(v, old, new) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replace_in_texts(v, old, new) for v in value]
    return old.sub(new, value) if isinstance(value, str) else value


def resolved_yaml(resolved: ResolvedConfig) -> str:
    """Return ``resolved_values`` as YAML, with comments on where values were set."""
    values = resolved_values(resolved)
    flat = dict(flatten(values))
    comments = (f"# {key}: {origin}\n" for key, origin in resolved.origins.items() if key in flat)
    return sealed_yaml(values, "".join(comments))


def sealed_yaml(values: Mapping[str, object], comments: str = "") -> str:
    """Return values as YAML below comments; the last line has the sha256 of all text before it."""
    text = comments + yaml.safe_dump(dict(values), sort_keys=False, width=1000)
    return sealed_text(text)
