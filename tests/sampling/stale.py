"""A proxy that repeats an old reply of a server."""

from __future__ import annotations

import copy
import threading

from tests.sampling.stub import Reply


class Stale:
    """A proxy that gives the first request, once it is armed, the reply to the one before of its size."""

    def __init__(self) -> None:
        self.armed, self.before, self.lock = False, dict[int, Reply](), threading.Lock()

    def __call__(self, reply: Reply) -> Reply:
        size = len(reply["choices"]) if "choices" in reply else 1
        with self.lock:
            before = self.before.get(size, reply)
            self.before[size] = copy.deepcopy(reply)
            if not self.armed:
                return reply
            self.armed = False
            return before
