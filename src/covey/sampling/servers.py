"""What is known of each server, and the work that they share."""

from __future__ import annotations

import http.client
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from covey.sampling.base import Request, Sampled, SamplingParams
from covey.sampling.dialects import Dialect, Misbehaved
from covey.types import Completion

TRY_AGAIN = 5.0
"""Seconds after which a server that was left out is tried again."""
Asking = Callable[[str, object, str, float, int], object]
"""How a server is reached: ``covey_verify.web.ask``, or another way with its signature."""
FAILURES = (OSError, http.client.HTTPException, ValueError, RecursionError, Misbehaved)
"""What asking a server may raise."""


@dataclass
class RemoteServer:
    """One server, and how it fares."""

    url: str
    dialect: Dialect | None = None
    """None: it has never answered."""
    model: str = ""
    version: int | None = None
    """Of the weights it has proven to have."""
    stamp: object = None
    """What its replies bear since it proved that; another one is of another start, or of other weights."""
    lost: str = ""
    """Why it is left out; empty: it takes part."""
    tried: float = -TRY_AGAIN
    """When it was last looked for, on the monotonic clock."""
    hangs: bool = False
    """Whether it was lost because it did not answer in time, after it had proven itself before."""
    compared: bool = False
    """Whether the frequencies of its draws have been, since it was last recognized."""
    spread: float | None = None
    """Mean difference of log-probs when it came with the right weights, nats: its rounding."""
    busy: int = 0
    """Requests for completions that it works on."""
    arrivals: int = 0
    """How often it has proven to have the weights of the time."""


@dataclass(frozen=True)
class Piece:
    """Completions of a request that are asked for together; one that was begun is alone."""

    request: int
    samples: Sequence[int]
    begun: Completion | None = None


@dataclass
class WorkList:
    """One call of ``sample``: what is left to ask, and what came back."""

    requests: Sequence[Request]
    params: SamplingParams
    todo: deque[Piece]
    results: queue.Queue[list[Sampled] | Exception | None] = field(default_factory=queue.Queue)
    """None: a server was lost or has weights to take; an exception: a mistake of ours, to be raised."""
    joined: dict[str, int] = field(default_factory=dict)
    """Address -> the arrival of a server since which it works on this."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    over: bool = False

    def again(self, piece: Piece) -> None:
        """Somebody has to go on with this, before anything else."""
        with self.changed:
            self.todo.appendleft(piece)
            self.changed.notify_all()


def timed_out(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, is that of a server that did not answer in time."""
    while error is not None:
        if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
            return True
        error = error.__cause__
    return False


def same_complaint(now: str, before: str) -> bool:
    """Whether two reasons for leaving a server out differ at most in their numbers, as of versions."""
    bare = partial(re.compile(r"\d[\d.e+-]*").sub, "")
    return bare(now) == bare(before)
