"""What every section of the settings is: strict, read once, never changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

MANY = 10_000_000
"""Of problems or tokens: more is a slip of the keyboard."""


def _several(value: object) -> object:
    return (value,) if isinstance(value, str | Path) else value


Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_several)]
"""Texts, of which one may be given alone."""
Paths: TypeAlias = Annotated[tuple[Path, ...], BeforeValidator(_several)]


class Section(BaseModel):
    """Strict: unknown keys are errors; values are read once and never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: object, info: ValidationInfo) -> object:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise ValueError("a number is expected; YAML reads yes, no, on and off as true or false")
        if value == "" and Path in {kind, *get_args(kind)}:
            raise ValueError("a path is expected; the folder at hand is `.`")
        if isinstance(value, str | Path) and "\0" in str(value):
            raise ValueError("no text here may have a NUL byte")
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("this is no text, it has half a surrogate pair") from None
        return value
