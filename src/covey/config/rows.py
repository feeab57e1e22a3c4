"""The settings of the whole config as rows (key, default, type, description), and facts by key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from covey.config.schema import Config
from covey.config.section import fields_of, section_of
from covey.objective.setting import Setting, setting_of

# Attribute of a bound in a type's metadata -> its sign.
SIGNS: Mapping[str, str] = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class SettingRow(NamedTuple):
    """A setting of the config, of a function of the algorithm, or of a loss."""

    key: str
    """Dotted key, for example ``train.lr``."""
    owner: str
    """The function or record that it belongs to; empty for a setting of the config itself."""
    default: object
    type: object
    """Annotation, with a Setting in its metadata."""
    names: Sequence[str] = ()
    """The functions or presets that it may name."""

    @property
    def setting(self) -> Setting:
        """The description, empty for a setting of a user's function that has none."""
        return setting_of(getattr(self.type, "__metadata__", ()))

    @property
    def values(self) -> str:
        """The words or bounds that it allows.

        >>> from typing import Annotated, Literal
        >>> from covey_verify.types import Fraction
        >>> [SettingRow("", "", 0, kind).values for kind in (Fraction | None, Literal["a", "b"], str)]
        ['>= 0 <= 1', 'one of a, b', '']
        """
        return f"one of {', '.join(self.names)}" if self.names else allowed_values(self.type)


def allowed_values(kind: object) -> str:
    """Return a text of the words or bounds that a type allows."""
    bounds = bounds_of(getattr(kind, "__metadata__", ()))
    if bounds:
        return bounds
    inner = [a for a in get_args(kind) if a is not type(None)]
    if inner and all(isinstance(a, str | int) for a in inner):
        return f"one of {', '.join(map(str, inner))}"
    return allowed_values(inner[0]) if inner and get_origin(kind) not in (tuple, dict) else ""


def bounds_of(metadata: Iterable[object]) -> str:
    """Return the bounds among the metadata of a type, for example `>= 0 < 1`."""
    bounds = [(sign, getattr(m, name, None)) for m in metadata for name, sign in SIGNS.items()]
    return " ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


@cache
def schema_fields() -> Mapping[str, FieldInfo]:
    """Return dotted key -> field of every section and every setting."""
    return dict(fields_of(Config))


@cache
def schema_rows() -> tuple[SettingRow, ...]:
    """Return every setting of the config as a row; ``config/algorithm.py`` has the algorithm's settings."""
    return tuple(
        SettingRow(key, "", field.default, Annotated[field.annotation, *field.metadata])
        for key, field in schema_fields().items()
        if section_of(field) is None
    )


def key_paths() -> list[str]:
    """Return all dotted keys of the config."""
    return [row.key for row in schema_rows()]


def fact_of(key: str, fact: Literal["resume", "read_by"]) -> Any:
    """Return a fact of a setting from its own row, else from the nearest section around it, else None.

    >>> fact_of("train.keep", "resume"), fact_of("data.columns.answer", "resume"), fact_of("seed", "read_by")
    ('safe', 'refused', None)
    """
    fields = schema_fields()
    while key:
        # From the setting outwards: train.keep, then train.
        value = getattr(setting_of(fields[key].metadata), fact) if key in fields else None
        if value is not None:
            return value
        key = key.rpartition(".")[0]
    return None


def flatten(values: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    """Yield nested mappings as (dotted key, value) pairs."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
