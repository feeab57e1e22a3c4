"""A cache that answers each question once, even if many threads ask at the same time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """A cache of the latest ``size`` answers.

    An answer that ``keeps`` refuses goes only to the threads that wait for it.
    """

    def __init__(self, size: int, keeps: Callable[[T], bool]) -> None:
        self.size = size
        self.keeps = keeps
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, Future[T]] = OrderedDict()

    def get(self, question: Hashable, ask: Callable[[], T]) -> T:
        """Return the answer to a question; ``ask`` is called unless it is known or being asked for."""
        with self._lock:
            future = self._answers.get(question)
            # The first thread to ask answers, outside of the lock; the others wait for its future.
            mine = future is None
            if future is None:
                future = self._answers[question] = Future()
                if len(self._answers) > self.size:
                    self._answers.popitem(last=False)
            self._answers.move_to_end(question)
        if mine:
            self._answer(question, future, ask)
        return future.result()

    def _answer(self, question: Hashable, future: Future[T], ask: Callable[[], T]) -> None:
        keep = False
        try:
            answer = ask()
            keep = self.keeps(answer)
            future.set_result(answer)
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                # Another thread may have asked anew since this answer was evicted.
                if not keep and self._answers.get(question) is future:
                    del self._answers[question]
