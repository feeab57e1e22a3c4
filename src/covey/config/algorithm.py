"""The `algorithm` block of a config: a preset, any axis of it overridden, contradictions refused.

    algorithm: dapo
    algorithm: {name: grpo, surrogate: {clip_high: 0.28}, kl: null, reduce: token_mean}
    algorithm: {name: grpo, advantage: mine.py:my_advantage}
    algorithm: {name: grpo, dialect: verl-0.9.1}

An axis takes a function's name, a mapping of settings (with `name` to change the function), or
null. Settings are checked against the function's own signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from covey.config.given import recorded_name
from covey.config.unknown import meant, near
from covey.config.usercode import uncalled
from covey.objective.algorithms import PRESETS, Algorithm, Entropy, OldPolicy
from covey.objective.axes import AXES
from covey.objective.bound import AnyBound, Bound, data_names
from covey.objective.data import OFFERED
from covey.objective.dialects import DIALECTS, Framework
from covey.objective.penalties import KL
from covey.objective.value import Critic
from covey_verify.errors import ConfigError
from covey_verify.types import NonNegative
from covey_verify.usercode import load_function, name_of
from covey_verify.web import without_password

OPTIONAL = {"whiten", "correction", "select_tokens", "token_weights", "filter", "kl", "entropy", "critic"}
LISTS = {"correction", "token_weights"}
"""Axes that take several functions; their factors multiply."""
SIMPLE: Mapping[str, Any] = {"old": OldPolicy, "nll": NonNegative}
"""Axes that are a word or a number."""
RECORDS: Mapping[str, type] = {"kl": KL, "entropy": Entropy, "critic": Critic}
FEW_WORDS = 40
"""So many valid words are listed where none is near."""


def build_algorithm(spec: str | Mapping[str, object], folder: Path | None = Path()) -> Algorithm:
    """Algorithm from its config; ``folder`` is where ``module.py:function`` is looked for, and imported.

    Without a folder (None) a user's functions stay names: nothing is imported, and they cannot be called.

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
            f"algorithm.dialect: {dialect.read} has no {name} that was read; "
            f"it has: {', '.join(dialect.algorithms)}"
        )
    algorithm = dialect.algorithm(name) if dialect else PRESETS[name]
    known = {f.name for f in fields(Algorithm)} - {"paper"}
    for axis, value in overrides.items():
        if axis not in known:
            raise ConfigError(f"algorithm.{axis}: no such axis{hint(axis, known | {'name', 'dialect'})}")
        chosen = _axis(axis, getattr(algorithm, axis), value, folder, dialect)
        algorithm = replace(algorithm, **{axis: chosen})
    return algorithm


def _dialect(name: object) -> Framework | None:
    if name is not None and (not isinstance(name, str) or name not in DIALECTS):
        raise ConfigError(f"algorithm.dialect: {name!r} is unknown; known: {', '.join(DIALECTS)}")
    return None if name is None else DIALECTS[str(name)]


def _mapping(where: str, value: object) -> dict[str, object]:
    """A name, or a function, is short for a mapping with nothing but that name."""
    if isinstance(value, str) or (callable(value) and where != "algorithm"):
        return {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {value!r} is neither a name nor a mapping of settings")
    if not (isinstance(name := value.get("name", ""), str) or callable(name)):
        raise ConfigError(f"{where}.name: {name!r} is no name")
    return {str(key): v for key, v in value.items()}


def _axis(axis: str, current: Any, value: object, folder: Path | None, dialect: Framework | None) -> Any:
    if value is None:
        if axis not in OPTIONAL:
            raise ConfigError(f"algorithm.{axis}: cannot be empty")
        return () if axis in LISTS else None
    if axis in SIMPLE:
        return _validated(f"algorithm.{axis}", SIMPLE[axis], value)
    if axis in LISTS:
        items = [value] if isinstance(value, str | Mapping) or callable(value) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"algorithm.{axis}: {value!r} is not a list of {axis.replace('_', ' ')}")
        return tuple(_choice(axis, None, item, folder, dialect) for item in items)
    if axis in RECORDS:
        record = dialect.kl if current is None and dialect and axis == "kl" else current
        return _record(axis, RECORDS[axis], record, value, folder)
    return _choice(axis, current, value, folder, dialect)


