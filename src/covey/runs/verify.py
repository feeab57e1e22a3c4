"""`covey verify`: check, file by file, that a run's folder is as it was written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from covey.errors import EXIT_FILE, START_FILE
from covey.runs.folder import (
    IN_CHECKPOINT,
    RESULT,
    STREAMS,
    checkpoints,
    ended_otherwise,
    latest_checkpoint,
    stream_record,
)
from covey.runs.reader import last_stage, recorded_yaml, stages_in
from covey.runs.references import REFERENCE, read_sums
from covey.runs.rollbacks import ROLLBACKS
from covey.runs.rollouts import read_rollouts, recorded_steps
from covey.system.integrity import damage, read_sealed
from covey.system.opening import read_below, stream_bytes
from covey.tasks.source import EXAMPLES_FILE
from covey_verify.errors import CoveyError

State = Literal["whole", "damaged", "missing", "unsealed"]
MAX_LINES = 5
"""Largest number of damaged lines of a log that are named."""


@dataclass(frozen=True)
class FileState:
    """The state of one file, of the rollout log of one step, or of a folder with a model."""

    file: str
    """Path in the folder that was checked."""
    state: State
    why: str = ""

    def __str__(self) -> str:
        return f"{self.state:<9}{self.file}{f': {self.why}' if self.why else ''}"


def verify_run(folder: Path) -> list[FileState]:
    """Check every file that a run, or each stage of a pipeline, wrote. Raises ConfigError without a run.

    A file whose seal the run has not written yet is reported as unsealed.
    """
    stages = [folder] if (folder / "config.yaml").exists() else stages_in(folder) or [last_stage(folder)]
    # A pipeline keeps the record of its start above its stages; a single run has it among its own files.
    states = [_record(folder, START_FILE)] if (folder / START_FILE).exists() and folder not in stages else []
    for stage in stages:
        prefix = "" if stage == folder else f"{stage.relative_to(folder)}/"
        states += [FileState(prefix + v.file, v.state, v.why) for v in _of_run(stage)]
    return states


def _of_run(run: Path) -> Iterator[FileState]:
    yield _check_file(run, "config.yaml", lambda: recorded_yaml(run))
    for name in ("env.json", START_FILE, RESULT):
        if name == "env.json" or (run / name).exists():
            yield _record(run, name)
    if (run / EXIT_FILE).exists():
        yield FileState(EXIT_FILE, "unsealed", "says why a run ended, and nothing is computed from it")
    hashes = _known_to_checkpoint(run)
    for name in (*STREAMS, ROLLBACKS):
        yield from _stream(run, name, hashes)
    for step in recorded_steps(run):
        yield _check_file(run, f"rollouts/step_{step:06d}", _arrays(run, step))
    if (run / REFERENCE).exists():
        yield _check_file(run, REFERENCE, lambda: read_sums(run))
    if (run / EXAMPLES_FILE).exists():
        yield _examples(run)
    for model in (*checkpoints(run), run / "final"):
        if model.is_dir():
            problem = damage(model)
            yield FileState(f"{model.relative_to(run)}/", "damaged" if problem else "whole", problem or "")


def _check_file(run: Path, name: str, check: Callable[[], object]) -> FileState:
    try:
        check()
    except FileNotFoundError:
        return FileState(name, "missing")
    except (CoveyError, ValueError) as error:
        # The table has the file's name already, and the remedy is the same for every row.
        reason = str(error).partition(". Put")[0]
        reason = reason.removeprefix(f"{run / name}: ").removeprefix(f"{run}/")
        return FileState(name, "damaged", reason)
    return FileState(name, "whole")


def _record(run: Path, name: str) -> FileState:
    return _check_file(run, name, lambda: read_sealed(run / name, dict[str, object], "Put it back"))


def _arrays(run: Path, step: int) -> Callable[[], object]:
    return lambda: read_rollouts(run, step).arrays


def _stream(run: Path, name: str, hashes: Mapping[str, tuple[int, str]]) -> Iterator[FileState]:
    """Check a log line by line, and against its hash in the newest checkpoint or in the result."""
    if not (run / name).exists():
        if name in hashes:
            yield FileState(name, "missing")
        return
    # Bytes after the last newline are a line that a running process is still writing.
    content = read_below(run, name, stream_bytes())
    lines = enumerate(content.rpartition(b"\n")[0].split(b"\n"), start=1)
    bad = [number for number, line in lines if line.strip() and stream_record(line) is None]
    if bad:
        more = ", ..." if bad[MAX_LINES:] else ""
        yield FileState(name, "damaged", f"line {', '.join(map(str, bad[:MAX_LINES]))}{more}")
        return
    size, expected = hashes.get(name, (0, ""))
    # The checkpoint knows the hash of the first `size` bytes only: lines appended later are fine.
    lacks = bool(expected) and hashlib.sha256(content[:size]).hexdigest() != expected
    reason = _how_it_ended(run, name)
    why = reason or ("it has lost lines, or other ones, since the newest checkpoint" if lacks else "")
    yield FileState(name, "damaged" if why else "whole", why)


def _how_it_ended(run: Path, name: str) -> str:
    try:
        return ended_otherwise(run, name)
    except CoveyError:  # of the result, which has its own line
        return ""


def _known_to_checkpoint(run: Path) -> dict[str, tuple[int, str]]:
    newest, _ = latest_checkpoint(run)
    if newest is None:
        return {}
    logged = read_sealed(newest / IN_CHECKPOINT, dict[str, dict[str, object]], "")["logs"]["streams"]
    streams = logged if isinstance(logged, dict) else {}
    return {name: (int(size), str(digest)) for name, (size, digest) in streams.items()}


def _examples(run: Path) -> FileState:
    if not (run / RESULT).exists():
        return FileState(EXAMPLES_FILE, "unsealed", "its stage has not ended")
    why = _how_it_ended(run, EXAMPLES_FILE)
    return FileState(EXAMPLES_FILE, "damaged" if why else "whole", why)
