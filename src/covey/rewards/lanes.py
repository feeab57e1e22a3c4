"""Threads that queue for reward functions, and one event loop. Nobody waits for a hung one.

A user's plain function gets a lane of its own, one thread, so it never meets itself; verifiers that
say they are `concurrent` share a lane as wide as the machine. The thread waits for the function's process
(``worker``), or calls the function itself. Threads are daemons: one that hangs cannot keep the program
from ending, and its lane goes on with a fresh thread.
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
from typing import Any

from covey.machine import available_cpus
from covey.signals import running_since


class Task:
    """One call: its future, when it began, and how many seconds it may take."""

    def __init__(self, call: Callable[[], Any], limit: float) -> None:
        self.call, self.limit, self.future = call, limit, Future[Any]()
        self.started: float | None = None

    def run(self) -> None:
        """Do it, in whatever thread this is."""
        self.started = time.monotonic()
        with contextlib.suppress(InvalidStateError):  # it may have been given up
            try:
                self.future.set_result(self.call())
            except InvalidStateError:
                raise
            except Exception as error:
                self.future.set_exception(error)
            except BaseException as error:  # SystemExit, KeyboardInterrupt: not the user's at the keyboard
                self.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def left(self) -> float:
        """Seconds that it may still run. They begin again when a suspended process goes on."""
        return self.limit - (time.monotonic() - running_since(self.started) if self.started else 0.0)

    def late(self) -> bool:
        """Whether it has run for too long."""
        return self.left() < 0

    def wait(self, relieve: Callable[[], None]) -> Any:
        """The result. TimeoutError is raised ``limit`` seconds after the start.

        ``relieve`` is told to give up calls that are late, this one or another one that is in its way.
        """
        while True:
            try:
                return self.future.result(max(0.01, min(self.left(), 1.0)))
            except CancelledError:
                raise TimeoutError(f"no answer within {self.limit:g} s") from None
            except TimeoutError:
                if self.future.done() and not self.future.cancelled():
                    return self.future.result()
            relieve()
            if self.late():
                self.future.cancel()


class Lane:
    """Up to ``width`` threads that work off one queue."""

    def __init__(self, name: str, width: int) -> None:
        self.name, self.tasks = name, queue.SimpleQueue[Task | None]()
        self.unfinished: set[Task] = set()
        self.threads, self.width = 0, width

    def widen(self) -> None:
        """Another thread: for more work than threads, and when one is stuck."""
        threading.Thread(target=self._work, name=f"reward {self.name}", daemon=True).start()

    def close(self) -> None:
        """Let the threads end when they have worked off what there is."""
        for _ in range(self.threads):
            self.tasks.put(None)

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            if not task.future.cancelled():
                task.run()
            self.unfinished.discard(task)
            given_up = task.future.cancelled()
            del task  # a thread that waits holds on to nothing
            if given_up:
                return  # another thread has taken the place

    def relieve(self) -> None:
        """Give up calls that have run for too long; a fresh thread for each."""
        for task in tuple(self.unfinished):
            if task.late():
                self.unfinished.discard(task)
                if task.future.cancel():
                    self.widen()

    def submit(self, call: Callable[[], Any], limit: float) -> Task:
        """Queue a call."""
        task = Task(call, limit)
        self.unfinished.add(task)
        if self.threads < min(self.width, len(self.unfinished)):
            self.threads += 1
            self.widen()
        self.tasks.put(task)
        return task


class Lanes:
    """All lanes of a scorer, made when they are first needed."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        weakref.finalize(self, _close, self.lanes)
        self.loop: asyncio.AbstractEventLoop | None = None

    def thread(
        self, name: str, width: int, call: Callable[[], Any], limit: float
    ) -> tuple[Task, Callable[[], None]]:
        """Queue a call; the second value is what to do when it, or one before it, hangs."""
        if name not in self.lanes:
            self.lanes[name] = Lane(name, width)
        return self.lanes[name].submit(call, limit), self.lanes[name].relieve

    def coroutine(self, call: Coroutine[Any, Any, Any], limit: float) -> tuple[Task, Callable[[], None]]:
        """Start a coroutine on the event loop."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, name="reward loop", daemon=True).start()
        task = Task(lambda: None, limit)
        task.started = time.monotonic()
        task.future = asyncio.run_coroutine_threadsafe(call, self.loop)
        return task, lambda: None


def _close(lanes: dict[str, Lane]) -> None:
    for lane in lanes.values():
        lane.close()


SHARED_WIDTH = max(2, available_cpus())
