"""Errors and exit codes of a run: each failure has a code, a last line, and a record in the run folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import signal
import traceback
from pathlib import Path

from covey_verify.children import CRASHES
from covey_verify.errors import CoveyError

EXIT_FILE = "exit.json"
"""File in the run folder that tells how a run ended; there is none after success."""
START_FILE = "start.json"
"""File in the run folder with the config and settings that `covey resume` uses again."""


class CheckpointError(CoveyError):
    """No checkpoint can be used, or another process works in the folder."""

    code = 4


class FolderBusy(CheckpointError):
    """Another process works in this run folder."""


class GuardStop(CoveyError):
    """A guard ended the run: non-finite numbers, KL, entropy, or no signal."""

    code = 6


class OutOfRoom(CoveyError):
    """Disk or memory is used up, or the disk fails."""

    code = 8


class SamplersLost(CoveyError):
    """No sampling server is left to ask."""

    code = 9


class PeersLost(CoveyError):
    """Another process of the run has ended or does not answer."""

    code = 10


class RestartRequired(PeersLost):
    """A process cannot continue while the others are in the middle of a step."""


class Stopped(CoveyError):
    """The run was asked to stop and its state is saved; the same command resumes it."""

    code = 75


STALLED = 7
"""Exit code of the watchdog, which ends a run that no longer makes progress."""


def as_error(error: BaseException) -> CoveyError:
    """Turn any exception into a CoveyError with a remedy; unexpected ones also print their traceback."""
    if isinstance(error, CoveyError):
        return error
    # From the specific to the general: whatever no case knows is reported as a bug.
    if (system := system_error(error)) is not None:
        return disk_error(system)
    if is_panic(error):
        return CoveyError(
            f"a library crashed on its input: {first_line(error)}. If that is the tokenizer of a "
            "model's folder, look at the patterns in its tokenizer.json"
        )
    if out_of_memory(error):
        return OutOfRoom(
            f"out of memory: {first_line(error)}. Lower rollout.max_running, rollout.max_tokens or "
            "train.tokens_per_micro_batch, or take a smaller model"
        )
    traceback.print_exception(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return CoveyError(
        f"a bug in covey, or in code it was given: {type(error).__name__}: {first_line(error)} "
        f"({frame.filename}:{frame.lineno}). Please report it with the lines above"
    )


def cause_of_signal(number: int) -> str:
    """Return why a process was ended by this signal, as far as the number tells.

    >>> cause_of_signal(signal.SIGTERM)
    'another process sent the signal'
    """
    if number in CRASHES:
        return "a reward or a library crashed; a trace, if any, is above"
    if number == signal.SIGKILL:
        return "the system does this when memory runs out; otherwise another process sent the signal"
    return "another process sent the signal"


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust panicked, which Python sees as a BaseException."""
    return type(error).__name__ == "PanicException"


def system_error(error: BaseException) -> OSError | None:
    """The OSError behind an exception. Libraries written in Rust report it only in the message."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def disk_error(error: OSError, what: str = "") -> OutOfRoom:
    """The error for a failed read or write, with a remedy for its cause."""
    subject = what or str(error.filename or "a file")
    remedy = {
        errno.ENOSPC: "Free some space and run the same command again",
        errno.EDQUOT: "Your quota is used up; free some space and run the same command again",
        errno.EROFS: "The file system is read-only; choose another --output",
        errno.EACCES: "Choose an --output that you may write to",
        errno.EEXIST: "A file is in the place of a folder; choose another place",
        errno.ENOTDIR: "A file is in the place of a folder; choose another place",
        errno.ENAMETOOLONG: "Choose a shorter name",
        errno.EMFILE: "Raise the limit on open files: ulimit -n 1024",
    }.get(error.errno or 0, "Check the disk, then run the same command again")
    return OutOfRoom(f"{subject}: {error.strerror or error}. {remedy}")


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the CPU or a GPU."""
    words = str(error)
    # torch raises a plain RuntimeError where the CPU's allocator fails, so its words have to tell.
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in words or "can't allocate memory" in words)
    )


def resume_command(folder: Path) -> str:
    """The command that continues a run."""
    return f"covey resume {shlex.quote(str(folder))}"


def record_exit(folder: Path, error: CoveyError) -> None:
    """Write how the run ended into its folder, if the disk still allows it."""
    text = json.dumps(
        {"exit_code": error.code, "error": str(error), "resume_command": resume_command(folder)}, indent=1
    )
    with contextlib.suppress(OSError):  # the error itself is printed anyway
        (folder / EXIT_FILE).write_text(text + "\n", encoding="utf-8")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, of at most 300 characters."""
    # Some libraries put a page into a message; an exit record and a last line need one line.
    return (str(error).strip().splitlines() or [""])[0][:300]
