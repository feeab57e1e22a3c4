"""A run's folder, read and written: configuration, metric streams, rollout log, checkpoints, final model.

config.yaml env.json metrics.jsonl timings.jsonl evals.jsonl events.jsonl findings.jsonl
rollouts/step_000012.{jsonl,npz} checkpoints/step_000100/ final/
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from covey.errors import CheckpointError, FolderBusy
from covey.runs.atomic import append_whole, clear_leftovers, discard, make_folder, sync, write_file
from covey.runs.best import BestEvaluation, best_evaluation
from covey.runs.owner import name_owner, owner_of
from covey.runs.rollouts import ROLLOUT, or_null, read_rollouts, rollout_arrays, rollout_file, rollout_rows
from covey.system.integrity import damage, read_sealed, sealed_line, unsealed_line
from covey.system.opening import name_file_in_errors, read_below, stream_bytes
from covey.system.processes import is_rank_zero
from covey.types import Group
from covey_verify.errors import ConfigError

if TYPE_CHECKING:
    from filelock import FileLock

STREAMS = ("metrics.jsonl", "evals.jsonl", "timings.jsonl", "events.jsonl", "findings.jsonl")
LOCK = ".lock"
"""File that the process that uses the folder keeps locked."""
RESULT = "result.json"
CURVE = "curve.svg"
"""File that a run writes when it has ended."""
WRITTEN = "written"
"""Key in the result: bytes and sha256 of the run's files, by name."""
CHECKPOINT = re.compile(r"step_(\d{6,})")
IN_CHECKPOINT = "trainer.json"
"""A file that every checkpoint has, in addition to those of the model and the optimizer."""
INEXACT = "no longer exact"
"""An event that a rewind keeps: the next resume finds nothing changed and would not log it again."""
MAX_DIGITS = 18
"""Largest number of digits of an integer in a stream."""


