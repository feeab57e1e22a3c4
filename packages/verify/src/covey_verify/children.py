"""Child processes: start, limits, deadline, end, and the words for how one ended.

Every program that covey and covey-verify start is a ``Child``. Two places fork without starting a program and
use the functions here: the parent of each command (``covey.__main__``) and the sandbox's fork server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

CRASHES = [signal.Signals[f"SIG{name}"] for name in ("SEGV", "BUS", "ILL", "FPE", "ABRT", "TRAP", "SYS")]
"""Signals by which a process dies of its own fault. Any other was sent: by a user, or for lack of memory."""
# From linux/prctl.h: the kernel sends a signal when the thread that started this process ends.
PR_SET_PDEATHSIG = 1


class Child(subprocess.Popen[bytes]):
    """A program in a session of its own.

    A terminal's Ctrl-C does not reach it, and ``kill`` takes along what it has started.
    """

    def __init__(self, command: Sequence[str] | str, **options: Any) -> None:
        super().__init__(command, start_new_session=True, **options)

    def kill(self) -> None:
        """Kill it and its whole process group, unless its end has been seen."""
        if self.returncode is None:  # not waited for yet, so no other process has its number
            kill_group(self.pid)


def run(
    command: Sequence[str] | str, seconds: float, **options: object
) -> subprocess.CompletedProcess[bytes]:
    """Run a program without input and return its exit code and its output.

    It is killed with its group if it takes longer than ``seconds``, or if an exception ends the wait. Raises
    OSError, or TimeoutExpired.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Child(command, **{**pipes, **options}) as child:
        try:
            output, messages = child.communicate(timeout=seconds)
        finally:
            child.kill()
            code = child.wait()
    return subprocess.CompletedProcess(command, code, output, messages)


def kill_group(pid: int) -> None:
    """Kill a process and its group."""
    for end in (os.killpg, os.kill):  # the group, and a child that has not made it yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def die_with(parent: int) -> None:
    """Have this process killed when its parent dies, whatever the reason.

    On Linux the end of the thread that started it counts, so that thread has to live as long as the child.
    """
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        # An orphan gets another parent; a thread checks for that twice a second.
        threading.Thread(target=_follow, args=(parent,), name="parent", daemon=True).start()


def _follow(parent: int, seconds: float = 0.5) -> None:
    while os.getppid() == parent:
        time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def limit(kind: int, value: int) -> None:
    """Lower a limit of this process, such as RLIMIT_CPU. A limit that is lower already stays.

    macOS refuses RLIMIT_AS, so that memory has no limit there.
    """
    # At the soft limit of processor time comes SIGXCPU, which can be caught, a second later SIGKILL.
    soft, hard = value, value + (kind == resource.RLIMIT_CPU)
    present = resource.getrlimit(kind)[1]
    if present != resource.RLIM_INFINITY:
        soft, hard = min(soft, present), min(hard, present)
    if sys.platform != "darwin" or kind != resource.RLIMIT_AS:
        resource.setrlimit(kind, (soft, hard))


def how_ended(code: int) -> str:
    """Return how a process ended, from its exit code or the negative number of a signal.

    >>> how_ended(3)
    'exit code 3'
    >>> how_ended(-9)
    'killed by SIGKILL (Killed)'
    """
    if code >= 0:
        return f"exit code {code}"
    names = {int(sig): sig.name for sig in signal.Signals}  # real-time signals have no name
    return f"killed by {names.get(-code, f'signal {-code}')} ({signal.strsignal(-code)})"


def prctl(option: int, *arguments: int | ctypes.Array[ctypes.c_char]) -> None:
    """Set an option of this process, on Linux. Raises OSError."""
    words = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    if ctypes.CDLL(None, use_errno=True).prctl(option, *words) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")
