"""Time limits of tools: the seconds of a completion, and those that a batch of completions waits for.

The model decides how long its calls take. Without a bound one completion could hold a run: with calls that
hang, one after another, each until its own time is up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from covey_verify.threads import running_since


class Waiting:
    """The seconds that a batch of completions has waited for tools while nothing was sampled."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.waited = 0.0
        self._since: float | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Count the block as time spent waiting for a tool."""
        # Only the sampling loop waits, one block at a time; other threads read ``left`` meanwhile.
        self._since = begun = time.monotonic()
        try:
            yield
        finally:
            self._since = None
            # If the process was suspended meanwhile, only the time since it continued counts.
            self.waited += time.monotonic() - running_since(begun)

    def left(self) -> float:
        """Return the seconds that are left to wait."""
        since = self._since
        now = 0.0 if since is None else time.monotonic() - running_since(since)
        return self.seconds - self.waited - now


class Allowance:
    """The seconds that are left to the calls of a completion. Safe from any thread."""

    def __init__(self, seconds: float, batch: Waiting) -> None:
        self.batch = batch
        self._left = seconds
        self._lock = threading.Lock()

    def left(self) -> float:
        """Return the seconds that are left to the next call."""
        return min(self._left, self.batch.left())

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Count the block as time spent in a call."""
        begun = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._left -= time.monotonic() - running_since(begun)
