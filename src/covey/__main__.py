"""The process that a user starts: a child runs the command, and the parent reports how it ended.

Code that a command runs (a user's reward, a library in C) can end its whole process at any moment, even with
exit code 0. So the parent only waits and forwards signals. If the child ended without a result, the parent
prints an error message and returns an exit code in its place. Signal handlers are installed
before any slow import; hence only the standard library and ``covey.system.parent`` before the fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import time

from covey.system.parent import (
    CRASHED,
    LAUNCHER,
    REPEAT_SECONDS,
    count_forwarded_signal,
    end_of_child,
    exit_now,
    fork,
    print_last_line,
    stop_signals,
    tell_exit_code,
)

TYPE_CHECKING = False  # the module of that name takes longer to import than all the others here
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> int:
    """Run the command line in a child. Return its exit code, or CRASHED if it left none."""
    for descriptor in (0, 1, 2):  # a closed one would become the next file that is opened, and be printed to
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for number in stop_signals():
        signal.signal(number, _stop_at_once)
    # Removed from the environment, so that processes of the command do not take it for their own parent.
    if launcher := os.environ.pop(LAUNCHER, ""):
        from covey_verify.children import die_with

        die_with(int(launcher))
    parent = os.getpid()
    # Only the child returns from here on its own path, after the import of everything else.
    if (child := fork()) == 0:
        return _command(parent)
    for number in stop_signals():
        signal.signal(number, _Forwarding(child))
    _, status = os.waitpid(child, 0)
    code, folder = end_of_child()
    return _without_result(status, folder) if code is None else code


def _command(parent: int) -> int:
    with contextlib.suppress(ValueError, RuntimeError, OSError):  # there may be no standard error
        faulthandler.enable()
    from covey_verify.children import die_with

    die_with(parent)
    from covey.cli import main as command

    code = command(sys.argv[1:])
    tell_exit_code(code)
    # Python would search a million objects for cycles before it ends: seconds after the last line.
    gc.freeze()
    return code


def _stop_at_once(number: int, _: object) -> NoReturn:
    for other in stop_signals():  # the parent may be about to forward this one
        signal.signal(other, signal.SIG_IGN)
    name = signal.Signals(number).name
    exit_now(130 if number == signal.SIGINT else 75, f"stopped by {name}; there was nothing to save")


class _Forwarding:
    """A signal handler that forwards signals to the child."""

    def __init__(self, child: int) -> None:
        self.child, self.last = child, -REPEAT_SECONDS

    def __call__(self, number: int, _: object) -> None:
        moment = time.monotonic()
        # The child ends at once on a second signal. `timeout` sends each of its signals twice, so signals
        # within REPEAT_SECONDS seconds count as one.
        if moment - self.last >= REPEAT_SECONDS:
            count_forwarded_signal()
        self.last = moment
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, number)


def _without_result(status: int, where: str) -> int:
    """Report how the child ended, on the console and in the run's folder. Return the exit code."""
    import json
    from pathlib import Path

    from covey.errors import cause_of_signal, record_exit, resume_command
    from covey_verify.children import CRASHES, how_ended
    from covey_verify.errors import CoveyError

    code = os.waitstatus_to_exitcode(status)
    number = max(0, -code)
    how = f"was {how_ended(code)}" if number else f"exited with code {code}"
    crashed = number in (0, *CRASHES)
    why = cause_of_signal(number) if number else "a reward or a library called os._exit"
    folder = Path(where)
    run = folder if folder.is_absolute() and folder.is_dir() else None
    next_step = f". Continue from the last checkpoint with: {resume_command(run)}" if run else ""
    error = CoveyError(f"the process {how} before it returned a result: {why}{next_step}")
    error.code = CRASHED if crashed else 128 + number
    if run is not None:
        record_exit(run, error)
    with contextlib.suppress(OSError):
        # os.write, since Python's stream objects may be None or closed.
        if "--json" in sys.argv:
            os.write(1, (json.dumps({"error": str(error), "exit_code": error.code}) + "\n").encode())
    print_last_line(f"error: {error}")
    if not crashed:  # end by the same signal, so that whoever waits for this process sees it
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return error.code


if __name__ == "__main__":
    sys.exit(main())
