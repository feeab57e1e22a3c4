"""Reading the calls at the end of a turn.

    <tool_call>{"name": "look_up", "arguments": {"word": "covey"}}</tool_call>

The form of Qwen's and Hermes' chat templates, and of models whose prompts say so; `forms.py` has others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from covey.rewards.isolated import strict_json
from covey.rewards.structured import CLOSE_CALL, OPEN_CALL, named_call


class ToolCall(NamedTuple):
    """A call as the model wrote it."""

    name: str
    arguments: Mapping[str, object]
    wrong: str = ""
    """Why nothing can be called, in words for the model."""


NO_JSON = 'this is no JSON object with "name" and "arguments"'


def call_of(found: object) -> ToolCall:
    """A call from its JSON; what is wrong with it is for the model to read."""
    try:
        call = named_call(found)
    except ValueError:
        return ToolCall("", {}, NO_JSON)
    if not isinstance(call["arguments"], Mapping):
        return ToolCall("", {}, NO_JSON)
    return ToolCall(call["name"], call["arguments"])


def read_json(text: str) -> ToolCall:
    """The same of JSON that is still a text."""
    try:
        return call_of(strict_json(text))
    except ValueError:
        return ToolCall("", {}, NO_JSON)


def calls_in(turn: str, read: Callable[[str], ToolCall] = read_json) -> list[ToolCall]:
    """The calls of a turn that ends with one; a call that is only thought of, before `</think>`, is none.

    >>> calls_in('So <tool_call>{"name": "now", "arguments": {}}</tool_call>')
    [ToolCall(name='now', arguments={}, wrong='')]
    >>> calls_in("<tool_call>later</tool_call> I think."), calls_in("<tool_call>now</tool_call>")[0].wrong
    ([], 'this is no JSON object with "name" and "arguments"')
    """
    said = turn.rpartition("</think>")[2].rstrip()
    if OPEN_CALL not in said or not said.endswith(CLOSE_CALL):
        return []
    return [read(block.partition(CLOSE_CALL)[0]) for block in said.split(OPEN_CALL)[1:]]
