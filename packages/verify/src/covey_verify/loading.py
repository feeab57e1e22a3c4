"""The loader of reward functions by name, built in or `mine.py:function`, with checked settings."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from covey_verify.contract import RewardFunction
from covey_verify.errors import ConfigError
from covey_verify.rewards import BUILT_IN
from covey_verify.sandbox.base import SandboxBackend
from covey_verify.sandbox.choice import choose
from covey_verify.types import Check
from covey_verify.usercode import load_function, name_of

# Type of an annotated bound -> (its attribute, its comparison).
BOUNDS: Mapping[type, tuple[str, Callable[[Any, Any], bool]]] = {
    Ge: ("ge", lambda value, bound: value >= bound),
    Gt: ("gt", lambda value, bound: value > bound),
    Le: ("le", lambda value, bound: value <= bound),
    Lt: ("lt", lambda value, bound: value < bound),
}


def load(
    named: str | Callable[..., object],
    settings: Mapping[str, object] | None = None,
    folder: Path | None = None,
    sandbox: Callable[[], SandboxBackend] = lambda: choose().sandbox,
) -> RewardFunction:
    """Return a reward function with its settings.

    ``named`` is a function, the name of a built-in one, or `file.py:function` relative to ``folder``.
    ``sandbox`` is called if the function runs model code. Raises SandboxUnavailable, or ConfigError naming
    the setting and the nearest known one.
    """
    function = _function(named, folder or Path())
    unchecked = RewardFunction(name_of(function), function, dict(settings or {}))
    parameters = set(unchecked.parameters)
    if unchecked.options.isolate == "sandbox":
        raise ConfigError(
            f'{unchecked.name}: @reward(isolate="sandbox") holds in `covey score` and `covey stress`; '
            "here it would be called with your rights"
        )
    texts_or_ids = {"completion", "completions", "solution_str", "completion_ids", "sampled_ids"}
    if not unchecked.takes_all and not texts_or_ids & parameters:
        raise ConfigError(f"{unchecked.name} takes neither `completions` (of a group) nor `completion` (one)")
    values = _check_settings(unchecked, settings or {})
    if "sandbox" in parameters and "sandbox" not in values:
        values["sandbox"] = sandbox()
    return RewardFunction(unchecked.name, function, values)


def _function(named: str | Callable[..., object], folder: Path) -> Callable[..., object]:
    if callable(named):
        return named
    if ":" in named:
        return load_function(named, folder)
    if named not in BUILT_IN:
        raise ConfigError(
            f"there is no reward {named!r}{_near(named, list(BUILT_IN))}; name your own as file.py:function"
        )
    return BUILT_IN[named]


def _near(word: str, names: Sequence[str]) -> str:
    likely = get_close_matches(word, names, n=1)
    return f"; did you mean {likely[0]}?" if likely else f"; known: {', '.join(names)}"


def _check_settings(function: RewardFunction, settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings checked by name and, for a built-in function, by the types of its parameters."""
    names = [n for n, p in function.parameters.items() if p.kind is p.KEYWORD_ONLY or not function.ours]
    for name in settings:
        if name not in names:
            raise ConfigError(f"{function.name} has no setting {name!r}{_near(name, names)}")
    if not function.ours:
        return dict(settings)
    hints = inspect.signature(function.function, eval_str=True).parameters
    values = dict(settings)
    for name, value in settings.items():
        if name != "sandbox":
            values[name] = convert_setting(f"{function.name}.{name}", hints[name].annotation, value)
    return values


def convert_setting(where: str, annotation: Any, value: Any) -> Any:
    """Return a value converted to a type. Raises ConfigError naming the place, the value and the type.

    >>> from covey_verify.types import Fraction
    >>> convert_setting("tolerance", Fraction, 1), convert_setting("rule", Literal["boxed", "whole"], "whole")
    (1.0, 'whole')
    """
    if get_origin(annotation) is Annotated:
        plain, *checks = get_args(annotation)
        value = convert_setting(where, plain, value)
        for check in checks:
            value = _check_bounds(where, check, value)
        return value
    if get_origin(annotation) in (Union, types.UnionType):
        # The first member of the union that accepts the value.
        for kind in get_args(annotation):
            try:
                return convert_setting(where, kind, value)
            except ConfigError:
                continue
        raise _refusal(where, value, " or ".join(map(_in_words, get_args(annotation))))
    if get_origin(annotation) is Literal:
        if value not in get_args(annotation):
            raise _refusal(where, value, f"one of {', '.join(map(str, get_args(annotation)))}")
        return value
    if is_dataclass(annotation) and isinstance(value, Mapping):
        return _record(where, annotation, value)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kind = get_origin(annotation) or annotation
    if kind in (Any, object, inspect.Parameter.empty):
        return value
    # In Python a bool is an int and a str is a Sequence; neither is meant here.
    bool_as_int = isinstance(value, bool) and kind is not bool
    text_as_list = isinstance(value, str) and kind is Sequence
    if bool_as_int or text_as_list or not isinstance(value, kind):
        raise _refusal(where, value, _in_words(annotation))
    return value


def _check_bounds(where: str, check: object, value: object) -> Any:
    """Return a value if a bound or a check accepts it. Raises ConfigError."""
    if isinstance(check, Check):
        try:
            return check.accepted(value)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    if type(check) in BOUNDS:
        name, holds = BOUNDS[type(check)]
        if not holds(value, getattr(check, name)):
            sign = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}[name]
            raise _refusal(where, value, f"a number {sign} {getattr(check, name):g}")
    return value


def _record(where: str, kind: Any, value: Mapping[str, object]) -> Any:
    """Return a dataclass of settings from a mapping."""
    names = [f.name for f in fields(kind) if f.init]
    hints = get_type_hints(kind, include_extras=True)
    for name in value:
        if name not in names:
            raise ConfigError(f"{where} has no setting {name!r}{_near(name, names)}")
    return kind(**{name: convert_setting(f"{where}.{name}", hints[name], v) for name, v in value.items()})


def _in_words(kind: Any) -> str:
    words = {
        str: "a text",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        type(None): "null",
    }
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return words.get(plain, getattr(get_origin(plain) or plain, "__name__", str(plain)))


def _refusal(where: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{where}: {value!r} is not {expected}")
