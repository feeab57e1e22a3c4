"""The record of a run's rollbacks after findings, in `rollbacks.jsonl`.

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

ROLLBACKS = "rollbacks.jsonl"


@dataclass(frozen=True)
class Rollback:
    """A return of a run to an earlier state: why, to which step, and with what change."""

    step: int
    """Number of steps done when the finding was made."""
    finding: str
    """The finding's id."""
    sentence: str
    line: str
    """The finding's config line, in force since then; empty if it drops the line of the last rollback."""
    was: object
    """Value of the line's setting before."""
    back_to: int
    """Number of steps of the checkpoint; 0: the run's first model."""
    outcome: str = ""
    """Whether it helped, in words; empty until the run has ended."""

    @property
    def undoes_last(self) -> bool:
        """Whether it drops the line of the rollback before it."""
        return not self.line

    def __str__(self) -> str:
        where = f"step {self.back_to}" if self.back_to else "the first model"
        if self.undoes_last:
            return f"{self.sentence}. Rolled back to {where} without it"
        outcome = self.outcome or "The end of the run will show whether it helped"
        return f"{self.finding}: {self.sentence}. Rolled back to {where} with {self.line}. {outcome}"


READ_ROLLBACK = TypeAdapter(Rollback)


def read_rollbacks(run: Path) -> list[Rollback]:
    """Return a run's rollbacks, in their order. Raises CheckpointError for a damaged log."""
    try:
        return [READ_ROLLBACK.validate_python(record) for record in read_stream(run, ROLLBACKS)]
    except ValidationError as error:
        raise CheckpointError(f"{run / ROLLBACKS} is damaged: {error}. Restore the file") from None


def rollbacks_in_force(rollbacks: Sequence[Rollback]) -> list[Rollback]:
    """Return the rollbacks whose lines were not dropped by a later one."""
    holding = list[Rollback]()
    for rollback in rollbacks:
        if rollback.undoes_last:
            holding.pop()
        else:
            holding.append(rollback)
    return holding


def changed_after(run: Path) -> int:
    """Return the number of steps after which a run continued with other settings; 0 if it never did."""
    rollbacks = read_rollbacks(run)
    return rollbacks[-1].back_to if rollbacks_in_force(rollbacks) else 0


def write_rollbacks(run: Path, rollbacks: Sequence[Rollback]) -> None:
    """Replace the log."""
    write_file(run / ROLLBACKS, "".join(sealed_line(vars(rollback)) for rollback in rollbacks))
