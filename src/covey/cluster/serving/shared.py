"""One model for many callers: a thread owns it, and requests that wait together are sampled together."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from covey.models.policy import Policy
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from covey.types import Completion
from covey_verify.errors import CoveyError

T = TypeVar("T")
GATHER_SECONDS = 0.01
"""Seconds that the first request waits for others: a caller's requests come close together."""


def new_instance() -> str:
    """Return an id that no other start and no other load of weights has."""
    return secrets.token_hex(8)


class TooBusy(CoveyError):
    """Raised when more is waiting than the server may hold."""


class SampleAnswer(NamedTuple):
    """The answer to a request."""

    version: int
    """Version of the weights that sampled."""
    prompt: np.ndarray
    """(P,) int64."""
    completions: list[Completion]
    """One per random stream."""


@dataclass
class _QueuedRequest:
    """One caller's request and its future answer."""

    request: Callable[[], Request]
    """Makes the request, in the model's thread: encoding a long prompt takes a while."""
    count: int
    """Number of completions."""
    params: SamplingParams
    answer: Future[SampleAnswer] = field(default_factory=Future)


@dataclass
class _QueuedWork(Generic[T]):
    """Work to do while nothing is sampled."""

    work: Callable[[], T]
    answer: Future[T] = field(default_factory=Future)


class SharedModel:
    """Samples for all callers. Requests that wait at the same time share a pass if their parameters agree.

    Only ``max_tokens`` may differ, as it does in requests that continue after a tool's answer.
    """

    def __init__(self, policy: Policy, max_running: int, most_waiting: int = 65_536) -> None:
        """``most_waiting`` is in completions. Raises ConfigError for a model that cannot be sampled from."""
        self.policy = policy
        policy.draw_from_all()
        self.version = 0
        self.instance = new_instance()
        """Id of these weights since they were loaded. Another start has another id, and so has another load,
        which may come from another run under the same version.
        """
        self._sampler = LocalSampler(policy, max_running)
        self._sampler.check()
        self._most = most_waiting
        self._waiting = 0
        self._open = True
        self._lock = threading.Lock()
        # Not a SimpleQueue: in Python 3.11 its `get` may wait forever once a short timeout has passed.
        self._queue: queue.Queue[_QueuedRequest | _QueuedWork[None]] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def ask(self, request: Callable[[], Request], count: int, params: SamplingParams) -> Future[SampleAnswer]:
        """Queue a request of ``count`` completions; it is made in the model's thread. Raises TooBusy."""
        with self._lock:
            if self._waiting + count > self._most:
                raise TooBusy(f"{self._waiting} completions are waiting; ask again later")
            self._waiting += count
        queued = _QueuedRequest(request, count, params)
        queued.answer.add_done_callback(lambda answer: self._leave(count if answer.cancelled() else 0))
        self._queue.put(queued)
        return queued.answer

    def _leave(self, count: int) -> None:
        """Note that ``count`` completions wait no longer."""
        with self._lock:
            self._waiting -= count

    def queue_work(self, work: Callable[[], None]) -> Future[None]:
        """Queue work after all earlier requests and before all later ones."""
        between = _QueuedWork(work)
        self._queue.put(between)
        return between.answer

    def close(self) -> None:
        """End the thread after all that is queued."""
        self._open = False
        # Wakes the thread, which then sees that it is to end.
        self.queue_work(lambda: None)
        self._thread.join()

    def _work(self) -> None:
        # In order of arrival. Each round answers the first entry, and with it all that may share its pass.
        held: list[_QueuedRequest | _QueuedWork[None]] = []
        while self._open or held:
            held += self._take_arrivals(wait=not held)
            first = held[0]
            if isinstance(first, _QueuedWork):
                held.pop(0)
                _answer(first.answer, first.work)
                continue
            # Those after work between two passes must not overtake it.
            turn = next((i for i, x in enumerate(held) if not isinstance(x, _QueuedRequest)), len(held))
            before = [x for x in held[:turn] if isinstance(x, _QueuedRequest)]
            alike = [_but_length(x.params) == _but_length(first.params) for x in before]
            held = [*(x for x, same in zip(before, alike, strict=True) if not same), *held[turn:]]
            self._sample([x for x, same in zip(before, alike, strict=True) if same])

    def _take_arrivals(self, wait: bool) -> Iterator[_QueuedRequest | _QueuedWork[None]]:
        """Yield new entries of the queue; with ``wait`` at least one, and entries that follow shortly."""
        if wait:
            yield self._queue.get()
        until = time.monotonic() + (GATHER_SECONDS if wait else 0)
        while True:
            try:
                yield self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return

    def _sample(self, together: list[_QueuedRequest]) -> None:
        pairs = [(x, _make_request(x)) for x in together]
        self._leave(sum(x.count for x in together if not x.answer.cancelled()))
        open_ = [(x, request) for x, request in pairs if request is not None]
        if not open_:
            return
        completions: list[dict[int, Completion]] = [{} for _ in open_]
        # The pass runs to the longest; each request is bounded by its own max_tokens.
        requests = [replace(request, max_tokens=x.params.max_tokens) for x, request in open_]
        longest = max(x.params.max_tokens for x, _ in open_)
        params = replace(open_[0][0].params, max_tokens=longest)
        try:
            for sampled in self._sampler.sample(requests, params):
                queued, request = open_[sampled.request]
                mine = completions[sampled.request]
                mine[sampled.sample] = sampled.completion
                # A caller is answered once its own completions are there, while others are still sampled.
                if len(mine) == queued.count:
                    in_order = [mine[i] for i in range(len(mine))]
                    queued.answer.set_result(SampleAnswer(self.version, request.prompt, in_order))
        # Of the sampler, out of memory say: all that are not answered get it, and the thread lives on.
        except Exception as error:
            for queued, _ in open_:
                if not queued.answer.done():
                    queued.answer.set_exception(error)


def _make_request(queued: _QueuedRequest) -> Request | None:
    """Make a request; None if its caller has gone, or if it cannot be made and the caller was told why."""
    # False: the caller has cancelled. From here on the future cannot be cancelled any more.
    if not queued.answer.set_running_or_notify_cancel():
        return None
    try:
        return queued.request()
    except Exception as error:
        queued.answer.set_exception(error)
        return None


def _but_length(params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=0)


def _answer(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
