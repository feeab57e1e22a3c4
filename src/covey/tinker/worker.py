"""The thread that computes all requests, in their order."""

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
from covey.tinker.bodies import first_mistake
from covey.tinker.passes import DrawRequest, draw_completions
from covey_verify.errors import CoveyError

GATHER_SECONDS = 0.02
"""Seconds that a request for completions waits for others that can be sampled with it."""
Result: TypeAlias = Mapping[str, object] | bytes
"""The answer to a client: JSON, or a message of protobuf."""


@dataclass(eq=False)
class Job:
    """A computation or a request for completions, with its future result."""

    work: Callable[[], Result] | DrawRequest | None
    """None once it has been computed, because it holds memory."""
    result: Future[Result] = field(default_factory=Future)


class ComputeThread:
    """Computes jobs in their order, except that requests for completions may be sampled with an earlier one.

    That changes no result, because their weights are snapshots.
    """

    def __init__(self, base: Base) -> None:
        self.base = base
        self._waiting: deque[Job] = deque()
        self._arrival = threading.Condition()
        threading.Thread(target=self._run, name="tinker", daemon=True).start()

    def put(self, job: Job) -> None:
        """Queue a job."""
        with self._arrival:
            self._waiting.append(job)
            self._arrival.notify()

    def _run(self) -> None:
        while True:
            with self._arrival:
                self._arrival.wait_for(lambda: self._waiting)
                first = self._waiting.popleft()
            jobs = [first]
            if isinstance(first.work, DrawRequest):
                time.sleep(GATHER_SECONDS)
                jobs += self._take_same_pass(first.work)
            for job, result in zip(jobs, self._compute(jobs), strict=True):
                job.work = None
                job.result.set_result(result)

    def _take_same_pass(self, draw: DrawRequest) -> list[Job]:
        """Take the requests that can be sampled with this one from the queue."""
        with self._arrival:
            jobs = [
                job
                for job in self._waiting
                if isinstance(job.work, DrawRequest) and job.work.pass_key == draw.pass_key
            ]
            self._waiting = deque(job for job in self._waiting if job not in jobs)
        return jobs

    def _compute(self, jobs: Sequence[Job]) -> Sequence[Result]:
        try:
            draws = [job.work for job in jobs if isinstance(job.work, DrawRequest)]
            return (
                draw_completions(self.base, draws) if draws else [j.work() for j in jobs if callable(j.work)]
            )
        # Any failure, such as out of memory, is reported to the waiting clients; the thread must not end.
        except Exception as error:
            return [failure_result(error)] * len(jobs)


def failure_result(error: Exception) -> Result:
    """Return the answer to a request that failed, in Tinker's form."""
    if isinstance(error, ValidationError):
        return {"error": first_mistake(error), "category": "user"}
    if isinstance(error, CoveyError):
        return {"error": str(error), "category": "user"}
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}
