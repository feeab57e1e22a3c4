"""What a sandbox is: a place to run a whole program, or to call one function many times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from covey_verify.sandbox.confine import Limits


class Outcome(NamedTuple):
    """How a run or a call ended. ``lost``: the machinery failed, so nothing is known of the candidate."""

    kind: Literal["ok", "error", "timeout", "crashed", "flood", "lost"]
    value: Any = None
    """Of a program its output; of a call what it returned, encoded (``wire``)."""
    text: str = ""


Arguments = tuple[Sequence[object], Mapping[str, object]]


class SandboxBackend(Protocol):
    """A place where model-written code runs."""

    name: str
    interactive: bool
    """Whether inputs can be handed over one by one, so that the candidate never sees how many there
    are, and tests written as code can be run."""

    @property
    def layers(self) -> list[str]:
        """What holds the candidate, for the record."""
        ...

    def script(self, code: str, stdin: str, limits: Limits) -> Outcome:
        """Run a program; ``ok`` with its output if it ended with status 0."""
        ...

    def calls(
        self, code: str, entry: str, inputs: Sequence[Arguments], limits: Limits, each: float
    ) -> Iterator[Outcome]:
        """Call ``entry`` with each input, (args, settings), allowing ``each`` seconds for one.

        ``limits.wall`` bounds all of them together.
        """
        ...


def too_long() -> Outcome:
    """Of what was not tried, because the whole check had used up its time."""
    return Outcome("timeout", text="not tried: the whole check had used up its time")


def reply_result(reply: object) -> Outcome:
    """A candidate's reply to a call, whatever it sent."""
    if not isinstance(reply, dict):
        return Outcome("crashed", text="no answer")
    if "value" in reply:
        return Outcome("ok", reply["value"])
    return Outcome("error", text=f"{reply.get('error')}: {str(reply.get('text'))[:200]}")
