"""State that a command's process shares with the parent that waits for it: signals, its end, its folder.

It uses the standard library only: it is imported before anything that takes time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal

TYPE_CHECKING = False  # the module of that name takes longer to import than all the others here
if TYPE_CHECKING:
    from pathlib import Path
    from typing import NoReturn

CRASHED = 5
"""Exit code if code that the command ran has ended its process."""
LAUNCHER = "COVEY_LAUNCHER"
"""Environment variable with the id of the process that started this one as one of several."""
REPEAT_SECONDS = 0.1
"""Seconds within which signals count as one request: `timeout` sends each of its signals twice."""

# Memory that parent and child share, because user code may close any descriptor: how many signals the parent
# has forwarded, whether the child ended as it should, its exit code, the run's folder.
_FORWARDED, _ENDED, _CODE, _FOLDER = 0, 1, 2, 3
_shared: mmap.mmap | None = None
_child = 0


def fork() -> int:
    """Fork, with memory that both share. Return the child's process id; 0 in the child."""
    global _shared, _child  # noqa: PLW0603 - a process has one parent
    # Anonymous shared memory survives the fork on both sides: a byte each for the first three, then the path.
    _shared = mmap.mmap(-1, 8192)
    child = os.fork()
    if child == 0:
        _child = os.getpid()
    return child


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a command to stop; without SIGHUP if `nohup` has it ignored."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


def forwarded_signals() -> int:
    """Return how many requests to stop the parent has forwarded; it also gets those to the whole group."""
    return _shared[_FORWARDED] if _shared is not None else 0


def tell_run_folder(folder: Path) -> None:
    """Tell the parent the folder of the run, in which it writes how the run ended if the child cannot."""
    if _shared is not None and os.getpid() == _child:
        path = os.fsencode(folder.absolute())[: len(_shared) - _FOLDER - 1]
        _shared[_FOLDER : _FOLDER + len(path) + 1] = path + b"\0"


def tell_exit_code(code: int) -> None:
    """Tell the parent that this process ends with ``code`` on purpose. Its forks are not listened to."""
    if _shared is not None and os.getpid() == _child:
        # The code first: the parent reads it only once the flag is set.
        _shared[_CODE] = code
        _shared[_ENDED] = 1


def exit_now(code: int, last_line: str) -> NoReturn:
    """End at once, from a signal handler or any thread, with one line on standard error."""
    print_last_line(f"error: {last_line}")
    tell_exit_code(code)
    os._exit(code)


def print_last_line(line: str) -> None:
    """Write the last line of a command that ends outside of Python's order."""
    # The live panel has hidden the cursor, and left it at the end of a line.
    cursor = "\x1b[?25h\n" if os.isatty(2) else ""
    # os.write rather than print: a signal handler may have interrupted a print, which holds its stream's
    # lock; or Python's streams are None or closed.
    with contextlib.suppress(OSError):
        os.write(2, f"{cursor}{line}\n".encode(errors="replace"))


def count_forwarded_signal() -> None:
    """Count a signal before the parent forwards it, so that the child can tell it from a direct one."""
    if _shared is not None:
        _shared[_FORWARDED] = min(_shared[_FORWARDED] + 1, 255)


def end_of_child() -> tuple[int | None, str]:
    """Return the exit code that the child left, None if it left none, and the folder of its run, or ''."""
    assert _shared is not None
    folder = os.fsdecode(_shared[_FOLDER:].split(b"\0")[0])
    return (_shared[_CODE] if _shared[_ENDED] else None), folder
