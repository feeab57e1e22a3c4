"""A completion, read: everything that rewards, votes and people take from what a model wrote.

Built-in rewards get thoughts between `<think>` and `</think>`, whatever the marks of the model's template
are; users' functions get the text as the model wrote it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import NamedTuple

from covey.types import Completion, Problem
from covey_verify.calls.call import ToolCall, as_message
from covey_verify.calls.forms import form_of_text
from covey_verify.calls.turn import read_turn
from covey_verify.extract import THINK_CLOSE, THINK_OPEN, Thoughts

Message = Mapping[str, object]


class Tagged(NamedTuple):
    """A model's text with its thoughts between `<think>` and `</think>`, whatever its own marks are."""

    text: str
    moved: Sequence[tuple[int, int]] = ()
    """(end of one of the model's marks, number of characters by which all text after it has moved)."""

    def positions(self, positions: Sequence[int]) -> list[int]:
        """Return positions in the model's own text as positions in this text."""
        mark_ends = [end for end, _ in self.moved]
        shifts = [0, *(shift for _, shift in self.moved)]
        # bisect counts the marks that end at or before a position; the shift of the last one holds there.
        moved = [position + shifts[bisect_right(mark_ends, position)] for position in positions]
        return [min(len(self.text), position) for position in moved]


def in_tags(text: str, thoughts: Thoughts) -> Tagged:
    """Return a text with a template's marks of thoughts as tags, including a mark that the prompt has opened.

    >>> in_tags("so it is[/THINK]3", Thoughts("[THINK]", "[/THINK]", begun=True)).text
    '<think>so it is</think>3'
    """
    opening = THINK_OPEN if thoughts.begun else ""
    # Marks around the answer are removed, as rewards expect none.
    marks = {thoughts.open: THINK_OPEN, thoughts.close: THINK_CLOSE, **dict.fromkeys(thoughts.answer, "")}
    if all(mark == tag for mark, tag in marks.items()):
        return Tagged(opening + text, ((0, len(opening)),) if opening else ())
    parts = [opening]
    moved = [(0, len(opening))]
    read = 0
    shift = len(opening)
    inside = thoughts.begun
    # Longest first: one mark may be the beginning of another.
    words = sorted({*marks, THINK_OPEN, THINK_CLOSE}, key=len, reverse=True)
    for mark in re.finditer("|".join(map(re.escape, words)), text):
        # Tags that are not the model's marks end no thoughts of its own.
        tag = marks.get(mark[0], "" if inside else mark[0])
        inside = {thoughts.open: True, thoughts.close: False}.get(mark[0], inside)
        shift += len(tag) - len(mark[0])
        parts += [text[read : mark.start()], tag]
        moved.append((mark.end(), shift))
        read = mark.end()
    return Tagged("".join([*parts, text[read:]]), moved)


CallReader = Callable[[Problem, Completion], Sequence[ToolCall]]
"""Returns the calls at the end of a completion of one turn."""


def calls_by_text(problem: Problem, completion: Completion) -> Sequence[ToolCall]:
    """Return the calls where no model is known: in the form whose mark comes first in the text."""
    text = completion.text
    return read_turn(text, problem.thoughts, form_of_text(text)).calls


@dataclass(frozen=True)
class ReplyReader:
    """Reads the texts of a run's model. Without a model, a call is read by its own form."""

    decode: Callable[[Sequence[int]], str] = lambda _: ""
    """Token ids -> their text."""
    calls: CallReader = calls_by_text

    def read(self, problem: Problem, completion: Completion) -> Reply:
        """Read the completion of a problem."""
        return Reply(problem, completion, self)


@dataclass(frozen=True)
class Reply:
    """A completion as a model wrote it (`text`, `turns`), and as built-in rewards read it."""

    problem: Problem
    completion: Completion
    reader: ReplyReader

    @property
    def text(self) -> str:
        """The text of all turns, with the model's own marks and without the ends of turns."""
        return self.completion.text

    @cached_property
    def turns(self) -> Sequence[Message]:
        """The turns of model and tools in order, the model's with their calls."""
        if self.completion.transcript.turns:
            return [dict(turn) for turn in self.completion.transcript.turns]
        message: dict[str, object] = {"role": "assistant", "content": self.text}
        calls = self.reader.calls(self.problem, self.completion)
        if calls:
            message["tool_calls"] = list(map(as_message, calls))
        return [message]

    @cached_property
    def tagged(self) -> Tagged:
        """The text with thoughts in tags."""
        if self.completion.transcript.turns and self._marked_turns[-1][1].begun:
            # The last turn begins within thoughts, so its own opening tag has to be shown.
            return _join_turns([in_tags(text, marks) for text, marks in self._marked_turns])
        return in_tags(self.text, self.problem.thoughts)

    @property
    def answer(self) -> str | None:
        """The text after the thoughts, of the last turn if there are several; None if they never end."""
        return read_turn(self.tagged.text).answer

    @cached_property
    def tagged_turns(self) -> Sequence[Message]:
        """The turns with thoughts in tags."""
        texts = (in_tags(text, marks).text for text, marks in self._marked_turns)
        return [{**t, "content": next(texts)} if t["role"] == "assistant" else t for t in self.turns]

    @cached_property
    def _marked_turns(self) -> Sequence[tuple[str, Thoughts]]:
        """The text of each turn of the model, with the marks of its thoughts, which its header may open."""
        first = self.problem.thoughts
        if not self.completion.transcript.turns:
            return [(self.text, first)]
        # A tool's answer is followed by the next turn's header, which may open thoughts as the prompt does.
        parts = self.completion.parts
        inserted = (self.reader.decode(ids.tolist()) for sampled, ids in parts if not sampled)
        marks = chain([first], map(first.begun_by, inserted), repeat(first._replace(begun=False)))
        texts = [str(turn["content"]) for turn in self.turns if turn["role"] == "assistant"]
        return list(zip(texts, marks, strict=False))


def _join_turns(parts: Sequence[Tagged]) -> Tagged:
    """Return the texts of several turns as one."""
    moved = list[tuple[int, int]]()
    length = 0  # of the model's own text, in which the marks have not moved anything
    shift = 0
    for part in parts:
        moved += [(length + end, shift + part_shift) for end, part_shift in part.moved]
        last_shift = part.moved[-1][1] if part.moved else 0
        length += len(part.text) - last_shift
        shift += last_shift
    return Tagged("".join(part.text for part in parts), moved)