def _choice(
    axis: str,
    current: AnyBound | None,
    value: object,
    folder: Path | None,
    dialect: Framework | None = None,
) -> AnyBound:
    settings = _mapping(_place(axis), value)
    name = settings.pop("name", current.name if current else None)
    if not (isinstance(name, str) or callable(name)):
        raise ConfigError(f"{_place(axis)}: needs a name, one of {', '.join(_names(axis))}")
    if current is not None and name == current.name:
        settings = {**current.settings, **settings}
    function = (
        uncalled(name, settings)
        if folder is None and isinstance(name, str) and ":" in name
        else _function(axis, name, folder or Path())
    )
    if dialect and (current is None or name != current.name):
        said = dialect.conventions.get(function)
        settings = {**(said.settings if said and said.function is function else {}), **settings}
    return Bound(function, checked_settings(_place(axis), function, settings))


def _function(axis: str, named: str | Callable[..., object], folder: Path) -> Callable[..., object]:
    known = _names(axis)
    if callable(named) and named in known.values():
        return named
    if isinstance(named, str) and ":" not in named:
        if named not in known:
            raise ConfigError(f"{_place(axis)}: {named!r} is unknown{hint(named, known)}")
        return known[named]
    function = load_function(named, folder) if isinstance(named, str) else _own(named, folder)
    name = named if isinstance(named, str) else name_of(named)
    try:
        names = data_names(function)
    except (TypeError, ValueError):
        raise ConfigError(f"{_place(axis)}: {name} does not say what data it asks for") from None
    for asked in names:
        if asked not in OFFERED[axis]:
            raise ConfigError(
                f"{_place(axis)}: {name} asks for {asked!r}, which is no data of this axis"
                f"{hint(asked, OFFERED[axis])}; settings come after a * in its signature"
            )
    return function


def _own(function: Callable[..., object], folder: Path) -> Callable[..., object]:
    """A function that Python gave, with its name in a config; an object that is called, as a function."""
    named = function if isfunction(function) else partial(function)
    vars(named).update(__name__=name_of(function), __covey_name__=recorded_name(function, folder))
    return named


def _place(axis: str) -> str:
    """Where a config names an axis."""
    return "algorithm.kl.estimator" if axis == "estimator" else f"algorithm.{axis}"


def _names(axis: str) -> dict[str, Callable[..., object]]:
    return {f.__name__: f for f in AXES[axis]}


