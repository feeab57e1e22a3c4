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
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from covey.config.usercode import load_function
from covey.objective.algorithms import AXES, PRESETS, Algorithm, Entropy, data_of
from covey.objective.choice import Choice, data_names
from covey.objective.penalties import KL
from covey.types import ConfigError

OPTIONAL = {"whiten", "weight", "mark", "multipliers", "filter", "kl", "entropy"}
RECORDS: Mapping[str, type] = {"kl": KL, "entropy": Entropy}
NEEDS_SIBLINGS = {f.__name__ for f in AXES["advantage"]}
NEEDS_SIBLINGS -= {"reward", "greedy_baseline", "process_zscore", "gae"}


def build_algorithm(spec: str | Mapping[str, Any], folder: Path = Path()) -> Algorithm:
    """Algorithm from its config; ``folder`` is where ``module.py:function`` is looked for.

    Raises ConfigError naming the axis, the value and the nearest valid one.

    >>> build_algorithm({"name": "grpo", "surrogate": {"clip_high": 0.3}}).surrogate.settings
    {'clip_low': 0.2, 'clip_high': 0.3}
    """
    overrides = _mapping("algorithm", spec)
    name = overrides.pop("name", "dapo")
    if name not in PRESETS:
        raise ConfigError(f"algorithm.name: {name!r} is unknown{hint(name, PRESETS)}")
    algorithm = PRESETS[name]
    known = {f.name for f in fields(Algorithm)} - {"paper"}
    for axis, value in overrides.items():
        if axis not in known:
            raise ConfigError(f"algorithm.{axis}: no such axis{hint(axis, known)}")
        algorithm = replace(algorithm, **{axis: _axis(axis, getattr(algorithm, axis), value, folder)})
    return algorithm


def _mapping(where: str, value: Any) -> dict[str, Any]:
    """A name is short for a mapping with nothing but that name."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {value!r} is neither a name nor a mapping of settings")
    if not isinstance(value.get("name", ""), str):
        raise ConfigError(f"{where}.name: {value['name']!r} is no name")
    return {str(key): v for key, v in value.items()}


def _axis(axis: str, current: Any, value: Any, folder: Path) -> Any:
    if value is None:
        if axis not in OPTIONAL:
            raise ConfigError(f"algorithm.{axis}: cannot be empty")
        return () if axis == "multipliers" else None
    if axis == "old":
        known = inspect.signature(Algorithm, eval_str=True).parameters
        return _validated("algorithm.old", known["old"], value)
    if axis == "multipliers":
        items = [value] if isinstance(value, str | Mapping) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"algorithm.multipliers: {value!r} is not a list of multipliers")
        return tuple(_choice(axis, None, item, folder) for item in items)
    if axis in RECORDS:
        return _record(axis, RECORDS[axis], current, value, folder)
    return _choice(axis, current, value, folder)


def _choice(axis: str, current: Choice | None, value: Any, folder: Path) -> Choice:
    settings = _mapping(f"algorithm.{axis}", value)
    name = settings.pop("name", current.name if current else None)
    if name is None:
        raise ConfigError(f"algorithm.{axis}: needs a name, one of {', '.join(_names(axis))}")
    if current is not None and name == current.name:
        settings = {**current.settings, **settings}
    function = _function(axis, name, folder)
    return Choice(function, _checked(f"algorithm.{axis}", function, settings))


def _function(axis: str, name: str, folder: Path) -> Callable[..., Any]:
    if ":" in name:
        function = load_function(name, folder)
        offered = data_of(axis)
        for asked in data_names(function):
            if asked not in offered:
                raise ConfigError(
                    f"algorithm.{axis}: {name} asks for {asked!r}, which is no data of this axis"
                    f"{hint(asked, offered)}; settings stand after a * in its signature"
                )
        return function
    known = _names(axis)
    if name not in known:
        raise ConfigError(f"algorithm.{axis}: {name!r} is unknown{hint(name, known)}")
    return known[name]


def _names(axis: str) -> dict[str, Callable[..., Any]]:
    return {f.__name__: f for f in AXES[axis]}


def _record(axis: str, kind: type, current: Any, value: Any, folder: Path) -> Any:
    """`kl` and `entropy` are records of plain settings; a bare number is their coefficient."""
    settings = {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {"coef": value}
    record = current or kind()
    known = inspect.signature(kind, eval_str=True).parameters
    for key, given in settings.items():
        if key not in known:
            raise ConfigError(f"algorithm.{axis}.{key}: no such setting{hint(key, known)}")
        if key == "estimator":
            settings[key] = _choice(key, record.estimator, given, folder)
        else:
            settings[key] = _validated(f"algorithm.{axis}.{key}", known[key], given)
    return replace(record, **settings)


def _checked(where: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings validated against a function's keyword-only parameters and their types."""
    try:
        signature = inspect.signature(function, eval_str=True, locals={"Tensor": object})
    except NameError as error:
        raise ConfigError(f"{where}: the annotations of {function.__name__} use {error.name!r}") from None
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
        return {"name": value.name, **value.all_settings}
    if isinstance(value, tuple):
        return [_spelled(v) for v in value]
    if isinstance(value, KL | Entropy):
        return {f.name: _spelled(getattr(value, f.name)) for f in fields(value)}
    return value


