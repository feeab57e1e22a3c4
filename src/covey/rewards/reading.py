"""Completions as built-in rewards read them, with thoughts between tags whatever the template's marks are."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from covey.types import TAGS, Completion, Problem, Thoughts
from covey_verify.extract import THINK_CLOSE, THINK_OPEN

CallReader = Callable[[Problem, Completion], Sequence[Mapping[str, object]]]
"""Returns the tool calls at the end of a one-turn completion, in the form that messages have."""


class Tagged(NamedTuple):
    """A model's text with its thoughts between `<think>` and `</think>`, whatever its own marks are."""

    text: str
    moved: Sequence[tuple[int, int]] = ()
    """(end of one of the model's marks, number of characters by which all text after it has moved)."""

    def places(self, ends: Sequence[int]) -> list[int]:
        """Return where places of the model's own text are in this text."""
        steps = [place for place, _ in self.moved]
        shifts = [0, *(shift for _, shift in self.moved)]
        # bisect finds the last mark that ends at or before the place; its shift holds from there on.
        return [min(len(self.text), end + shifts[bisect_right(steps, end)]) for end in ends]


def in_tags(text: str, thoughts: Thoughts) -> Tagged:
    """Return a text with a template's marks of thoughts as tags, including a mark that the prompt has opened.

    >>> in_tags("so it is[/THINK]3", Thoughts("[THINK]", "[/THINK]", begun=True)).text
    '<think>so it is</think>3'
    """
    begun = THINK_OPEN if thoughts.begun else ""
    # Marks around the answer are removed, as rewards expect none.
    marks = {thoughts.open: THINK_OPEN, thoughts.close: THINK_CLOSE, **dict.fromkeys(thoughts.answer, "")}
    if all(mark == tag for mark, tag in marks.items()):
        return Tagged(begun + text, ((0, len(begun)),) if begun else ())
    parts, moved, read, shift = [begun], [(0, len(begun))], 0, len(begun)
    # Longest first: one mark may be the beginning of another.
    for mark in re.finditer("|".join(re.escape(m) for m in sorted(marks, key=len, reverse=True)), text):
        shift += len(marks[mark[0]]) - len(mark[0])
        parts += [text[read : mark.start()], marks[mark[0]]]
        moved.append((mark.end(), shift))
        read = mark.end()
    return Tagged("".join([*parts, text[read:]]), moved)


class Said(NamedTuple):
    """A completion as a reward reads it."""

    whole: Tagged
    turns: Sequence[Mapping[str, object]] = ()
    """Its turns, if a tool has answered; otherwise empty."""


def said_in_tags(completion: Completion, marks: Thoughts, decode: Callable[[Sequence[int]], str]) -> Said:
    """Return a completion with thoughts in tags, including those that a prompt opened."""
    if marks == TAGS:
        return Said(Tagged(completion.text))
    if not completion.transcript.turns:
        return Said(in_tags(completion.text, marks))
    # A tool's answer is followed by the header of the next turn, which may open thoughts as the prompt does.
    inserted = [decode(ids.tolist()) for drawn, ids in completion.parts if not drawn]
    begun = iter([marks.begun, *(text.rstrip().endswith(marks.open) for text in inserted)])
    turns, opened = list[dict[str, object]](), marks.begun
    for turn in completion.transcript.turns:
        if turn["role"] == "assistant":
            opened = next(begun, False)
            turns.append(
                {**turn, "content": in_tags(str(turn["content"]), marks._replace(begun=opened)).text}
            )
        else:
            turns.append(dict(turn))
    whole = in_tags(completion.text, marks)
    if opened:  # the last turn begins within thoughts: only its turn has the opening tag
        own = [str(turn["content"]) for turn in turns if turn["role"] == "assistant"]
        whole = Tagged("".join(own), whole.moved)
    return Said(whole, turns)


def turns_of(
    completion: Completion, text: str, problem: Problem, calls: CallReader
) -> list[dict[str, object]]:
    """Return the turns of model and tools in order; without tools, ``text`` as one turn with its calls."""
    if completion.transcript.turns:
        return [dict(turn) for turn in completion.transcript.turns]
    called = list(calls(problem, completion))
    return [{"role": "assistant", "content": text, **({"tool_calls": called} if called else {})}]
