"""The types of a reward function's arguments and results: rows, scores, ranges of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from annotated_types import Ge, Gt, Le, Lt

# Ranges of settings as annotations; ``loading`` and pydantic check them.
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
OpenFraction = Annotated[float, Gt(0), Lt(1)]
Count = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class Check:
    """A check in ``Annotated`` that a range cannot express.

    ``accepted`` returns the value or raises ValueError. pydantic calls it too, if it reads the settings.
    """

    accepted: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], Any]) -> Any:
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(self.accepted, handler(source))


Messages: TypeAlias = Sequence[Mapping[str, object]]
"""A chat: ``[{"role": "user", "content": "..."}, ...]``."""


class Row(NamedTuple):
    """The data of a problem that a reward function may use."""

    id: str
    """The row's origin, such as `file.jsonl:7`, for messages and verl's `data_source`."""
    prompt: str | Messages = ""
    columns: Mapping[str, object] = {}


@dataclass(frozen=True)
class StepRewards:
    """Process supervision: rewards at the ends of a completion's reasoning steps.

    >>> StepRewards(values=(1.0, -1.0), ends=(4, 9)).total
    0.0
    """

    values: Sequence[float]
    """(K,) one reward per step."""
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
"""The reason for a score. From `no_answer` to `crashed` the model is at fault, and the score has a value;
from `bad_reference` on the answer cannot be judged, and the value is None."""


@dataclass(frozen=True)
class Score:
    """A detailed result that a reward may return instead of a number."""

    value: float | None
    """None: not judged; the completion is left out of baseline and loss."""
    status: Status = "ok"
    extracted: str | None = None
    """The answer that was found in the completion."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, logged as means."""
    steps: Sequence[tuple[int, int, float]] | None = None
    """Process rewards: (first token, token after the last, value) of each reasoning step; may be empty.
    None: this reward does not judge steps."""
    detail: str = ""
    """The reason for a failure, for people."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """The texts that the function passed to TRL's ``log_extra``, by column, for people."""
