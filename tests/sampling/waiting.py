"""Waiting for what another thread does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.sampling.stub import Stub


def soon(true: Callable[[], object]) -> None:
    """Wait for something to be true, for a while."""
    ends = time.monotonic() + 20
    while not true() and time.monotonic() < ends:
        time.sleep(0.01)


def only_after(stub: Stub, other: Stub) -> None:
    """Let a server answer once the other one has been asked: it might have done all the work by then."""
    came, own = threading.Event(), other.before

    def comes() -> object:
        came.set()
        return own()

    other.before, stub.before = comes, lambda: soon(came.is_set)