def contradictions(algorithm: Algorithm, group_size: int, updates: int) -> list[str]:
    """Settings that cannot work together, each with the reason and the remedy.

    ``updates`` is the number of optimizer steps per rollout batch.
    """
    rules = (_of_groups(algorithm, group_size), _of_ratio(algorithm, updates), _of_kl(algorithm))
    return [message for rule in (*rules, _of_bounds(algorithm), _of_tokens(algorithm)) for message in rule]


def _of_groups(algorithm: Algorithm, group_size: int) -> Iterator[str]:
    advantage = algorithm.advantage.name
    if group_size == 1 and advantage in NEEDS_SIBLINGS:
        yield (
            f"rollout.group_size 1: {advantage} compares siblings, so every advantage would be 0; use 2 or "
            "more (8 is usual), or algorithm reinforce or remax"
        )
    if group_size == 1 and algorithm.filter is not None and algorithm.filter.name == "informative":
        yield "rollout.group_size 1: a single completion is never informative; use filter: null"
    if "values" in algorithm.needs:
        yield f"algorithm.advantage {advantage} needs a critic's values, which covey does not train yet"


def _of_ratio(algorithm: Algorithm, updates: int) -> Iterator[str]:
    ratio, surrogate = algorithm.ratio.name, algorithm.surrogate
    if updates > 1 and ratio == "on_policy":
        yield (
            f"{updates} updates per batch leave the policy that sampled, but algorithm.ratio on_policy does "
            "not correct for it: use ratio token, or one update"
        )
    if ratio == "on_policy" and surrogate.name in {"clip", "cispo", "sapo", "vespo"}:
        yield (
            f"algorithm.surrogate {surrogate.name} has nothing to bound: ratio on_policy is always 1; use "
            "surrogate vanilla, or ratio token"
        )
    if ratio != "token" and "ratio" not in surrogate.needs:
        yield (
            f"algorithm.ratio {ratio} has no effect: surrogate {surrogate.name} takes each token's own "
            "ratio; use ratio token"
        )
    if algorithm.old == "sampler":
        weight = algorithm.weight
        if weight is not None and "log_ratio" not in weight.needs:
            yield (
                f"algorithm.weight {weight.name} has nothing to correct: with old sampler the ratio itself "
                "is against the sampler; use weight: null, or old trainer"
            )
        if missing := algorithm.needs & {"old_entropy", "old_collision"}:
            yield (
                f"algorithm.old sampler: {min(missing)} is only known when log-probs are recomputed; use old "
                "trainer"
            )


def _of_kl(algorithm: Algorithm) -> Iterator[str]:
    kl, entropy = algorithm.kl, algorithm.entropy
    if kl is not None:
        exact = "full_kl" in kl.estimator.needs
        if kl.coef == 0:
            yield "algorithm.kl.coef 0 keeps a reference for nothing, and no target raises it; use kl: null"
        if kl.refresh_mix < 1 and kl.refresh_every is None:
            yield "algorithm.kl.refresh_mix has nothing to mix: set kl.refresh_every, or leave it at 1"
        if kl.refresh_every is not None and kl.refresh_mix == 0:
            yield "algorithm.kl.refresh_mix 0 never moves the reference; use refresh_every: null"
        if kl.place == "reward" and exact:
            yield "algorithm.kl.estimator full is known in the loss only; use place loss, or estimator k1"
        if kl.place == "reward" and kl.gradient != "formula":
            yield "algorithm.kl.gradient has no effect in the reward, which carries none; use place loss"
        if exact and (kl.level != "token" or kl.gradient != "formula"):
            yield "algorithm.kl.estimator full is exact by token: leave level token and gradient formula"
        if exact and kl.target is not None:
            yield "algorithm.kl.target steers by sampled log-ratios, which estimator full does not need"
    if entropy is not None and entropy.coef == 0 and entropy.target is None:
        yield "algorithm.entropy.coef 0 weighs nothing; use entropy: null, or set a target"


def _of_bounds(algorithm: Algorithm) -> Iterator[str]:
    surrogate = algorithm.surrogate.all_settings
    if surrogate.get("cap", 1) < 1:
        yield (
            "algorithm.surrogate.cap below 1 caps every on-policy weight; it bounds the ratio itself: use "
            "1 + eps_high, for example 5"
        )
    if surrogate.get("floor", 0) > 1:
        yield "algorithm.surrogate.floor above 1 raises every on-policy weight; use 1 - eps_low, or 0"
    if (surrogate.get("dual_clip") or math.inf) <= 1 + surrogate.get("clip_high", 0):
        yield "algorithm.surrogate.dual_clip must lie above 1 + clip_high"
    for choice in algorithm.choices:
        low, high = (choice.all_settings.get(bound) for bound in ("low", "high"))
        if low is not None and high is not None and low >= high:
            yield f"{choice.name}: low {low:g} must lie below high {high:g}, or nothing is between them"


def _of_tokens(algorithm: Algorithm) -> Iterator[str]:
    if "marked" in algorithm.needs and algorithm.mark is None:
        yield "algorithm.mark is empty but marked tokens are used: name a mark, such as top_entropy"
    if algorithm.mark is not None and "marked" not in algorithm.needs:
        yield "algorithm.mark selects tokens that nothing uses: add a multiplier or remove it"


def hint(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' or the list of valid words."""
    words = sorted(map(str, known))
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(words)}"
