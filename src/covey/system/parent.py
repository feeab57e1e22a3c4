"""What a command's process shares with the parent that waits for it: signals, its end, the run's folder.

The standard library only: it is imported before anything that takes time.
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
"""Exit code where the code that a command runs has ended its process."""
LAUNCHER = "COVEY_LAUNCHER"
"""Environment variable with the process that has started this one as one of several, and ends with them."""
TOGETHER = 0.1
"""Signals that arrive within so many seconds are one request: `timeout` sends each of its signals twice."""

# Memory that parent and child share, because user code may close any descriptor: how many signals the parent
# has forwarded, whether the child ended as it should, its exit code, the run's folder.
_FORWARDED, _ENDED, _CODE, _FOLDER = 0, 1, 2, 3
_shared: mmap.mmap | None = None
_child = 0


def fork() -> int:
    """Fork, with memory that both share. -> the child's process id, 0 in the child."""
    global _shared, _child  # noqa: PLW0603 - a process has one parent
    _shared = mmap.mmap(-1, 8192)
    child = os.fork()
    if child == 0:
        _child = os.getpid()
    return child


def stop_signals() -> list[signal.Signals]:
    """What asks a command to stop; not SIGHUP where `nohup` has it ignored."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


def forwarded() -> int:
    """Requests to stop that came through the parent; a signal to the whole group reaches it as well."""
    return _shared[_FORWARDED] if _shared is not None else 0


def works_in(folder: Path) -> None:
    """Tell the parent which run it may have to write the end of."""
    if _shared is not None and os.getpid() == _child:
        path = os.fsencode(folder.absolute())[: len(_shared) - _FOLDER - 1]
        _shared[_FOLDER : _FOLDER + len(path) + 1] = path + b"\0"


def ended(code: int) -> None:
    """Tell the parent that this process ends with ``code`` because it wants to. Its forks have no say."""
    if _shared is not None and os.getpid() == _child:
        _shared[_CODE], _shared[_ENDED] = code, 1


def leave(code: int, last_line: str) -> NoReturn:
    """End at once, from a signal handler or any thread, with one line."""
    with contextlib.suppress(OSError):
        os.write(2, f"error: {last_line}\n".encode(errors="replace"))
    ended(code)
    os._exit(code)


def count_forwarded() -> None:
    """Note a signal that the parent forwards, before it does, so that the child can tell it from its own."""
    if _shared is not None:
        _shared[_FORWARDED] = min(_shared[_FORWARDED] + 1, 255)


def end_of_child() -> tuple[int | None, str]:
    """The exit code that the child has left, None if it did not; and the folder of its run, if it had one."""
    assert _shared is not None
    folder = os.fsdecode(_shared[_FOLDER:].split(b"\0")[0])
    return (_shared[_CODE] if _shared[_ENDED] else None), folder
