"""The base of a section of settings, which is strict and frozen, and the declaration of a setting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic.fields import FieldInfo

from covey.objective.setting import Setting

MAX_COUNT = 10_000_000
"""Largest number of problems or tokens: more is a typing error."""

# Ranges of settings. Their upper ends catch typing errors before anything allocates that much.
Few = Annotated[int, Ge(1), Le(1_000)]
FewOrZero = Annotated[int, Ge(0), Le(1_000)]
Size = Annotated[int, Ge(1), Le(65_536)]
SizeOrZero = Annotated[int, Ge(0), Le(65_536)]
Many = Annotated[int, Ge(1), Le(MAX_COUNT)]
ManyOrZero = Annotated[int, Ge(0), Le(MAX_COUNT)]
Steps = Annotated[int, Ge(1), Le(10**9)]
StepsOrZero = Annotated[int, Ge(0), Le(10**9)]
Duration = Annotated[float, Gt(0), Le(10**6)]
DurationOrZero = Annotated[float, Ge(0), Le(10**6)]
BelowOne = Annotated[float, Ge(0), Lt(1)]


def _read_schedule(value: object, read: ValidatorFunctionWrapHandler) -> object:
    try:
        return read(value)
    except ValidationError:
        raise ValueError(
            "must be constant, linear or cosine; of the last two, one may end at a fraction of lr below 1, "
            "as {cosine: 0.1}"
        ) from None


LearningRateSchedule: TypeAlias = Annotated[
    Literal["constant", "linear", "cosine"]
    | Annotated[dict[Literal["linear", "cosine"], BelowOne], Len(1, 1)],
    WrapValidator(_read_schedule),
]
"""A course of the learning rate, which may end at a fraction of it."""


def _several(value: object) -> object:
    return (value,) if isinstance(value, str | Path) else value


Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_several)]
"""Several texts; a single one may be given without a list."""
Paths: TypeAlias = Annotated[tuple[Path, ...], BeforeValidator(_several)]


class Section(BaseModel):
    """A strict section: unknown keys are errors, and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = {annotation, *get_args(annotation)}
        if get_origin(annotation) is not tuple:
            # A member of a union may be annotated: Annotated[float, ...] | None.
            kinds = {getattr(kind, "__origin__", kind) for kind in kinds}
        if isinstance(value, bool) and {int, float} & kinds:
            raise ValueError("write a number; YAML reads yes, no, on and off as true or false")
        if value == "" and Path in kinds:
            raise ValueError("write a path; `.` is the current folder")
        if isinstance(value, str | Path) and "\0" in str(value):
            raise ValueError("text must not contain a NUL byte")
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("the text contains half of a surrogate pair") from None
        return value


def setting(default: object, effect: str = "", /, **facts: Any) -> Any:
    """Return a field of a section: its default, effect, bounds (``ge``, ``le``, ...) and facts of a Setting.

    A section's facts hold for each of its settings that has no fact of its own.
    """
    # Facts of a Setting are ours; everything else (bounds) is pydantic's.
    of_setting = {name: facts.pop(name) for name in Setting.__dataclass_fields__ if name in facts}
    field: FieldInfo = Field(default, description=effect, **facts)
    field.metadata.append(Setting(effect, **of_setting))
    return field


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, pydantic's field) of every setting in a section and in the sections below it.

    A section comes before its settings.
    """
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        below = section_of(field)
        if below is not None:
            yield from fields_of(below, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the model of a field that is a section; None for a setting."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)
