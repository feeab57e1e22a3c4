"""The log of a run that goes back because of findings, and the folders with what it did before.

`healing.jsonl` has a line for each time. Steps after the checkpoint to which the run went back lie in
`healed/NUMBER`, a run folder of its own with all logs and completions, and its best evaluated checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from covey.errors import CheckpointError
from covey.runs.atomic import discard, link, make_folder, sync, write_file
from covey.runs.folder import STREAMS, RunFolder, checkpoints, read_stream, step_of
from covey.runs.inputs import INPUTS
from covey.runs.pending import forget_completions
from covey.runs.trust import MARKS
from covey.system.integrity import sealed_line

HEALING = "healing.jsonl"
ARCHIVE = "healed"


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
        outcome = self.outcome or "the end of the run will show whether it helped"
        return f"{self.finding}: {self.sentence}. Went back to {where} with {self.line}; {outcome}"


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


def archive_of(run: Path, number: int) -> Path:
    """Return the folder with what a run did before it went back the ``number``-th time, counted from 1."""
    return run / ARCHIVE / str(number)


def archive_steps(folder: RunFolder, part: Path, back_to: int) -> None:
    """Move what the run did after ``back_to`` steps into the folder ``part``, and copy its logs.

    A kill may come anywhere: called again it does the rest. The logs of the run itself stay as they are; a
    resume truncates them.
    """
    run = folder.path
    for name in ("rollouts", "checkpoints"):
        make_folder(part / name)
    for name in (*STREAMS, "config.yaml", "env.json", MARKS):
        if (run / name).exists() and not (part / name).exists():
            write_file(part / name, (run / name).read_bytes())
    for path, step in folder.rollout_files().items():
        target = part / "rollouts" / path.name
        if step >= back_to:
            path.rename(target)
        elif not target.exists():
            link(path, target)
    best = folder.best()
    for path in checkpoints(run):
        if best is not None and step_of(path) == best.step > back_to:
            path.rename(part / "checkpoints" / path.name)
        elif step_of(path) > back_to or not back_to:
            discard(path)
    forget_completions(run)
    # Of the inputs before the change, which would be compared with those after it.
    (run / INPUTS).unlink(missing_ok=True)
    for moved in (part / "rollouts", part / "checkpoints", run / "rollouts", run / "checkpoints"):
        sync(moved)
