"""Prefetching: groups are drawn in a thread of their own before a training step asks for them.

Tickets number the problems in the order of the data, epoch after epoch. They are begun and taken in
this order, in whatever order they end: no group is dropped because it takes long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
DrawAhead = Callable[[range, Callable[[], None]], Iterator[tuple[int, T]]]
"""(tickets, callback for each completion that ends) -> each ticket with its group, once that is drawn."""


class _Closed(Exception):
    """Raised in the sampling thread when no step asks for more."""


class Prefetcher(Generic[T]):
    """A thread that draws groups, up to a limit that moves with the training."""

    def __init__(self, draw: DrawAhead[T], first: int) -> None:
        self._draw = draw
        self._next = first
        self._until = first
        self._ready: dict[int, T] = {}
        self._ended = 0
        self._closed = False
        self._failed: BaseException | None = None
        # Guards the fields above, which both threads use.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="sampling", daemon=True)

    def take(self, tickets: Sequence[int], until: int, progress: Callable[[int, int], None]) -> list[T]:
        """Return the groups of these tickets; all below ``until`` may be drawn from now on.

        Raises any error of the sampling thread.
        """
        with self._changed:
            self._until = max(self._until, until)
            self._changed.notify_all()
            if self._thread.ident is None:
                self._thread.start()
        ready = ended = 0
        while ready < len(tickets):
            with self._changed:
                # ``_ended`` counts completions too, so the loop wakes for progress and not only for whole
                # groups.
                while self._ended == ended and self._failed is None:
                    self._changed.wait()
                if self._failed is not None:
                    raise self._failed
                ended = self._ended
                ready = sum(t in self._ready for t in tickets)
            # Outside the lock: progress may raise to stop, or take its time.
            progress(ready, len(tickets))
        return [self._ready.pop(t) for t in tickets]

    def close(self) -> None:
        """Stop the thread at the next completion that ends; unfinished groups are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._next < self._until)
                    if self._closed:
                        return
                    tickets = range(self._next, self._until)
                    self._next = self._until
                for ticket, group in self._draw(tickets, self._one_ended):
                    with self._changed:
                        self._ready[ticket] = group
                    # Wakes ``take`` again: it looks for whole groups.
                    self._one_ended()
        except _Closed:
            pass
        except BaseException as error:  # ``take`` raises it in the training thread
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _one_ended(self) -> None:
        with self._changed:
            if self._closed:
                # The sampler has no way to be cancelled; raising from its callback ends the draw.
                raise _Closed
            self._ended += 1
            self._changed.notify_all()
