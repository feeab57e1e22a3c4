"""The one thread that computes, and its answers."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from pydantic import ValidationError

from covey.tinker.adapters import Base
from covey.tinker.passes import DrawRequest, sample
from covey.tinker.requests import sentence
from covey_verify.errors import CoveyError

GATHERING = 0.02
"""Seconds that a request for completions waits for others that can share its pass."""
Result: TypeAlias = Mapping[str, object] | bytes
"""The answer to a client: JSON, or a message of protobuf."""


@dataclass(eq=False)
class Job:
    """Something to compute, or completions to draw, and its future result."""

    work: Callable[[], Result] | DrawRequest | None
    """None once it is done: it holds memory."""
    result: Future[Result] = field(default_factory=Future)


class ComputeThread:
    """Does tasks in their order, but draws completions together that can share a pass.

    Their weights are snapshots, so it does not matter what is trained in between.
    """

    def __init__(self, base: Base) -> None:
        self.base = base
        self._waiting: deque[Job] = deque()
        self._arrival = threading.Condition()
        threading.Thread(target=self._run, name="tinker", daemon=True).start()

    def put(self, task: Job) -> None:
        """Queue a task."""
        with self._arrival:
            self._waiting.append(task)
            self._arrival.notify()

    def _run(self) -> None:
        while True:
            with self._arrival:
                self._arrival.wait_for(lambda: self._waiting)
                first = self._waiting.popleft()
            together = [first]
            if isinstance(first.work, DrawRequest):
                time.sleep(GATHERING)
                together += self._take_alike(first.work)
            for task, result in zip(together, self._done(together), strict=True):
                task.work = None
                task.result.set_result(result)

    def _take_alike(self, draw: DrawRequest) -> list[Job]:
        """Take all that can be drawn with this from the queue."""
        with self._arrival:
            jobs = [
                t for t in self._waiting if isinstance(t.work, DrawRequest) and t.work.alike == draw.alike
            ]
            self._waiting = deque(t for t in self._waiting if t not in jobs)
        return jobs

    def _done(self, tasks: Sequence[Job]) -> Sequence[Result]:
        try:
            draws = [t.work for t in tasks if isinstance(t.work, DrawRequest)]
            return sample(self.base, draws) if draws else [t.work() for t in tasks if callable(t.work)]
        # Any failure, such as out of memory, goes to the clients that wait; the thread lives on.
        except Exception as error:
            return [failure(error)] * len(tasks)


def failure(error: Exception) -> Result:
    """Return the answer in place of a result, in Tinker's form."""
    if isinstance(error, ValidationError):
        return {"error": sentence(error), "category": "user"}
    if isinstance(error, CoveyError):
        return {"error": str(error), "category": "user"}
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}
