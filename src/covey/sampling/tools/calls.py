"""Reading the calls at the end of a turn.

    <tool_call>{"name": "look_up", "arguments": {"word": "covey"}}</tool_call>

This is the form of Qwen's and Hermes' chat templates, and of models whose prompts say so; `forms.py` has
the others. A tag inside a value ends no call: the value is read first, then the tag is looked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from covey_verify.extract import THINK_CLOSE
from covey_verify.isolated import after_blanks, finite, strict_json_at
from covey_verify.texts.structured import CLOSE_CALL, OPEN_CALL, named_call


class ToolCall(NamedTuple):
    """A call as the model wrote it."""

    name: str
    arguments: Mapping[str, object]
    wrong: str = ""
    """The reason why nothing can be called, in words for the model; empty: it can."""


def no_json(error: ValueError) -> ToolCall:
    """Return the call for text that is no JSON, or no JSON of a call; ``error`` may say why."""
    why = "" if isinstance(error, json.JSONDecodeError) else f": {error}"
    return ToolCall("", {}, NO_JSON + why)


def as_message(call: ToolCall) -> dict[str, object]:
    """Return a call as messages have it; `error` is there if it cannot be called.

    >>> as_message(ToolCall("now", {}))
    {'type': 'function', 'function': {'name': 'now', 'arguments': {}}}
    """
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"type": "function", "function": function, **({"error": call.wrong} if call.wrong else {})}


NO_JSON = 'this is no JSON object with "name" and "arguments"'
NOT_FINITE = "the arguments hold a number that is too large, or none"
ReadAt = Callable[[str, int], tuple[list[ToolCall], int]]
"""(text, place after the mark that opens a call) -> the calls there, and the place where they end."""


def call_of(found: object) -> ToolCall:
    """Return a call from its JSON; if it is none, with the reason for the model."""
    try:
        call = named_call(found)
    except ValueError:
        return ToolCall("", {}, NO_JSON)
    if not isinstance(call["arguments"], Mapping):
        return ToolCall("", {}, NO_JSON)
    if not finite(call["arguments"]):
        return ToolCall(call["name"], {}, NOT_FINITE)
    return ToolCall(call["name"], call["arguments"])


def calls_of(found: object) -> list[ToolCall]:
    """Return the calls of a JSON value: one, or several in a list."""
    return [call_of(one) for one in found] if isinstance(found, list) and found else [call_of(found)]


def json_calls(text: str, place: int) -> tuple[list[ToolCall], int]:
    """Read calls in JSON. -> calls, and the place where they end; other text ends where it began."""
    place = after_blanks(text, place)
    try:
        found, end = strict_json_at(text, place)
    except ValueError as error:
        return [no_json(error)], place
    # After the JSON only the closing mark may follow, the next call's mark, or the end of the text.
    closed = after_blanks(text, end)
    if closed < len(text) and not text.startswith((CLOSE_CALL, OPEN_CALL), closed):
        return [ToolCall("", {}, NO_JSON)], end
    return calls_of(found), closed


def calls_in(turn: str, read: ReadAt = json_calls) -> list[ToolCall]:
    """Return the calls of a turn that ends with one; a call within thoughts, before `</think>`, is none.

    >>> calls_in('So <tool_call>{"name": "now", "arguments": {}}</tool_call>')
    [ToolCall(name='now', arguments={}, wrong='')]
    >>> calls_in("<tool_call>later</tool_call> I think."), calls_in("<tool_call>now</tool_call>")[0].wrong
    ([], 'this is no JSON object with "name" and "arguments"')
    """
    text = turn.rstrip()
    if not text.endswith(CLOSE_CALL):
        return []
    result: list[ToolCall] = []
    mark = MARKS.search(text)
    while mark is not None:
        place = mark.end()
        # All calls up to here were within thoughts.
        if mark[0] == THINK_CLOSE:
            result = []
        else:
            calls, place = read(text, place)
            result += calls
        mark = MARKS.search(text, place)
    return result


MARKS = re.compile("|".join(map(re.escape, (OPEN_CALL, THINK_CLOSE))))


def ends_inside(turn: str) -> bool:
    """Whether a turn that ends with `</tool_call>` ends inside a string of a call, so that it is not over.

    >>> ends_inside('<tool_call>{"name": "say", "arguments": {"text": "</tool_call>')
    True
    >>> ends_inside('<tool_call>{"name": "say"}</tool_call>'), ends_inside("<tool_call>so</tool_call>")
    (False, False)
    """
    text = turn.rstrip()
    opened = False
    mark = MARKS.search(text)
    while mark is not None:
        place = after_blanks(text, mark.end())
        opened = False
        if mark[0] == OPEN_CALL:
            try:
                _, place = strict_json_at(text, place)
            except ValueError as error:
                # The text of json's own error: the closing mark was part of an argument.
                opened = str(error).startswith("Unterminated string")
        mark = MARKS.search(text, place)
    return opened