def _record(axis: str, kind: type, current: Any, value: object, folder: Path | None) -> KL | Entropy | Critic:
    """`kl`, `entropy` and `critic` are records of plain settings; a bare number or name is short for one."""
    short = "trunk" if kind is Critic else "coef"
    settings = {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {short: value}
    record = current or kind()
    known = inspect.signature(kind, eval_str=True).parameters
    for key, given in settings.items():
        if key not in known:
            raise ConfigError(f"algorithm.{axis}.{key}: no such setting{hint(key, known)}")
        if key == "estimator":
            settings[key] = _choice(key, record.estimator, given, folder)
        else:
            settings[key] = _validated(f"algorithm.{axis}.{key}", known[key].annotation, given)
    return replace(record, **settings)


def checked_settings(
    where: str, function: Callable[..., object], settings: Mapping[str, object]
) -> dict[str, object]:
    """Settings validated against a function's keyword-only parameters and their types."""
    try:
        known = parameters_of(function)
    except NameError as error:
        raise ConfigError(f"{where}: the annotations of {name_of(function)} use {error.name!r}") from None
    for key in settings:
        if key not in known:
            raise ConfigError(f"{where}.{key}: {name_of(function)} has no such setting{hint(key, known)}")
    return {key: _validated(f"{where}.{key}", known[key].annotation, v) for key, v in settings.items()}


def parameters_of(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The settings of a function, by name, their types evaluated."""
    signature = inspect.signature(function, eval_str=True, locals={"Tensor": object})
    return {n: p for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}


def _validated(where: str, annotation: Any, value: object) -> object:
    if annotation is inspect.Parameter.empty:
        return value
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: {without_password(repr(value))}: {error.errors()[0]['msg']}") from None


def describe(algorithm: Algorithm, max_tokens: int | None = None) -> dict[str, object]:
    """The algorithm as a config mapping with every axis and setting spelled out.

    With ``max_tokens``, the length that a reduction divides by is the number that it comes to there.
    """
    found = {f.name: _spelled(getattr(algorithm, f.name)) for f in fields(Algorithm) if f.name != "paper"}
    reduce = found["reduce"]
    if isinstance(reduce, dict) and reduce.get("length", ...) is None:
        reduce["length"] = max_tokens
    return found


def own_code(algorithm: Algorithm) -> list[str]:
    """The functions of an algorithm that a user wrote, as a config names them."""
    estimator = [algorithm.kl.estimator] if algorithm.kl else []
    return [bound.name for bound in (*algorithm.functions, *estimator) if ":" in bound.name]


def departures(algorithm: Algorithm, name: str) -> str:
    """What of an algorithm is not as in the preset of that name, in a line.

    >>> departures(build_algorithm({"name": "grpo", "surrogate": {"clip_high": 0.3}, "kl": None}), "grpo")
    'surrogate: clip_high 0.3; kl: none'
    """
    usual, found = describe(PRESETS[name]), []
    for axis, value in describe(algorithm).items():
        before = usual[axis]
        if isinstance(value, dict) and isinstance(before, dict):
            other = {k: v for k, v in value.items() if before.get(k, ...) != v}
            plain = {k: v["name"] if isinstance(v, dict) else v for k, v in other.items()}
            told = [str(v) if k == "name" else f"{k} {v}" for k, v in plain.items()]
            found += [f"{axis}: {', '.join(told)}"] if told else []
        elif value != before:
            found.append(f"{axis}: {value or 'none'}")
    return "; ".join(found)


def _spelled(value: object) -> object:
    if isinstance(value, Bound):
        return {"name": value.name, **value.all_settings}
    if isinstance(value, tuple):
        return [_spelled(v) for v in value]
    if isinstance(value, KL | Entropy | Critic):
        return {f.name: _spelled(getattr(value, f.name)) for f in fields(value)}
    return value


def algorithm_settings() -> Iterator[tuple[str, str, inspect.Parameter]]:
    """(dotted key, function or record it belongs to, parameter) of all settings below `algorithm`."""
    for axis, functions in AXES.items():
        place = _place(axis)
        for function in functions:
            for parameter in parameters_of(function).values():
                yield f"{place}.{parameter.name}", function.__name__, parameter
    for axis, record in RECORDS.items():
        for parameter in inspect.signature(record, eval_str=True).parameters.values():
            yield f"algorithm.{axis}.{parameter.name}", axis, parameter


def names_on(axis: str) -> list[str]:
    """What `algorithm.<axis>` may name."""
    words = {"name": PRESETS, "dialect": DIALECTS, **{axis: _names(axis) for axis in AXES}}
    return list(words.get(axis, ()))


def algorithm_keys() -> list[str]:
    """All dotted keys below `algorithm`."""
    axes = [f"algorithm.{f.name}" for f in fields(Algorithm) if f.name != "paper"]
    return list(
        dict.fromkeys(
            ["algorithm.name", "algorithm.dialect", *axes, *(key for key, _, _ in algorithm_settings())]
        )
    )


def hint(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?', or the valid words where they are few."""
    words = sorted(map(str, known))
    if likely := near(word, words, 0.6):
        return meant(likely)
    return f"; known: {', '.join(words)}" if len(words) <= FEW_WORDS else ""
