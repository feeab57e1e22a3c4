"""AxisFunction: a function of the objective with its settings; it receives its data by parameter name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from covey.errors import first_line, out_of_memory
from covey_verify.errors import CoveyError, describe_error

Data_contra = TypeVar("Data_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
Function = TypeVar("Function", bound=Callable[..., object])
Trait: TypeAlias = Literal[
    "compares_siblings", "divides_by_std", "proportional", "bounds_ratio", "acts_at_ratio_one"
]
"""Facts about a function of the objective that its signature does not say.

- ``compares_siblings``: an advantage that is 0 if a group has one completion.
- ``divides_by_std``: an advantage divided by the standard deviation of the rewards that it compares.
- ``proportional``: a surrogate whose loss has no gradient at a completion without an advantage.
- ``bounds_ratio``: a surrogate that bounds the effect of the ratio that it is given.
- ``acts_at_ratio_one``: a surrogate whose settings have an effect even where every ratio is 1.

``tests/objective/test_traits.py`` derives each from values, so a function cannot lack one.
"""


def declare(*traits: Trait) -> Callable[[Function], Function]:
    """Declare the traits of a function of the objective.

    >>> @declare("proportional")
    ... def unclipped(ratio, advantages): return -ratio * advantages
    >>> has_trait(unclipped, "proportional"), has_trait(unclipped, "bounds_ratio")
    (True, False)
    """

    def with_traits(function: Function) -> Function:
        vars(function)["__covey_traits__"] = frozenset(traits)
        return function

    return with_traits


def has_trait(function: Callable[..., object], trait: Trait) -> bool:
    """Return whether a function declares a trait; a user's function usually declares none."""
    return trait in getattr(function, "__covey_traits__", ())


# Cached: called again for every micro-batch.
@cache
def data_names(function: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of the positional parameters: the data that a function of the objective asks for."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


@cache
def setting_defaults(function: Callable[..., object]) -> Mapping[str, Any]:
    """Return the keyword-only parameters and their defaults: the settings of a function of the objective."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


class UserFunctionError(CoveyError):
    """A user's function of the objective raised an exception."""


@dataclass(frozen=True, eq=False)
class AxisFunction(Generic[Data_contra, Out_co]):
    """A function and its settings; calling it with a record of ``objective.data`` gives a result.

    Positional parameters are data, filled by name from that record; keyword-only parameters are
    settings. So a user's plain function fits an axis as it is. Two are equal if their functions and settings
    are; a default that is written out makes no difference.

    >>> from fractions import Fraction
    >>> def scaled(numerator, *, factor=2): return numerator * factor
    >>> bind(scaled, factor=3)(Fraction(2, 7))
    6
    """

    function: Callable[..., Out_co]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.settings) - set(setting_defaults(self.function))
        if unknown:
            raise TypeError(f"{self.name} has no setting {sorted(unknown)}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AxisFunction):
            return NotImplemented
        return (self.function, self.all_settings) == (other.function, other.all_settings)

    def __hash__(self) -> int:
        # Settings may be unhashable, and objects that are equal have the same function.
        return hash(self.function)

    def __call__(self, data: Data_contra) -> Out_co:
        """Call the function with the data that it names and the bound settings.

        Raises UserFunctionError, with the line in the user's file, for whatever a user's function raises.
        """
        arguments = {name: getattr(data, name) for name in self.needs}
        try:
            return self.function(**arguments, **self.settings)
        except Exception as error:
            # Memory that runs out is no mistake of the function: the learner halves its micro-batches.
            if not self.written_by_user or isinstance(error, CoveyError) or out_of_memory(error):
                raise
            raise UserFunctionError(
                f"{self.name}, your function, raises {describe_error(error, _file(self.function))}"
            ) from error

    @property
    def name(self) -> str:
        """The function's name in a config: its own if it is built in, else the path that it was loaded by."""
        return getattr(self.function, "__covey_name__", self.function.__name__)

    @property
    def written_by_user(self) -> bool:
        """Whether a user wrote the function."""
        return not self.function.__module__.startswith("covey.")

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the data it asks for; they decide whether a reference is kept, an extra pass made, ..."""
        return data_names(self.function)

    @property
    def all_settings(self) -> dict[str, Any]:
        """The defaults, overridden by the bound settings."""
        return {**setting_defaults(self.function), **self.settings}


def bind(function: Callable[..., Out_co], **settings: object) -> AxisFunction[object, Out_co]:
    """Bind settings to a function of the objective."""
    return AxisFunction(function, settings)


def values_of(
    axis: str, part: AxisFunction[Data_contra, Out_co], data: Data_contra, *shapes: Sequence[int]
) -> Out_co:
    """Call an axis's function. Raises CoveyError if a user's function returns no tensor of these ``shapes``.

    Torch would expand a tensor of another shape, such as a mean over tokens, to every token.
    """
    result = part(data)
    shape = getattr(result, "shape", None)
    if part.written_by_user and (shape is None or tuple(shape) not in map(tuple, shapes)):
        returned = type(result).__name__ if shape is None else f"the shape {tuple(shape)}"
        expected = " or ".join(str(tuple(s)) for s in shapes)
        raise CoveyError(f"algorithm.{axis} {part.name} returns {returned} where {expected} is expected")
    return result


@contextmanager
def differentiating(of_user: Sequence[str]) -> Iterator[None]:
    """Name the user's functions in a loss if its gradient cannot be computed."""
    try:
        yield
    except Exception as error:
        if not of_user or out_of_memory(error):
            raise
        raise CoveyError(
            f"the loss has no gradient: {type(error).__name__}: {first_line(error)}. It is computed by "
            f"{', '.join(of_user)}, your own: what it returns must depend on logprobs or ratio, and it may "
            "not change its arguments in place"
        ) from error


def _file(function: Callable[..., object]) -> str:
    """Return the file of a function, or of the class of an object in a partial; tracebacks name it."""
    called = inspect.unwrap(getattr(function, "func", function))
    code = getattr(called, "__code__", None) or getattr(type(called).__call__, "__code__", None)
    return str(getattr(code, "co_filename", ""))


AnyAxisFunction: TypeAlias = AxisFunction[Any, object]
"""A bound function of any axis, of which only name, needs and settings are read."""
