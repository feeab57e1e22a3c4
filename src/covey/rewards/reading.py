"""Completions as built-in rewards read them: thoughts between tags, whatever the template's marks are."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from covey.types import TAGS, Completion, Problem, Thoughts
from covey_verify.extract import THINK_CLOSE, THINK_OPEN

CallReader = Callable[[Problem, Completion], Sequence[Mapping[str, object]]]
"""The calls that a completion of one turn ends with, as messages have them."""


class Tagged(NamedTuple):
    """What a model wrote, with its thoughts between `<think>` and `</think>`, whatever its own marks are."""

    text: str
    moved: Sequence[tuple[int, int]] = ()
    """(where a mark of the model's ends, characters that everything from there on has moved by)."""

    def places(self, ends: Sequence[int]) -> list[int]:
        """Where places of the model's own text are in this one."""
        steps = [place for place, _ in self.moved]
        shifts = [0, *(shift for _, shift in self.moved)]
        return [min(len(self.text), end + shifts[bisect_right(steps, end)]) for end in ends]


def in_tags(text: str, thoughts: Thoughts) -> Tagged:
    """A text with a template's marks of thoughts as tags, those included that the prompt has opened.

    >>> in_tags("so it is[/THINK]3", Thoughts("[THINK]", "[/THINK]", begun=True)).text
    '<think>so it is</think>3'
    """
    begun = THINK_OPEN if thoughts.begun else ""
    marks = {thoughts.open: THINK_OPEN, thoughts.close: THINK_CLOSE, **dict.fromkeys(thoughts.answer, "")}
    if all(mark == tag for mark, tag in marks.items()):
        return Tagged(begun + text, ((0, len(begun)),) if begun else ())
    parts, moved, read, shift = [begun], [(0, len(begun))], 0, len(begun)
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
    """Its turns where a tool has answered, else nothing."""


def said_in_tags(completion: Completion, marks: Thoughts, decode: Callable[[Sequence[int]], str]) -> Said:
    """A completion as built-in rewards read it: thoughts in tags, opened where a prompt has opened them."""
    if marks == TAGS:
        return Said(Tagged(completion.text))
    if not completion.turns:
        return Said(in_tags(completion.text, marks))
    # What a tool says is followed by the header of the next turn, which may open thoughts as the prompt does.
    inserted = [decode(ids.tolist()) for drawn, ids in completion.parts if not drawn]
    begun = iter([marks.begun, *(text.rstrip().endswith(marks.open) for text in inserted)])
    turns, opened = list[dict[str, object]](), marks.begun
    for turn in completion.turns:
        if turn["role"] == "assistant":
            opened = next(begun, False)
            turns.append(
                {**turn, "content": in_tags(str(turn["content"]), marks._replace(begun=opened)).text}
            )
        else:
            turns.append(dict(turn))
    whole = in_tags(completion.text, marks)
    if opened:  # the last turn's thoughts: what comes before them has been read already
        own = [str(turn["content"]) for turn in turns if turn["role"] == "assistant"]
        whole = Tagged("".join(own), whole.moved)
    return Said(whole, turns)


def turns_of(
    completion: Completion, text: str, problem: Problem, calls: CallReader
) -> list[dict[str, object]]:
    """What the model wrote, ``text`` at once, and what tools said, one after another, with their calls."""
    if completion.turns:
        return [dict(turn) for turn in completion.turns]
    called = list(calls(problem, completion))
    return [{"role": "assistant", "content": text, **({"tool_calls": called} if called else {})}]
