"""Signals: requests to stop the run at the next safe point, and continuation after a suspension."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from covey.errors import Stopped
from covey.system.parent import TOGETHER, forwarded, leave, stop_signals
from covey_verify.threads import continued

SAVES = "stopping: what is being computed is finished or given up, and the state is saved"
"""Message at the first signal in a command that trains."""


class StopSignal:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a flag, the second into an immediate exit.

    ``max_minutes`` after its creation it requests a stop itself. ``then``: the effect of the first signal, in
    words; it is printed at once.
    """

    def __init__(self, max_minutes: float | None = None, then: str = "") -> None:
        self.then = then
        self.reason: str | None = None
        self.max_minutes = max_minutes
        self.started = time.monotonic()
        self._received = 0
        self._last = -TOGETHER

    def request(self, reason: str) -> None:
        """Ask the run to stop at its next safe point."""
        self.reason = self.reason or reason

    def check(self) -> None:
        """Raise Stopped if a stop was requested. Called at points where no work is half done."""
        if self.max_minutes is not None and time.monotonic() - self.started > 60 * self.max_minutes:
            self.request(f"stopped after {self.max_minutes:g} minutes")
        if self.reason is not None:
            raise Stopped(self.reason)

    @contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Handle the signals inside the block; the previous handlers are restored after it."""
        # Python lets only the main thread set handlers.
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {s: signal.signal(s, self._receive) for s in stop_signals()}
        previous[signal.SIGCONT] = signal.signal(signal.SIGCONT, continued)
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        self._received += now - self._last >= TOGETHER
        self._last = now
        # A terminal signals this process and its parent, which forwards it: two signals, one request.
        if max(self._received - forwarded(), forwarded()) > 1:
            name = signal.Signals(number).name
            leave(128 + number, f"stopped at once by {name}; what was saved before is kept")
        if self.reason is None and self.then:
            _tell(f"{self.then}. A second {signal.Signals(number).name} ends it at once")
        self.request(f"stopped by {signal.Signals(number).name}")


def _tell(text: str) -> None:
    """Write a line to standard error from a handler, bypassing Python's streams, which may be in use."""
    with suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), f"\n{text}\n".encode())
