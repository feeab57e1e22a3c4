"""What a reward function gets and what it returns: a row, a score, the ranges of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from annotated_types import Ge, Gt, Le, Lt

# Ranges that settings of functions may carry; whoever reads settings checks them.
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
OpenShare = Annotated[float, Gt(0), Lt(1)]
Count = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class Check:
    """In ``Annotated``: a check that a range cannot express.

    ``accepted`` returns the value or raises ValueError. pydantic asks it too, where that reads the settings.
    """

    accepted: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], Any]) -> Any:
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(self.accepted, handler(source))


Messages: TypeAlias = Sequence[Mapping[str, object]]
"""A chat: ``[{"role": "user", "content": "..."}, ...]``."""


class Row(NamedTuple):
    """What a reward function may know of the task."""

    id: str
    """For messages and verl's `data_source`: where the row is from, as `file.jsonl:7`."""
    prompt: str | Messages = ""
    columns: Mapping[str, object] = {}


@dataclass(frozen=True)
class StepRewards:
    """Process supervision: rewards at the ends of a completion's reasoning steps.

    >>> StepRewards(values=(1.0, -1.0), ends=(4, 9)).total
    0.0
    """

    values: Sequence[float]
    """(K,) one reward a step."""
    ends: Sequence[int]
    """(K,) index of the last token of each step, increasing."""

    @property
    def total(self) -> float:
        """The sum of the step rewards: the completion's outcome reward."""
        return float(sum(self.values))


Status = Literal[
    "ok",
    "no_answer",
    "unparsable",
    "ambiguous",
    "too_large",
    "timeout",
    "crashed",
    "bad_reference",
    "not_applicable",
    "infra_error",
]
"""Why a reward gave what it gave. From `no_answer` to `crashed` it is the model's fault, and it gets
a value; with `bad_reference` and later nobody can know, and the value is None."""


@dataclass(frozen=True)
class Score:
    """What a reward may return instead of a number, to say more."""

    value: float | None
    """None: not judged; the completion is left out of baseline and loss."""
    status: Status = "ok"
    extracted: str | None = None
    """The answer that was found."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, logged as means."""
    steps: Sequence[tuple[int, int, float]] | None = None
    """Process rewards: (first token, token after the last, value) of each reasoning step, perhaps none.
    None: this reward does not judge steps."""
    detail: str = ""
    """For people: what went wrong."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """For people: what the function passed to TRL's ``log_extra``, by column."""
