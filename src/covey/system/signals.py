"""Signals: requests to stop the run at the next safe point, and continuation after a suspension."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from covey.errors import Stopped
from covey.system.parent import REPEAT_SECONDS, exit_now, forwarded_signals, stop_signals
from covey.system.text import Say
from covey_verify.threads import note_continue

SECOND_SIGNAL_WORDS = {signal.SIGINT: "Ctrl-C again"}
"""Users' words for the second signal; `a second SIGTERM` for the others."""

NOTHING_SAVED = "there was nothing to save"


class StopSignal:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request, the second into an immediate exit.

    ``max_minutes`` after its creation it requests a stop itself. Signals count only inside ``listening``,
    where something can be lost; elsewhere the process's own handlers end it.
    """

    def __init__(self, max_minutes: float | None = None) -> None:
        self.reason: str | None = None
        self.max_minutes = max_minutes
        self.started = time.monotonic()
        self._received = 0
        self._last = -REPEAT_SECONDS

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
    def listening(
        self, answer: Say = lambda _: None, at_once: Callable[[], str] = lambda: NOTHING_SAVED
    ) -> Iterator[StopSignal]:
        """Handle the signals inside the block; the previous handlers are restored after it.

        ``answer`` tells the user at the first signal what follows; it gets the name of the second.
        ``at_once`` says what the second one loses, and what to do then.
        """
        # Python lets only the main thread set handlers.
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        # The main thread may be in C code for long. So another one hears the signals: C code of Python writes
        # their numbers to the pipe when they arrive.
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        thread = threading.Thread(
            target=self._answer_signals, args=(read_end, answer, at_once), name="signals", daemon=True
        )
        thread.start()
        previous = {s: signal.signal(s, self._receive) for s in stop_signals()}
        previous[signal.SIGCONT] = signal.signal(signal.SIGCONT, note_continue)
        before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(write_end)
            thread.join()
            os.close(read_end)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.request(f"stopped by {signal.Signals(number).name}")

    def _answer_signals(self, read_end: int, answer: Say, at_once: Callable[[], str]) -> None:
        """Answer the signals, in a thread of their own, until the pipe is closed."""
        for byte in iter(partial(os.read, read_end, 1), b""):
            number = byte[0]
            if number not in stop_signals():
                continue
            name = signal.Signals(number).name
            moment = time.monotonic()
            another = moment - self._last >= REPEAT_SECONDS
            self._received += another
            self._last = moment
            # A terminal signals this process and its parent, which forwards it: two signals, one request.
            if max(self._received - forwarded_signals(), forwarded_signals()) > 1:
                exit_now(128 + number, f"stopped at once by {name}; {at_once()}")
            if another and self._received == 1:
                # Not here: nobody may read what it prints, and the second signal has to be heard.
                words = SECOND_SIGNAL_WORDS.get(signal.Signals(number), f"a second {name}")
                threading.Thread(target=answer, args=(words,), daemon=True).start()


@contextmanager
def raising_stopped(outcome: str) -> Iterator[None]:
    """Raise Stopped at a signal inside the block, so that what is half written is removed on the way out.

    Elsewhere a signal ends the process at once. ``outcome`` ends the message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        for other in stop_signals():  # the removal is not to be interrupted
            signal.signal(other, signal.SIG_IGN)
        stopped = Stopped(f"stopped by {signal.Signals(number).name}; {outcome}")
        if number == signal.SIGINT:
            stopped.code = 130
        raise stopped

    previous = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _reset_in_child() -> None:
    """Let a forked child hear nothing of the parent's pipe, and end by signals as any process does."""
    for number in stop_signals():
        handler = signal.getsignal(number)
        if isinstance(getattr(handler, "__self__", None), StopSignal):
            signal.set_wakeup_fd(-1)
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset_in_child)
