"""The `algorithm` block of a config: a preset, of which any axis may be overridden.

    algorithm: dapo
    algorithm: {name: grpo, surrogate: {clip_high: 0.28}, kl: null, reduce: token_mean}
    algorithm: {name: grpo, advantage: mine.py:my_advantage}
    algorithm: {name: grpo, dialect: verl-0.9.1}

An axis takes a function's name, a mapping of settings (with `name` to change the function) or
null. Settings are checked against the function's own signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from inspect import isfunction
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from covey.config.layers import SHORT_FORM_KEYS
from covey.config.python_objects import recorded_name
from covey.config.rows import SettingRow
from covey.config.unknown import near, suggestion
from covey.config.usercode import placeholder_function
from covey.objective import data
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axes import AXES
from covey.objective.axis_function import AnyAxisFunction, AxisFunction, data_names
from covey.objective.dialects import DIALECTS, Framework
from covey.objective.penalties import KL, Entropy
from covey.objective.setting import Setting
from covey.objective.value import Critic
from covey_verify.errors import ConfigError
from covey_verify.usercode import load_function, name_of
from covey_verify.web import without_password

AXIS_DEFAULTS = {f.name: f.default for f in fields(Algorithm) if f.name != "paper"}
OPTIONAL_AXES = {axis for axis, default in AXIS_DEFAULTS.items() if default in (None, ())}
LIST_AXES = {axis for axis, default in AXIS_DEFAULTS.items() if default == ()}
"""Axes that take several functions; their factors multiply."""
RECORD_AXES: Mapping[str, type] = {"kl": KL, "entropy": Entropy, "critic": Critic}
PLAIN_AXES = set(AXIS_DEFAULTS) - set(AXES) - set(RECORD_AXES)
"""Axes whose value is a word or a number."""
EXTRA_KEYS: Mapping[str, Setting] = {
    "name": Setting("The preset that the rest starts from; `covey algorithms` lists them."),
    "dialect": Setting("The framework whose eps, counts, clips, KL and means the preset takes."),
}
"""Keys of the `algorithm` block that are no axes."""
NEVER_LOADED = {"Tensor": object}
"""Names in annotations of the objective that are not available here, because a config does not load torch."""
MAX_LISTED_WORDS = 40
"""Largest number of valid words that an error lists if none is similar."""


def build_algorithm(spec: str | Mapping[str, object], folder: Path | None = Path()) -> Algorithm:
    """Build an algorithm from its config; ``module.py:function`` is imported relative to ``folder``.

    If ``folder`` is None, a user's functions stay names: nothing is imported, and they cannot be called.

    Raises ConfigError naming the axis, the value and the nearest valid one.

    >>> build_algorithm({"name": "grpo", "surrogate": {"clip_high": 0.3}}).surrogate.settings
    {'clip_low': 0.2, 'clip_high': 0.3}
    """
    overrides = _mapping("algorithm", spec)
    dialect = _dialect(overrides.pop("dialect", None))
    name = str(overrides.pop("name", "grpo" if dialect else "dapo"))
    if name not in PRESETS:
        raise ConfigError(f"algorithm.name: {name!r} is unknown{hint(name, PRESETS)}")
    if dialect and name not in dialect.algorithms:
        raise ConfigError(
            f"algorithm.dialect: {dialect.read} has no algorithm {name}; it has "
            f"{', '.join(dialect.algorithms)}"
        )
    # Axes that the config does not name keep the preset's, or the dialect's, values.
    algorithm = dialect.algorithm(name) if dialect else PRESETS[name]
    for axis, value in overrides.items():
        if axis not in AXIS_DEFAULTS:
            keys = {*AXIS_DEFAULTS, *EXTRA_KEYS}
            raise ConfigError(f"algorithm.{axis}: there is no such axis{hint(axis, keys)}")
        chosen = _axis(axis, getattr(algorithm, axis), value, folder, dialect)
        algorithm = replace(algorithm, **{axis: chosen})
    return algorithm


def _dialect(name: object) -> Framework | None:
    if name is not None and (not isinstance(name, str) or name not in DIALECTS):
        raise ConfigError(f"algorithm.dialect: {name!r} is unknown; known: {', '.join(DIALECTS)}")
    return None if name is None else DIALECTS[str(name)]


def _mapping(where: str, value: object) -> dict[str, object]:
    """Return the mapping of an axis; a name or a function is short for a mapping with only that name."""
    if isinstance(value, str) or (callable(value) and where != "algorithm"):
        return {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {value!r} must be a name or a mapping of settings")
    name = value.get("name", "")
    if not (isinstance(name, str) or callable(name)):
        raise ConfigError(f"{where}.name: {name!r} is not a name")
    return {str(key): v for key, v in value.items()}


def _axis(axis: str, current: Any, value: object, folder: Path | None, dialect: Framework | None) -> Any:
    if value is None:
        if axis not in OPTIONAL_AXES:
            raise ConfigError(f"algorithm.{axis}: this axis needs a function, so it cannot be null")
        return () if axis in LIST_AXES else None
    if axis in PLAIN_AXES:
        return _validate_value(f"algorithm.{axis}", axis_types()[axis], value)
    if axis in LIST_AXES:
        items = [value] if isinstance(value, str | Mapping) or callable(value) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"algorithm.{axis}: {value!r} is not a list of {axis.replace('_', ' ')}")
        return tuple(_choice(axis, None, item, folder, dialect) for item in items)
    if axis in RECORD_AXES:
        # A config that switches the KL on gets the framework's settings for it.
        record = dialect.kl if current is None and dialect and axis == "kl" else current
        return _record(axis, RECORD_AXES[axis], record, value, folder)
    return _choice(axis, current, value, folder, dialect)


def _choice(
    axis: str,
    current: AnyAxisFunction | None,
    value: object,
    folder: Path | None,
    dialect: Framework | None = None,
) -> AnyAxisFunction:
    key = f"algorithm.{axis}"
    settings = _mapping(key, value)
    name = settings.pop("name", current.name if current else None)
    if not (isinstance(name, str) or callable(name)):
        raise ConfigError(f"{key}: name is missing; give one of {', '.join(_names(axis))}")
    same = current is not None and name == current.name
    # Settings of the same function are overridden one by one; another function begins with its own defaults.
    if current is not None and same:
        settings = {**current.settings, **settings}
    if folder is None and isinstance(name, str) and ":" in name:
        function = placeholder_function(name, settings)
    else:
        function = _function(axis, name, folder or Path())
    if dialect and not same:
        # A framework's defaults for a function that the preset did not have.
        convention = dialect.conventions.get(function)
        if convention and convention.function is function:
            settings = {**convention.settings, **settings}
    return AxisFunction(function, checked_settings(key, function, settings))


def _function(axis: str, spec: str | Callable[..., object], folder: Path) -> Callable[..., object]:
    key = f"algorithm.{axis}"
    functions = _names(axis)
    if callable(spec) and spec in functions.values():
        return spec
    if isinstance(spec, str) and ":" not in spec:
        if spec not in functions:
            raise ConfigError(f"{key}: {spec!r} is unknown{hint(spec, functions)}")
        return functions[spec]
    function = load_function(spec, folder) if isinstance(spec, str) else _with_name(spec, folder)
    name = spec if isinstance(spec, str) else name_of(spec)
    try:
        names = data_names(function)
    except (TypeError, ValueError):
        raise ConfigError(f"{key}: {name} has no signature that names its data") from None
    for needed in names:
        if needed not in data.OFFERED[axis]:
            raise ConfigError(
                f"{key}: {name} asks for {needed!r}, which this axis does not "
                f"offer{hint(needed, data.OFFERED[axis])}; settings come after a * in its signature"
            )
    return function


def _with_name(function: Callable[..., object], folder: Path) -> Callable[..., object]:
    """Return a function given from Python with its name for a record; another callable gets a wrapper."""
    result = function if isfunction(function) else partial(function)
    vars(result).update(__name__=name_of(function), __covey_name__=recorded_name(function, folder))
    return result


def _names(axis: str) -> dict[str, Callable[..., object]]:
    return {f.__name__: f for f in AXES[axis]}


def _record(axis: str, kind: type, current: Any, value: object, folder: Path | None) -> KL | Entropy | Critic:
    """Build `kl`, `entropy` or `critic` (records of plain settings) from a mapping or its short form."""
    settings = (
        {str(k): v for k, v in value.items()}
        if isinstance(value, Mapping)
        else {SHORT_FORM_KEYS[axis]: value}
    )
    record = current or kind()
    parameters = inspect.signature(kind, eval_str=True).parameters
    for key, item in settings.items():
        if key not in parameters:
            raise ConfigError(f"algorithm.{axis}.{key}: there is no such setting{hint(key, parameters)}")
        if key == "estimator":
            settings[key] = _choice("kl.estimator", record.estimator, item, folder)
        else:
            settings[key] = _validate_value(f"algorithm.{axis}.{key}", parameters[key].annotation, item)
    return replace(record, **settings)


def checked_settings(
    where: str, function: Callable[..., object], settings: Mapping[str, object]
) -> dict[str, object]:
    """Return settings validated against a function's keyword-only parameters and their types."""
    try:
        parameters = parameters_of(function)
    except NameError as error:
        raise ConfigError(
            f"{where}: an annotation of {name_of(function)} uses {error.name!r}, which is not defined"
        ) from None
    for key in settings:
        if key not in parameters:
            raise ConfigError(
                f"{where}.{key}: {name_of(function)} has no such setting{hint(key, parameters)}"
            )
    return {
        key: _validate_value(f"{where}.{key}", parameters[key].annotation, v) for key, v in settings.items()
    }


