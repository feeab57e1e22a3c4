"""Time limits of tools: how long a completion may use them, and how long a batch may wait for them.

The model decides how long its calls take. Without a bound one completion could hold up a run: its calls could
hang one after another, each until its own time is up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from covey_verify.threads import running_since


class WaitingTime:
    """The seconds that a batch of completions has waited for tools while nothing was sampled."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.waited = 0.0
        self._since: float | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Count the block as time spent waiting for a tool."""
        # Only the sampling loop waits, one block at a time; other threads call ``seconds_left`` meanwhile.
        self._since = start = time.monotonic()
        try:
            yield
        finally:
            self._since = None
            # If the process was suspended meanwhile, only the time since it continued counts.
            self.waited += time.monotonic() - running_since(start)

    def seconds_left(self) -> float:
        """Return the seconds for which the batch may still wait."""
        since = self._since
        current = 0.0 if since is None else time.monotonic() - running_since(since)
        return self.seconds - self.waited - current


class Allowance:
    """The seconds that the calls of a completion may still take. Safe from any thread."""

    def __init__(self, seconds: float, batch: WaitingTime) -> None:
        self.batch = batch
        self._remaining = seconds
        self._lock = threading.Lock()

    def seconds_left(self) -> float:
        """Return the seconds that the next call may take."""
        return min(self._remaining, self.batch.seconds_left())

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Count the block as time spent in a call."""
        start = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._remaining -= time.monotonic() - running_since(start)
