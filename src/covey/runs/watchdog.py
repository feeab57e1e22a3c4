"""The stall watchdog: end a run that makes no progress, and write down the stacks of all its threads."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from covey.errors import STALLED, record_exit, resume_command
from covey.system.parent import exit_now
from covey.system.processes import is_rank_zero, rank
from covey_verify.errors import CoveyError

STACKS = "stacks.txt"


class Watchdog:
    """Waits for ``progress`` in a thread of its own; the main thread of a stalled run cannot help itself."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder = folder
        self.minutes = minutes
        self.idle = 0.0
        self._over = threading.Event()

    def progress(self) -> None:
        """Note that something was done: a completion, a micro-batch, a step."""
        self.idle = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """End the process if there is no progress inside the block."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.progress()
        if self.minutes:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            if self.minutes:
                thread.join()

    def _watch(self) -> None:
        # Its own ticks are counted instead of the clock, so that a suspended process has not stalled.
        tick = min(1.0, self.minutes * 6)
        try:
            while not self._over.wait(tick):
                # If C code holds the interpreter lock, this thread is blocked too; a timer in C then shows
                # what holds it. The timer does not end the process, which may have been suspended.
                with contextlib.suppress(ValueError, OSError, RuntimeError):  # there may be no standard error
                    faulthandler.dump_traceback_later(60 * self.minutes + 2 * tick)
                self.idle += tick
                if self.idle > 60 * self.minutes:
                    self._end()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _end(self) -> None:
        stacks = STACKS if is_rank_zero() else f"{rank()}.{STACKS}"
        error = CoveyError(
            f"{self.folder}: no progress for {self.minutes:g} minutes (guards.stall_minutes); "
            f"{self.folder / stacks} has the stack of every thread. Continue from the last checkpoint with: "
            f"{resume_command(self.folder)}"
        )
        error.code = STALLED
        with contextlib.suppress(OSError), (self.folder / stacks).open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        record_exit(self.folder, error)
        exit_now(STALLED, str(error))
