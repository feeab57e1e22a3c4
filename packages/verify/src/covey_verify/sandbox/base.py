"""The interface of a sandbox, which runs a whole program or calls one function many times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from covey_verify.sandbox.confine import Limits

OutcomeKind = Literal["ok", "error", "timeout", "crashed", "flood", "lost"]


class Outcome(NamedTuple):
    """The outcome of a run or a call; ``lost``: the machinery failed, and the candidate is unjudged."""

    kind: OutcomeKind
    value: Any = None
    """The output of a program, or the returned value of a call, encoded (``wire``)."""
    text: str = ""
    seconds: float = 0.0
    """The time of a program or a call, without the time in which the machine kept it waiting."""


MIN_SECONDS = 0.05
"""The least time for which another process is started."""
# (positional arguments, keyword arguments) of one call.
Arguments = tuple[Sequence[object], Mapping[str, object]]


class SandboxBackend(Protocol):
    """A backend that runs model-written code."""

    name: str

    @property
    def layers(self) -> list[str]:
        """Return the layers that confine the candidate, for the run's record."""
        ...

    def script(self, code: str, stdin: str, limits: Limits) -> Outcome:
        """Run a program; ``ok`` with its output if it ended with status 0."""
        ...

    def calls(
        self, code: str, entry: str, inputs: Sequence[Arguments], limits: Limits, call_seconds: float
    ) -> Iterator[Outcome]:
        """Call ``entry`` with each input, (args, settings), allowing ``call_seconds`` for each.

        ``limits.wall`` bounds all of them together.
        """
        ...


def too_long() -> Outcome:
    """Return the outcome of an input that was not tried because the check had used up its time."""
    return Outcome("timeout", text="not tried: the whole check had used up its time")


def reply_result(reply: object) -> Outcome:
    """Return the outcome of a call from the candidate's reply, which may be anything."""
    if not isinstance(reply, dict):
        return Outcome("crashed", text="no answer")
    if "value" in reply:
        return Outcome("ok", reply["value"])
    return Outcome("error", text=f"{reply.get('error')}: {str(reply.get('text'))[:200]}")
