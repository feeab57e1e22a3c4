"""`covey explain SETTING`: what settings do, their defaults and ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from covey.config.algorithm import hint
from covey.config.load import key_paths, settings_of
from covey.config.schema import Config
from covey.types import ConfigError


def settings(prefix: str = "") -> list[dict[str, Any]]:
    """Every setting whose name is ``prefix`` or below it. Raises ConfigError with the nearest name."""
    found = [
        {"setting": path, "default": field.default, "range": _range(field), "effect": field.description}
        for path, field in settings_of(Config)
        if not prefix or f"{path}.".startswith(f"{prefix}.")
    ]
    if not found:
        raise ConfigError(f"{prefix!r} is neither a setting nor a run folder{hint(prefix, key_paths())}")
    return found


def _range(field: FieldInfo) -> str:
    signs: Mapping[str, str] = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [(sign, getattr(m, name, None)) for m in field.metadata for name, sign in signs.items()]
    return " ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


def show(found: list[dict[str, Any]]) -> Iterator[str]:
    """Lines for people."""
    for s in found:
        facts = ", ".join(x for x in (f"default {s['default']}", s["range"]) if x)
        yield f"{s['setting']} ({facts}): {s['effect']}"
