"""A choice on one axis: a pure function with its settings bound, fed its data by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@cache
def data_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters: the data a function of the objective asks for."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


@cache
def setting_defaults(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Keyword-only parameters and their defaults: the settings of a function of the objective."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


@dataclass(frozen=True, eq=False)
class Choice:
    """A function of the objective and its settings.

    Positional parameters are data and are filled by name from the object it is called with;
    keyword-only parameters are settings. So a user's own function joins an algorithm as it is.
    Choices are equal if they compute the same: a default spelled out makes no difference.

    >>> from types import SimpleNamespace
    >>> def scaled(rewards, *, factor=2.0): return [r * factor for r in rewards]
    >>> use(scaled, factor=3.0)(SimpleNamespace(rewards=[1, 2]))
    [3.0, 6.0]
    """

    function: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.settings) - set(setting_defaults(self.function))
        if unknown:
            raise TypeError(f"{self.name} has no setting {sorted(unknown)}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Choice):
            return NotImplemented
        return (self.function, self.all_settings) == (other.function, other.all_settings)

    def __hash__(self) -> int:
        return hash(self.function)

    def __call__(self, data: object) -> Any:
        """Call the function with the data it names and the bound settings."""
        arguments = {name: getattr(data, name) for name in self.needs}
        return self.function(**arguments, **self.settings)

    @property
    def name(self) -> str:
        """How a config writes the function: its name if it is built in, else how it was loaded."""
        return getattr(self.function, "__covey_name__", self.function.__name__)

    @property
    def own(self) -> bool:
        """Whether a user wrote the function."""
        return not self.function.__module__.startswith("covey.")

    @property
    def needs(self) -> tuple[str, ...]:
        """What data it asks for: this decides whether a reference, an extra pass, ... is made."""
        return data_names(self.function)

    @property
    def all_settings(self) -> dict[str, Any]:
        """Defaults overlaid by the bound settings."""
        return {**setting_defaults(self.function), **self.settings}


def use(function: Callable[..., Any], **settings: Any) -> Choice:
    """Bind settings to a function of the objective."""
    return Choice(function, settings)
