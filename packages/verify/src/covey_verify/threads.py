"""Thread pools for reward functions, and one event loop; a function that hangs blocks no other.

A user's plain function gets a pool of one thread, so it is never called twice at once; verifiers that declare
themselves `concurrent` share a pool as wide as the machine. A ThreadPoolExecutor would not do: a hanging
thread would keep the program from ending, and it cannot replace a thread that is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, Generic, TypeVar

from covey_verify.machine import available_cpus

T = TypeVar("T")
SHARED_SIZE = max(2, available_cpus())
STOPPED = 0.5
"""Seconds by which a wait may exceed its timeout before the process counts as having been stopped."""


_continued = 0.0
"""Monotonic time at which the process was last continued."""


def running_since(start: float) -> float:
    """Return ``start`` (monotonic clock), or the time when this process was continued (SIGCONT), if later."""
    return max(start, _continued)


def note_continue(*_: object) -> None:
    """Note that the process runs again, so that time limits do not count the time before."""
    global _continued  # noqa: PLW0603 - a process has one, and time limits everywhere depend on it
    _continued = time.monotonic()


class Call(Generic[T]):
    """A call under way: its future, its start, and the number of seconds that it may take."""

    def __init__(
        self, limit: float, function: Callable[[], T] | None = None, pool: ThreadPool | None = None
    ) -> None:
        self.limit = limit
        self.function = function
        self.pool = pool
        self.future = Future[T]()
        self.started: float | None = None
        self.kept_waiting: Callable[[], float] = lambda: 0.0
        """Returns the seconds in which the machine kept the call waiting; they do not count."""

    @classmethod
    def begin(
        cls, future: Future[T], limit: float, kept_waiting: Callable[[], float] | None = None
    ) -> Call[T]:
        """Return a call that begins now and is answered by something other than a thread pool."""
        call = cls(limit)
        call.future = future
        call.started = time.monotonic()
        call.kept_waiting = kept_waiting or call.kept_waiting
        return call

    def run(self) -> None:
        """Make the call in the current thread."""
        assert self.function is not None
        self.started = time.monotonic()
        with contextlib.suppress(InvalidStateError):  # nobody may be waiting for it any more
            try:
                self.future.set_result(self.function())
            except InvalidStateError:
                raise
            except Exception as error:
                self.future.set_exception(error)
            except BaseException as error:  # SystemExit or KeyboardInterrupt, raised by the function
                self.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def seconds_left(self) -> float:
        """Return the seconds left; the limit starts anew when a suspended process continues."""
        return self.limit - (time.monotonic() - running_since(self.started) if self.started else 0.0)

    def late(self) -> bool:
        """Return whether it has run for too long."""
        return self.seconds_left() < 0

    def result(self) -> T:
        """Wait for the result. Raises TimeoutError ``limit`` seconds after the start."""
        while True:
            # Short waits, as `seconds_left` may change: the call may not have started, or the process may be
            # suspended.
            wait = max(0.01, min(self.seconds_left(), 1.0))
            began = time.monotonic()
            try:
                return self.future.result(wait)
            except CancelledError:
                raise TimeoutError(f"no answer within {self.limit:g} s") from None
            except TimeoutError:
                if self.future.done() and not self.future.cancelled():
                    return self.future.result()
            # The process was stopped, and the main thread may not have seen SIGCONT yet.
            if time.monotonic() - began > wait + STOPPED:
                note_continue()
            if self.pool is not None:
                self.pool.replace_stuck()  # a stuck call may be ahead in the queue
            if self.late() and self.seconds_left() + self.kept_waiting() < 0:
                self.future.cancel()


class ThreadPool:
    """A pool of up to ``size`` daemon threads with one queue."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.queue = queue.SimpleQueue[Call[Any] | None]()
        self.unfinished: set[Call[Any]] = set()
        self.threads = 0
        self.size = size

    def submit(self, function: Callable[[], T], limit: float) -> Call[T]:
        """Queue a call."""
        call = Call(limit, function, self)
        self.unfinished.add(call)
        if self.threads < min(self.size, len(self.unfinished)):
            self.threads += 1
            self._start_thread()
        self.queue.put(call)
        return call

    def replace_stuck(self) -> None:
        """Cancel calls that have run for too long, and start a new thread for each."""
        for call in tuple(self.unfinished):
            if call.late():
                self.unfinished.discard(call)
                # False if the result has just arrived; the thread is free then.
                if call.future.cancel():
                    self._start_thread()

    def close(self) -> None:
        """Let the threads end after the calls that are queued now."""
        for _ in range(self.threads):
            self.queue.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name=f"reward {self.name}", daemon=True).start()

    def _work(self) -> None:
        while (call := self.queue.get()) is not None:
            if not call.future.cancelled():
                call.run()
            self.unfinished.discard(call)
            given_up = call.future.cancelled()
            del call  # so that a waiting thread keeps no call alive
            if given_up:
                return  # another thread has replaced this thread


class Executor:
    """The thread pools and the event loop of a run's rewards, created when first needed."""

    def __init__(self) -> None:
        self.pools: dict[str, ThreadPool] = {}
        weakref.finalize(self, _close, self.pools)
        self.loop: asyncio.AbstractEventLoop | None = None

    def submit(self, name: str, size: int, function: Callable[[], T], limit: float) -> Call[T]:
        """Queue a call in the pool of this name."""
        if name not in self.pools:
            self.pools[name] = ThreadPool(name, size)
        return self.pools[name].submit(function, limit)

    def submit_async(self, coroutine: Coroutine[object, object, T], limit: float) -> Call[T]:
        """Start a coroutine on the event loop."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, name="reward loop", daemon=True).start()
        return Call.begin(asyncio.run_coroutine_threadsafe(coroutine, self.loop), limit)


def _close(pools: dict[str, ThreadPool]) -> None:
    for pool in pools.values():
        pool.close()
