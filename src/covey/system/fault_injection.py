"""Fault injection: `--inject reward.hang@7,save.enospc@3,grad.nan@5` rehearses failures in your own run.

`place@N` injects the fault at the N-th visit of the place, counted from 1 in every process; `place@N-M` at
all visits from the N-th to the M-th.
"""

from __future__ import annotations

import difflib
import errno
import math
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, NoReturn

from covey_verify.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

PLACES: Mapping[str, str] = {
    "reward.hang": "a call of a reward function never returns",
    "reward.raise": "it raises an exception",
    "reward.exit": "it calls sys.exit",
    "reward.inf": "it returns infinity",
    "reward.none": "it returns None: not judged",
    "reward.count": "it returns one value too many, or a list where one number is due",
    "reward.text": "it returns a text",
    "step.hang": "a step never ends",
    "step.kill": "the process is killed (SIGKILL) at the start of a step",
    "step.sigterm": "the process is asked to stop (SIGTERM) at the start of a step",
    "memory.full": "the model runs out of memory in a micro-batch",
    "memory.sampling": "the model runs out of memory while completions are drawn, before a token",
    "loss.nan": "the loss of an update is not a number",
    "grad.nan": "the gradient of an update is not a number",
    "weights.nan": "a weight is not a number after an update",
    "save.full": "there is no free space before a save",
    "save.enospc": "the disk runs full while a checkpoint is written",
    "save.eio": "the disk fails while a checkpoint is written",
    "save.kill": "the process is killed (SIGKILL) while a checkpoint is written",
}
"""Name of each place -> the fault that can be injected there."""


class Faults:
    """The faults of `--inject`; without it, none."""

    def __init__(self, faults: str = "") -> None:
        self.ranges = [_parse_item(item) for item in faults.split(",") if item.strip()]
        self.visits: Counter[str] = Counter()

    def hit(self, fault: str) -> bool:
        """Whether this place's fault is due now. Every call counts as one visit."""
        self.visits[fault] += 1
        return any(p == fault and first <= self.visits[fault] <= last for p, first, last in self.ranges)

    def at_step(self) -> None:
        """Inject faults at the start of a step."""
        if self.hit("step.hang"):
            hang()
        if self.hit("step.kill"):
            die()
        if self.hit("step.sigterm"):
            os.kill(os.getpid(), signal.SIGTERM)

    def in_memory(self, fault: str) -> None:
        """Inject running out of memory."""
        if self.hit(fault):
            raise MemoryError("out of memory on purpose")

    def in_gradient(self, weights: Sequence[Tensor]) -> None:
        """Inject a NaN into an accumulated gradient, of weights as the optimizer has them."""
        if self.hit("grad.nan"):
            weights[0].grad = weights[0].detach() * math.nan

    def in_weights(self, weights: Sequence[Tensor]) -> None:
        """Inject a NaN into a weight after an update."""
        if self.hit("weights.nan"):
            weights[0].detach().view(-1)[0] = math.nan

    def in_save(self) -> None:
        """Inject faults while a checkpoint is written."""
        if self.hit("save.enospc"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.hit("save.eio"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.hit("save.kill"):
            die()

    def around(self, function: Callable[..., object]) -> Callable[..., object]:
        """Return a reward function that fails when a fault is due; the function itself without faults."""
        kinds = sorted({p.partition(".")[2] for p, *_ in self.ranges if p.startswith("reward.")})
        if not kinds:
            return function

        @wraps(function)
        def faulty(*arguments: object, **named: object) -> object:
            # All kinds count the visit, and the first that is due happens.
            due = [kind for kind in kinds if self.hit(f"reward.{kind}")]
            returned = function(*arguments, **named)
            return _FAILURES[due[0]](returned) if due else returned

        return faulty


def die() -> NoReturn:
    """End at once, as `kill -9` and a power failure do."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang() -> NoReturn:
    """Never return."""
    while True:
        time.sleep(3600)


def _raise(_: object) -> NoReturn:
    raise RuntimeError("a failure on purpose")


def _instead(value: object) -> Callable[[object], object]:
    """Return a function that replaces a score by ``value``; in the scores of a group, the first one."""
    return lambda returned: [value, *returned[1:]] if isinstance(returned, list) else value


_FAILURES: Mapping[str, Callable[[object], object]] = {
    "hang": lambda _: hang(),
    "raise": _raise,
    "exit": lambda _: sys.exit(0),
    "inf": _instead(float("inf")),
    "none": _instead(None),
    "text": _instead("good"),
    "count": lambda returned: [*returned, 0.0] if isinstance(returned, list) else [returned],
}


def _parse_item(item: str) -> tuple[str, int, int]:
    match = re.fullmatch(r"([a-z.]+)@([1-9]\d*)(?:-([1-9]\d*))?", item.strip())
    if match is None:
        raise ConfigError(f"--inject {item.strip()!r}: expected a place and a count, like grad.nan@5")
    name, first, last = match.groups()
    if name not in PLACES:
        near = difflib.get_close_matches(name, PLACES, n=1)
        advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(PLACES)}"
        raise ConfigError(f"--inject {name}: no such place; {advice}")
    return name, int(first), int(last or first)
