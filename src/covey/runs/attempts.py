"""The record of the times that a run went back after a finding, in `healing.jsonl`.

It loads no torch: `covey show` and `covey explain` read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from covey.errors import CheckpointError
from covey.runs.atomic import write_file
from covey.runs.folder import read_stream
from covey.system.integrity import sealed_line

HEALING = "healing.jsonl"


@dataclass(frozen=True)
class Attempt:
    """A time that a run went back: why, to where, and what it changed."""

    step: int
    """Number of steps done when the finding was made."""
    finding: str
    """The finding's id."""
    sentence: str
    line: str
    """The finding's config line, which holds since; empty if that of the time before was taken back."""
    was: object
    """Value of the line's setting before."""
    back_to: int
    """Number of steps of the checkpoint; 0: the run's first model."""
    outcome: str = ""
    """Whether it helped, in words; empty until the run has ended."""

    @property
    def takes_back(self) -> bool:
        """Whether it takes back the line of the attempt before."""
        return not self.line

    def __str__(self) -> str:
        where = f"step {self.back_to}" if self.back_to else "the first model"
        if self.takes_back:
            return f"{self.sentence}. Went back to {where} without it"
        outcome = self.outcome or "The end of the run will show whether it helped"
        return f"{self.finding}: {self.sentence}. Went back to {where} with {self.line}. {outcome}"


READ_ATTEMPT = TypeAdapter(Attempt)


def read_attempts(run: Path) -> list[Attempt]:
    """Return the times that a run went back, in their order. Raises CheckpointError for a damaged log."""
    try:
        return [READ_ATTEMPT.validate_python(record) for record in read_stream(run, HEALING)]
    except ValidationError as error:
        raise CheckpointError(f"{run / HEALING} is damaged: {error}. Restore the file") from None


def attempts_in_force(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts whose lines were not taken back."""
    holding = list[Attempt]()
    for attempt in attempts:
        if attempt.takes_back:
            holding.pop()
        else:
            holding.append(attempt)
    return holding


def changed_after(run: Path) -> int:
    """Return the number of steps after which a run continued with other settings; 0 if it never did."""
    attempts = read_attempts(run)
    return attempts[-1].back_to if attempts_in_force(attempts) else 0


def write_attempts(run: Path, attempts: Sequence[Attempt]) -> None:
    """Replace the log."""
    write_file(run / HEALING, "".join(sealed_line(vars(attempt)) for attempt in attempts))
