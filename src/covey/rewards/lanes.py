"""Where reward functions run: threads that queue, and one event loop. Nobody waits for a hung one.

A user's plain function gets a lane of its own, one thread, so it never meets itself; verifiers that
say they are `concurrent` share a lane as wide as the machine. Threads are daemons: a function that
hangs cannot keep the program from ending, and its lane goes on with a fresh thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any


class Task:
    """One call: its future, and when it began."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.future = call, Future[Any]()
        self.started: float | None = None

    def run(self) -> None:
        """Do it, in whatever thread this is."""
        self.started = time.monotonic()
        with contextlib.suppress(InvalidStateError):  # it may have been given up
            try:
                self.future.set_result(self.call())
            except InvalidStateError:
                raise
            except BaseException as error:
                self.future.set_exception(error)

    def wait(self, limit: float, late: Callable[[], None]) -> Any:
        """The result. ``limit`` seconds after the start ``late`` is told and TimeoutError raised."""
        while True:
            begun = self.started
            left = limit if begun is None else begun + limit - time.monotonic()
            try:
                return self.future.result(max(0.0, min(left, 1.0)))
            except TimeoutError:
                if self.future.done():
                    return self.future.result()
            if begun is not None and left <= 0:
                self.future.cancel()
                late()
                raise TimeoutError(f"no answer within {limit:g} s")


class Lane:
    """Threads that work off one queue."""

    def __init__(self, name: str, width: int) -> None:
        self.name, self.tasks = name, queue.SimpleQueue[Task]()
        for _ in range(width):
            self.widen()

    def widen(self) -> None:
        """Another thread: at the start, and when one is stuck."""
        threading.Thread(target=self._work, name=f"reward {self.name}", daemon=True).start()

    def _work(self) -> None:
        while True:
            task = self.tasks.get()
            if not task.future.cancelled():
                task.run()
            if task.future.cancelled():
                return  # it was given up while it ran; another thread has taken the place

    def submit(self, call: Callable[[], Any]) -> Task:
        """Queue a call."""
        task = Task(call)
        self.tasks.put(task)
        return task


class Lanes:
    """All lanes of a scorer, made when they are first needed."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    def thread(self, name: str, width: int, call: Callable[[], Any]) -> tuple[Task, Callable[[], None]]:
        """Queue a call; the second value is what to do when it hangs."""
        if name not in self.lanes:
            self.lanes[name] = Lane(name, width)
        return self.lanes[name].submit(call), self.lanes[name].widen

    def coroutine(self, call: Coroutine[Any, Any, Any]) -> tuple[Task, Callable[[], None]]:
        """Start a coroutine on the event loop."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, name="reward loop", daemon=True).start()
        task = Task(lambda: None)
        task.started = time.monotonic()
        task.future = asyncio.run_coroutine_threadsafe(call, self.loop)
        return task, lambda: None


SHARED_WIDTH = max(2, os.cpu_count() or 1)
