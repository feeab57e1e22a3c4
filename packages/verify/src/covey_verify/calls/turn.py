"""The parts of a model's turn: its thoughts, its answer, and the calls at its end.

All code that reads a model's text uses this. One pass goes over the marks of thoughts and of calls in their
order. A call is read as a whole, so that a mark within an argument is part of that argument.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from covey_verify.calls.call import ToolCall, Types
from covey_verify.calls.forms import TAGGED, CallForm
from covey_verify.extract import TAGS, Thoughts


class Turn(NamedTuple):
    """A turn of a model."""

    answer: str | None
    """The text after its thoughts, calls included; None if they never end."""
    written: tuple[ToolCall, ...]
    """The calls after its thoughts, wherever they are."""
    ended: bool
    """Whether it ends like a turn with calls."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls at its end; only these are carried out."""
        return self.written if self.ended else ()


def read_turn(
    text: str, thoughts: Thoughts = TAGS, form: CallForm = TAGGED, types: Types | None = None
) -> Turn:
    """Read a turn. ``thoughts`` are its marks, and whether it begins within thoughts.

    >>> read_turn('<think>so</think>I look. <tool_call>{"name": "now"}</tool_call>').calls
    (ToolCall(name='now', arguments={}, wrong=''),)
    >>> read_turn('<tool_call>{"name": "now"}</tool_call> so</think>3', Thoughts(begun=True))
    Turn(answer='3', written=(), ended=False)
    >>> read_turn("<think>so").answer is None, read_turn("<tool_call>now</tool_call>").calls[0].wrong
    (True, 'this is no JSON object with "name" and "arguments"')
    """
    marks = _marks(form, thoughts.open, thoughts.close)
    inside = thoughts.begun
    start = 0  # of the answer
    calls = list[ToolCall]()
    mark = marks.search(text)
    while mark is not None:
        position = mark.end()
        kind = mark.lastgroup
        if kind == "close":
            # All calls before it were within thoughts.
            inside = False
            start = position
            calls = []
        elif kind == "open":
            inside = True
        else:
            calls_here, position = form.read(text, mark.start("call"), types or {})
            calls += calls_here if not inside else []
        mark = marks.search(text, position)
    ended = form.ends is None or form.ends.search(text) is not None
    return Turn(None if inside else text[start:], () if inside else tuple(calls), ended)


@lru_cache(64)
def _marks(form: CallForm, opening: str, closing: str) -> re.Pattern[str]:
    """Return the pattern of a call's beginning and of the marks of thoughts, if a model has such marks."""
    begin = rf"(?:\A|(?<={re.escape(closing)}))" if form.first else ""
    named = {"open": opening, "close": closing}
    # The call comes first, because it is the longer match where both begin.
    kinds = [f"{begin}(?P<call>{form.mark.pattern})"]
    kinds += [f"(?P<{name}>{re.escape(mark)})" for name, mark in named.items() if mark]
    return re.compile("|".join(kinds), re.DOTALL)
