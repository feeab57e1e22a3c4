"""Reading the calls at the end of a turn.

    <tool_call>{"name": "look_up", "arguments": {"word": "covey"}}</tool_call>

The form of Qwen's and Hermes' chat templates, and of models whose prompts say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from covey.rewards.isolated import strict_json
from covey.rewards.structured import CLOSE_CALL, OPEN_CALL, named_call


class ToolCall(NamedTuple):
    """A call as the model wrote it."""

    name: str
    arguments: Mapping[str, object]
    wrong: str = ""
    """Why nothing can be called, in words for the model."""


def calls_in(turn: str) -> list[ToolCall]:
    """The calls of a turn that ends with one; a call that is only thought of, before `</think>`, is none.

    >>> calls_in('So <tool_call>{"name": "now", "arguments": {}}</tool_call>')
    [ToolCall(name='now', arguments={}, wrong='')]
    >>> calls_in("<tool_call>later</tool_call> I think."), calls_in("<tool_call>now</tool_call>")[0].wrong
    ([], 'this is no JSON object with "name" and "arguments"')
    """
    said = turn.rpartition("</think>")[2].rstrip()
    if OPEN_CALL not in said or not said.endswith(CLOSE_CALL):
        return []
    return [_call(block.partition(CLOSE_CALL)[0]) for block in said.split(OPEN_CALL)[1:]]


def _call(text: str) -> ToolCall:
    try:
        call = named_call(strict_json(text))
    except ValueError:
        call = {"arguments": None}
    if not isinstance(call["arguments"], Mapping):
        return ToolCall("", {}, 'this is no JSON object with "name" and "arguments"')
    return ToolCall(call["name"], call["arguments"])
