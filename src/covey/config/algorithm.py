"""The `algorithm` block of a config: a preset, any axis of it overridden, contradictions refused.

    algorithm: dapo
    algorithm: {name: grpo, surrogate: {clip_high: 0.28}, kl: null, reduce: token_mean}
    algorithm: {name: grpo, advantage: mine.py:my_advantage}

An axis takes a function's name, a mapping of settings (with `name` to change the function), or
null. Settings are checked against the function's own signature.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from covey.config.usercode import load_function
from covey.objective.algorithms import AXES, PRESETS, Algorithm, Entropy
from covey.objective.choice import Choice
from covey.objective.penalties import KL
from covey.types import ConfigError

OPTIONAL = {"whiten", "weight", "mark", "filter", "kl", "entropy"}
RECORDS: Mapping[str, type] = {"kl": KL, "entropy": Entropy}


def build_algorithm(spec: str | Mapping[str, Any], folder: Path = Path()) -> Algorithm:
    """Algorithm from its config; ``folder`` is where ``module.py:function`` is looked for.

    Raises ConfigError naming the axis, the value and the nearest valid one.

    >>> build_algorithm({"name": "grpo", "surrogate": {"clip_high": 0.3}}).surrogate.settings
    {'clip_low': 0.2, 'clip_high': 0.3}
    """
    overrides = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = overrides.pop("name", "dapo")
    if name not in PRESETS:
        raise ConfigError(f"algorithm.name: {name!r} is unknown{hint(str(name), PRESETS)}")
    algorithm = PRESETS[name]
    known = {f.name for f in fields(Algorithm)} - {"paper"}
    for axis, value in overrides.items():
        if axis not in known:
            raise ConfigError(f"algorithm.{axis}: no such axis{hint(axis, known)}")
        algorithm = replace(algorithm, **{axis: _axis(axis, getattr(algorithm, axis), value, folder)})
    return algorithm


def _axis(axis: str, current: Any, value: Any, folder: Path) -> Any:
    if value is None:
        if axis not in OPTIONAL:
            raise ConfigError(f"algorithm.{axis}: cannot be empty")
        return None
    if axis == "old":
        return _validated(
            f"algorithm.{axis}", inspect.signature(Algorithm, eval_str=True).parameters["old"], value
        )
    if axis == "multipliers":
        return tuple(_choice(axis, None, item, folder) for item in value)
    if axis in RECORDS:
        return _record(axis, RECORDS[axis], current, value, folder)
    return _choice(axis, current, value, folder)


def _choice(axis: str, current: Choice | None, value: Any, folder: Path) -> Choice:
    settings = {"name": value} if isinstance(value, str) else dict(value)
    name = settings.pop("name", current.name if current else None)
    if name is None:
        raise ConfigError(f"algorithm.{axis}: needs a name, one of {', '.join(_names(axis))}")
    if current is not None and name == current.name:
        settings = {**current.settings, **settings}
    function = _function(axis, name, folder)
    return Choice(function, _checked(f"algorithm.{axis}", function, settings))


def _function(axis: str, name: str, folder: Path) -> Callable[..., Any]:
    if ":" in name:
        return load_function(name, folder)
    known = _names(axis)
    if name not in known:
        raise ConfigError(f"algorithm.{axis}: {name!r} is unknown{hint(name, known)}")
    return known[name]


def _names(axis: str) -> dict[str, Callable[..., Any]]:
    return {f.__name__: f for f in AXES[axis]}


def _record(axis: str, kind: type, current: Any, value: Any, folder: Path) -> Any:
    """`kl` and `entropy` are records of plain settings; a bare number is their coefficient."""
    settings = dict(value) if isinstance(value, Mapping) else {"coef": value}
    record = current or kind()
    if "estimator" in settings:
        settings["estimator"] = _choice("estimator", record.estimator, settings["estimator"], folder)
    plain = {k: v for k, v in settings.items() if k != "estimator"}
    signature = inspect.signature(kind, eval_str=True)
    unknown = set(plain) - set(signature.parameters)
    if unknown:
        key = min(unknown)
        raise ConfigError(f"algorithm.{axis}.{key}: no such setting{hint(key, signature.parameters)}")
    for key, v in plain.items():
        settings[key] = _validated(f"algorithm.{axis}.{key}", signature.parameters[key], v)
    return replace(record, **settings)


def _checked(where: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings validated against a function's keyword-only parameters and their types."""
    signature = inspect.signature(function, eval_str=True, locals={"Tensor": object})
    known = {n: p for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
    for key in settings:
        if key not in known:
            raise ConfigError(f"{where}.{key}: {function.__name__} has no such setting{hint(key, known)}")
    return {key: _validated(f"{where}.{key}", known[key], value) for key, value in settings.items()}


def _validated(where: str, parameter: inspect.Parameter, value: Any) -> Any:
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return value
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: {value!r}: {error.errors()[0]['msg']}") from None


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """The algorithm as a config mapping with every axis and setting spelled out."""
    return {f.name: _spelled(getattr(algorithm, f.name)) for f in fields(Algorithm) if f.name != "paper"}


def _spelled(value: Any) -> Any:
    if isinstance(value, Choice):
        return {"name": function_name(value.function), **value.all_settings}
    if isinstance(value, tuple):
        return [_spelled(v) for v in value]
    if isinstance(value, KL | Entropy):
        return {f.name: _spelled(getattr(value, f.name)) for f in fields(value)}
    return value


def function_name(function: Callable[..., Any]) -> str:
    """How a config names a function: bare if built in, else the way it was loaded."""
    return getattr(function, "__covey_name__", function.__name__)


def contradictions(algorithm: Algorithm, group_size: int, updates: int) -> list[str]:
    """Settings that cannot work together, each with the reason and the remedy.

    ``updates`` is the number of optimizer steps per rollout batch.
    """
    surrogate = algorithm.surrogate.all_settings
    found = []
    if group_size == 1 and algorithm.advantage.name in NEEDS_SIBLINGS:
        found.append(
            f"rollout.group_size 1: {algorithm.advantage.name} compares siblings, so every advantage would "
            "be 0; use 2 or more (8 is usual), or algorithm reinforce or remax"
        )
    if algorithm.surrogate.name == "cispo" and surrogate["cap"] < 1:
        found.append(
            "algorithm.surrogate.cap below 1 caps every on-policy weight; it bounds the ratio itself: use "
            "1 + eps_high, for example 5"
        )
    if algorithm.surrogate.name == "clip" and (surrogate["dual_clip"] or 1e9) <= 1 + surrogate["clip_high"]:
        found.append("algorithm.surrogate.dual_clip must lie above 1 + clip_high")
    if algorithm.kl is not None and algorithm.kl.coef == 0 and algorithm.kl.target is None:
        found.append("algorithm.kl.coef 0 would keep a reference model for nothing; use kl: null")
    if algorithm.whiten is not None and algorithm.whiten.name == "batch_std" and group_size == 1:
        found.append("algorithm.whiten batch_std has no spread to divide by with rollout.group_size 1")
    if "marked" in algorithm.needs and algorithm.mark is None:
        found.append("algorithm.mark is empty but marked tokens are used: name a mark, such as top_entropy")
    if algorithm.mark is not None and "marked" not in algorithm.needs:
        found.append("algorithm.mark selects tokens that nothing uses: add a multiplier or remove it")
    if updates > 1 and algorithm.ratio.name == "on_policy":
        found.append(
            f"{updates} updates per batch leave the policy that sampled, but algorithm.ratio on_policy does "
            "not correct for it: use ratio token, or one update"
        )
    if "values" in algorithm.needs:
        found.append("this algorithm needs a critic's values, which covey does not train yet")
    return found


NEEDS_SIBLINGS = {
    "group_zscore",
    "group_centered",
    "leave_one_out",
    "length_weighted",
    "mean_normalized",
    "component_zscore",
    "component_leave_one_out",
    "prefix_tree",
}


def hint(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' or the list of valid words."""
    words = sorted(map(str, known))
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(words)}"