@cache
def axis_types() -> dict[str, object]:
    """Return the annotation of each axis of an algorithm."""
    signature = inspect.signature(Algorithm, eval_str=True, locals={**vars(data), **NEVER_LOADED})
    return {axis: signature.parameters[axis].annotation for axis in AXIS_DEFAULTS}


def parameters_of(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return the settings of a function by name, with evaluated annotations."""
    signature = inspect.signature(function, eval_str=True, locals=NEVER_LOADED)
    return {n: p for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}


def _validate_value(where: str, annotation: Any, value: object) -> object:
    if annotation is inspect.Parameter.empty:
        return value
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: {without_password(repr(value))}: {error.errors()[0]['msg']}") from None


def describe(algorithm: Algorithm, max_tokens: int | None = None) -> dict[str, object]:
    """Return the algorithm as a config mapping with every axis and setting.

    With ``max_tokens``, a reduction's length of None becomes that number.
    """
    axes = {axis: _plain_value(getattr(algorithm, axis)) for axis in AXIS_DEFAULTS}
    reduce = axes["reduce"]
    # `...` tells a reduction without the setting from one whose length is None.
    if isinstance(reduce, dict) and reduce.get("length", ...) is None:
        reduce["length"] = max_tokens
    return axes


def own_code(algorithm: Algorithm) -> list[str]:
    """Return the names that a config gives to a user's own functions of an algorithm."""
    return [part.name for part in algorithm.all_functions if ":" in part.name]


def departures(algorithm: Algorithm, name: str) -> str:
    """Return the differences between an algorithm and the preset of that name, in one line.

    >>> departures(build_algorithm({"name": "grpo", "surrogate": {"clip_high": 0.3}, "kl": None}), "grpo")
    'surrogate: clip_high 0.3; kl: none'
    """
    preset = describe(PRESETS[name])
    differences = []
    for axis, value in describe(algorithm).items():
        before = preset[axis]
        if value == before:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            changed = {k: v for k, v in value.items() if before.get(k, ...) != v}
            plain = {k: v["name"] if isinstance(v, dict) else v for k, v in changed.items()}
            text = ", ".join(str(v) if k == "name" else f"{k} {v}" for k, v in plain.items())
        else:
            text = str(value or "none")
        differences.append(f"{axis}: {text}")
    return "; ".join(differences)


def _plain_value(value: object) -> object:
    if isinstance(value, AxisFunction):
        return {"name": value.name, **value.all_settings}
    if isinstance(value, tuple):
        return [_plain_value(v) for v in value]
    if isinstance(value, KL | Entropy | Critic):
        return {f.name: _plain_value(getattr(value, f.name)) for f in fields(value)}
    return value


@cache
def algorithm_rows() -> tuple[SettingRow, ...]:
    """Return rows for the axes of `algorithm` and for the settings of all functions and records on them."""
    return tuple(
        chain(
            _axis_rows(),
            *(rows_of(f, f"algorithm.{axis}") for axis, functions in AXES.items() for f in functions),
            *(_record_rows(axis, record) for axis, record in RECORD_AXES.items()),
        )
    )


def rows_of(function: Callable[..., object], prefix: str) -> Iterator[SettingRow]:
    """Yield a row for each setting of a function; ``prefix`` is the key around them in a config."""
    for p in parameters_of(function).values():
        yield SettingRow(f"{prefix}.{p.name}", function.__name__, p.default, p.annotation)


def _axis_rows() -> Iterator[SettingRow]:
    words = {"name": PRESETS, "dialect": DIALECTS, **{axis: _names(axis) for axis in AXES}}
    for key, setting in EXTRA_KEYS.items():
        yield SettingRow(f"algorithm.{key}", "", "the preset's", Annotated[str, setting], tuple(words[key]))
    for axis, annotation in axis_types().items():
        yield SettingRow(f"algorithm.{axis}", "", "the preset's", annotation, tuple(words.get(axis, ())))


def _record_rows(axis: str, record: type) -> Iterator[SettingRow]:
    defaults = record()
    for p in inspect.signature(record, eval_str=True).parameters.values():
        value = getattr(defaults, p.name)
        default = value.name if isinstance(value, AxisFunction) else value
        yield SettingRow(f"algorithm.{axis}.{p.name}", axis, default, p.annotation)


def algorithm_keys() -> list[str]:
    """Return all dotted keys below `algorithm`."""
    return list(dict.fromkeys(row.key for row in algorithm_rows()))


def hint(word: str, valid: Iterable[str]) -> str:
    """Return '; did you mean X?', or the valid words if they are few."""
    words = sorted(map(str, valid))
    likely = near(word, words, 0.6)
    if likely:
        return suggestion(likely)
    return f"; known: {', '.join(words)}" if len(words) <= MAX_LISTED_WORDS else ""
