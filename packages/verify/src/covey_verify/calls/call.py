"""A tool call, made of the JSON that a model wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from covey_verify.isolated import finite, strict_json

NO_JSON = 'this is no JSON object with "name" and "arguments"'
NOT_FINITE = "the arguments hold a number that is too large, or none"
UNCLOSED = "this call is never closed"
UNENDED = "a text in this call is never closed"
ARGUMENTS = ("arguments", "parameters")
BESIDE_ARGUMENTS = {"name", "id", "type", "index"}
"""Fields that a call without arguments may have."""


class ToolCall(NamedTuple):
    """A call as the model wrote it."""

    name: str
    arguments: Mapping[str, object]
    wrong: str = ""
    """The reason why it cannot be made, in words for the model; empty if it can."""


Types = Mapping[str, Mapping[str, object]]
"""The schemas of each tool's arguments: name of a tool -> name of an argument -> schema."""
ReadAt = Callable[[str, int, Types], tuple[list[ToolCall], int]]
"""(text, position of the mark that begins a call, types) -> the calls there, and where they end."""


def as_message(call: ToolCall) -> dict[str, object]:
    """Return a call in the form of chat messages, with `error` if it cannot be made.

    >>> as_message(ToolCall("now", {}))
    {'type': 'function', 'function': {'name': 'now', 'arguments': {}}}
    """
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"type": "function", "function": function, **({"error": call.wrong} if call.wrong else {})}


def no_json(error: ValueError) -> ToolCall:
    """Return the call for a text that is not JSON; ``error`` may say why."""
    if not isinstance(error, json.JSONDecodeError):
        return ToolCall("", {}, f"{NO_JSON}: {error}")
    # Python's decoder chose these words.
    return ToolCall("", {}, UNENDED if error.msg.startswith("Unterminated string") else NO_JSON)


def call_of(value: object) -> ToolCall:
    """Return a call from its JSON. Its arguments may be named `parameters`, and may be JSON within a text.

    If the value is not a call, the result holds the reason, in words for the model.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, NO_JSON)
    key = next((key for key in ARGUMENTS if key in value), None)
    unread = [name for name in value if name not in BESIDE_ARGUMENTS]
    if key is None and unread:
        return ToolCall("", {}, f"{NO_JSON}, but with {str(unread[0])[:40]!r}")
    arguments = {} if key is None else value[key]
    try:
        arguments = strict_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        return no_json(error)
    if not isinstance(arguments, Mapping):
        return ToolCall("", {}, NO_JSON)
    if not finite(arguments):
        return ToolCall(value["name"], {}, NOT_FINITE)
    return ToolCall(value["name"], arguments)


def calls_of(value: object) -> list[ToolCall]:
    """Return the calls of a JSON value: one, or several in a list."""
    return list(map(call_of, value)) if isinstance(value, list) and value else [call_of(value)]


def canonical(value: object) -> str:
    """Return a JSON value as a text that is the same for equal values: 2 is 2.0, and true is not 1.

    >>> canonical({"b": 1e2, "a": [2.0, True]})
    '{"a": [2, true], "b": 100}'
    """
    return json.dumps(_plain(value), sort_keys=True, default=str)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value