@dataclass(frozen=True)
class LogState:
    """The state of the logs when a checkpoint was written."""

    streams: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Bytes and sha256 of each stream."""
    rollouts: int = 0
    """Number of files in rollouts/."""


@dataclass
class ExpectedStream:
    """The intended content of a stream, counted while lines are appended: a disk may lose some."""

    size: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    unread: bytearray = field(default_factory=bytearray)
    """Bytes appended since the file was last compared."""

    def add(self, line: bytes) -> None:
        """Count one more line."""
        self.size += len(line)
        self.digest.update(line)
        self.unread += line


OPEN_LOCKS = set["FileLock"]()
"""The locks of open folders: filelock would release one that nobody refers to."""


def take_lock(path: Path) -> FileLock:
    """Take the lock of a run's folder, which this process holds until it is released. Raises FolderBusy."""
    from filelock import FileLock, Timeout  # slow to import for commands that only read a run

    # Whatever thread opens a folder, another may close it. A forked child does not hold the lock.
    lock = FileLock(path / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        owner = owner_of(path) or "another process"
        raise FolderBusy(f"{path}: {owner} is using this folder; wait for it or choose another") from None
    return lock


class RunFolder:
    """One run's folder, locked while it is open. Of several processes only the first writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writes = is_rank_zero()
        if not self.writes:
            return
        folders = (path, path / "rollouts", path / "checkpoints")
        for folder in folders:
            make_folder(folder)
        self._lock = take_lock(path)
        OPEN_LOCKS.add(self._lock)
        name_owner(path)
        # The thread that samples ahead logs events too.
        self._appending = Lock()
        self._meant = {name: ExpectedStream() for name in STREAMS}
        for folder in folders:
            clear_leftovers(folder)

    def close(self) -> None:
        """Release the lock."""
        if self.writes:
            self._lock.release()
            OPEN_LOCKS.discard(self._lock)

    def append(self, stream: str, record: Mapping[str, object]) -> None:
        """Add one JSON line, with its sha256, to a stream. Non-finite numbers become null."""
        if not self.writes:
            return
        line = sealed_line({k: or_null(v) for k, v in record.items()}).encode()
        path = self.path / stream
        with self._appending:
            append_whole(path, line)
            self._meant[stream].add(line)

    def read(self, stream: str) -> list[dict[str, object]]:
        """Return all records of a stream."""
        return read_stream(self.path, stream)

    def sync(self) -> LogState:
        """Sync the streams to disk against a power loss, and return their state for a checkpoint."""
        paths = [self.path / name for name in STREAMS]
        for path in (*(p for p in paths if p.exists()), self.path):
            sync(path)
        for name, meant in self._meant.items():
            self._check_written(self.path / name, meant)
        streams = {
            name: (meant.size, meant.digest.hexdigest()) for name, meant in self._meant.items() if meant.size
        }
        return LogState(streams, len(self.rollout_files()))

    def _check_written(self, path: Path, meant: ExpectedStream) -> None:
        """Raise CheckpointError unless a stream ends with the bytes appended since the last check."""
        content = b""
        if meant.unread:
            with path.open("rb") as file, name_file_in_errors(path):
                file.seek(meant.size - len(meant.unread))
                content = file.read()
        if content != meant.unread:
            raise CheckpointError(
                f"{path} does not have the bytes that were written: the disk or the memory loses data. Check "
                "the hardware, then repeat the command"
            )
        meant.unread.clear()

    def damaged_streams(self, logged: LogState, step: int) -> list[str]:
        """Describe the streams that differ from what they were at the checkpoint of ``step``.

        Raises CheckpointError if one is shorter, or if the evaluations differ, on which the
        conclusion depends.
        """
        complaints = []
        newest = checkpoint_at(self.path, step)
        remedy = f"Put the file back, or remove {newest} to resume from a checkpoint that knew less of it"
        for name, (size, expected) in logged.streams.items():
            path = self.path / name
            content = read_below(self.path, name, stream_bytes())[:size] if path.exists() else b""
            if len(content) < size:
                raise CheckpointError(
                    f"{path} has {len(content):,} bytes, but had {size:,} when the checkpoint of step {step} "
                    f"was written. {remedy}"
                )
            if hashlib.sha256(content).hexdigest() != expected:
                complaints.append(f"{path} is not as it was written")
                if name == "evals.jsonl":
                    raise CheckpointError(
                        f"{complaints[-1]}, but the run's conclusion depends on it. {remedy}"
                    )
        return complaints

    def damaged_rollouts(self, logged: LogState, step: int, every: bool) -> list[str]:
        """Describe missing or damaged files of the rollout log of the first ``step`` steps.

        Checks the content of the first step, which `kl/start` reads again, or with ``every`` that of all.
        """
        earlier_steps = [number for number in self.rollout_files().values() if number <= step]
        steps = sorted(set(earlier_steps))
        complaints = []
        missing = logged.rollouts - len(earlier_steps)
        if missing > 0:
            complaints.append(f"{self.path / 'rollouts'} lacks {missing} of {logged.rollouts} files")
        for number in steps if every else [n for n in steps[:1] if n == 1]:
            try:
                _ = read_rollouts(self.path, number).arrays
            except (CheckpointError, ConfigError) as error:
                complaints.append(str(error).partition(". Put the file back")[0])
        return complaints

    def rewind(self, logged: LogState, step: int) -> int:
        """Remove everything that was logged after a checkpoint; return the number of steps removed.

        Truncates the streams, removes later rollouts, and blanks damaged lines.
        """
        removed_steps = 0
        for name in STREAMS:
            path = self.path / name
            (size, _) = logged.streams.get(name, (0, ""))
            whole = read_below(self.path, name, stream_bytes()) if path.exists() else b""
            removed_steps += whole[size:].count(b"\n") if name == "metrics.jsonl" else 0
            readable = _blank_unreadable(whole[:size])
            # Without a checkpoint the run begins again from its first step: nothing is kept.
            later = whole[size:].splitlines(keepends=True) if logged.streams else []
            kept_lines = b"".join(line for line in later if _lasts(line))
            if kept_lines or readable != whole[:size]:
                write_file(path, readable + kept_lines)
            elif whole:
                os.truncate(path, size)
            self._meant[name] = ExpectedStream(
                len(readable + kept_lines), hashlib.sha256(readable + kept_lines)
            )
        for path, number in self.rollout_files().items():
            if number > step:
                path.unlink()
        return removed_steps

    def rollout_files(self) -> dict[Path, int]:
        """Return the files that ``write_rollouts`` wrote, with their steps; users may keep others there."""
        matches = ((p, ROLLOUT.fullmatch(p.name)) for p in (self.path / "rollouts").iterdir())
        return {path: int(match[1]) for path, match in matches if match}

    def write_rollouts(
        self,
        step: int,
        trained: Sequence[Group],
        advantages: Sequence[np.ndarray],
        filtered: Sequence[Group] = (),
        per_token: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        """Log a step's completions: text and rewards as JSONL, token arrays as npz.

        ``advantages`` holds one (T,) array per completion, in the order of the trained groups. Completions of
        filtered groups come after these, with advantages of 0. ``per_token`` has, by name, what updates saw
        of the tokens of the trained groups, one completion after another; filtered groups get NaN.
        """
        groups = [*trained, *filtered]
        if self.writes and groups:
            filtered_completions = [c for g in filtered for c in g.completions]
            all_advantages = [*advantages, *(np.zeros(len(c.tokens)) for c in filtered_completions)]
            not_updated = np.full(sum(len(c.tokens) for c in filtered_completions), np.nan, np.float32)
            values = {
                name: np.concatenate([trained_values, not_updated])
                for name, trained_values in per_token.items()
            }
            path = rollout_file(self.path, step)
            # The arrays first: a JSONL file, by which readers find a step, then never lacks its arrays.
            arrays = rollout_arrays(groups, all_advantages, values)
            write_file(path.with_suffix(".npz"), arrays)
            write_file(path, rollout_rows(step, groups, all_advantages, len(trained), arrays))

    def best(self) -> BestEvaluation | None:
        """Return the best evaluation so far."""
        return best_evaluation(self.read("evals.jsonl"))

    def rotate(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints and that of the best evaluation."""
        best = self.best()
        for path in checkpoints(self.path)[:-keep]:
            if best is None or step_of(path) != best.step:
                discard(path)


def step_of(checkpoint: Path) -> int:
    """Return the number of steps done when a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step_"))


def checkpoint_at(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, whether it exists or not."""
    return run / "checkpoints" / f"step_{step:06d}"


def checkpoints(run: Path) -> list[Path]:
    """Return the committed checkpoints of a run, oldest first, without anything else in that folder."""
    matches = ((p, CHECKPOINT.fullmatch(p.name)) for p in (run / "checkpoints").glob("step_*") if p.is_dir())
    return [path for _, path in sorted((int(match[1]), path) for path, match in matches if match)]


def latest_checkpoint(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint, and a complaint about each damaged one after it."""
    complaints: list[str] = []
    for path in reversed(checkpoints(run)):
        problem = damage(path, (IN_CHECKPOINT, optimizer_file(path)))
        if problem is None:
            return path, complaints
        if not path.is_dir():  # its run is at work, and has removed it for a newer one
            return latest_checkpoint(run)
        complaints.append(problem)
    return None, complaints


def optimizer_file(checkpoint: Path) -> str:
    """Return a checkpoint's file with the optimizer's state, or its first part if several wrote it."""
    parts = sorted((checkpoint / "optimizer").glob("*.safetensors"))
    return str(parts[0].relative_to(checkpoint)) if parts else "optimizer.safetensors"


def read_stream(folder: Path, stream: str) -> list[dict[str, object]]:
    """Return the records that a run has logged so far. A last line that is half written is left out.

    Raises CheckpointError naming a damaged line.
    """
    records = []
    for number, record in _lines(folder / stream):
        if record is None:
            raise CheckpointError(
                f"{folder / stream}:{number}: the line is damaged. Restore the file, or remove the line"
            )
        records.append(record)
    complaint = ended_otherwise(folder, stream)
    if complaint:
        raise CheckpointError(f"{complaint}: lines are missing or changed. Restore the file")
    return records


def readable_stream(folder: Path, stream: str) -> tuple[list[dict[str, object]], int]:
    """Return the readable records of a stream, and the number of lines that cannot be read."""
    records = [record for _, record in _lines(folder / stream)]
    return [record for record in records if record is not None], records.count(None)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, object] | None]]:
    """Yield the number and record of each complete line; lines that a resume has blanked are skipped."""
    whole = read_below(path.parent, path.name, stream_bytes()).rpartition(b"\n")[0] if path.exists() else b""
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if line.strip():
            yield number, stream_record(line)


def ended_otherwise(folder: Path, name: str) -> str:
    """Describe how a file differs from its hash in the result of an ended run; empty if it does not.

    Empty too if the run has not ended. Raises CheckpointError if the result is damaged.
    """
    if not (folder / RESULT).is_file():
        return ""
    result = read_sealed(folder / RESULT, dict[str, object], "Put it back, or remove it")
    written = result.get(WRITTEN)
    size, expected = written.get(name, (0, None)) if isinstance(written, dict) else (0, None)
    if expected is None:
        return ""
    try:
        content = read_below(folder, name, stream_bytes())[:size]
    except FileNotFoundError:
        return f"{folder / name} is missing"
    fits = hashlib.sha256(content).hexdigest() == expected
    return "" if fits else f"{folder / name} is not as it was written"


def read_numbers(folder: Path, stream: str) -> list[dict[str, float]]:
    """Return the numbers of each record of a stream, by name. Raises as read_stream."""
    records = read_stream(folder, stream)
    return [{k: float(v) for k, v in record.items() if isinstance(v, float | int)} for record in records]


def stream_record(line: bytes) -> dict[str, object] | None:
    """Return the record of a line; None if it is damaged."""
    try:
        record = unsealed_line(line, _parse_integer)
    except ValueError:
        return None
    if type(record.get("step")) is not int:
        return None
    finite = all(math.isfinite(v) for v in record.values() if isinstance(v, float))
    return record if finite else None  # nobody writes what is not: see ``append``


def _lasts(line: bytes) -> bool:
    record = stream_record(line.rstrip(b"\n"))
    return record is not None and record.get("event") == INEXACT


def _parse_integer(digits: str) -> int:
    """Parse an integer that a float can hold too; no record has a larger one."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"{digits} is too large")
    return int(digits)


def _blank_unreadable(content: bytes) -> bytes:
    """Return a stream with its unreadable lines blanked. No byte moves: sizes in checkpoints stay valid."""
    lines = content.removesuffix(b"\n").split(b"\n")
    readable = [line if stream_record(line) is not None else b" " * len(line) for line in lines]
    return b"\n".join(readable)[: len(content) - 1] + b"\n" if content else b""
