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
    """The reason why nothing can be called, in words for the model; empty: it can."""


Types = Mapping[str, Mapping[str, object]]
"""The schemas of each tool's arguments: name of a tool -> name of an argument -> schema."""
ReadAt = Callable[[str, int, Types], tuple[list[ToolCall], int]]
"""(text, place of the mark that begins a call, types) -> the calls there, and the place where they end."""


def as_message(call: ToolCall) -> dict[str, object]:
    """Return a call as messages have it; `error` is there if it cannot be called.

    >>> as_message(ToolCall("now", {}))
    {'type': 'function', 'function': {'name': 'now', 'arguments': {}}}
    """
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"type": "function", "function": function, **({"error": call.wrong} if call.wrong else {})}


def no_json(error: ValueError) -> ToolCall:
    """Return the call for text that is no JSON; ``error`` may say why."""
    if not isinstance(error, json.JSONDecodeError):
        return ToolCall("", {}, f"{NO_JSON}: {error}")
    # The words are those of Python's decoder.
    return ToolCall("", {}, UNENDED if error.msg.startswith("Unterminated string") else NO_JSON)


def call_of(found: object) -> ToolCall:
    """Return a call from its JSON, whose arguments may be called `parameters` and may be JSON in a text.

    If it is none, it has the reason for the model.
    """
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, NO_JSON)
    key = next((key for key in ARGUMENTS if key in found), None)
    unread = [name for name in found if name not in BESIDE_ARGUMENTS]
    if key is None and unread:
        return ToolCall("", {}, f"{NO_JSON}, but with {str(unread[0])[:40]!r}")
    given = {} if key is None else found[key]
    try:
        given = strict_json(given) if isinstance(given, str) else given
    except ValueError as error:
        return no_json(error)
    if not isinstance(given, Mapping):
        return ToolCall("", {}, NO_JSON)
    return ToolCall(found["name"], given) if finite(given) else ToolCall(found["name"], {}, NOT_FINITE)


def calls_of(found: object) -> list[ToolCall]:
    """Return the calls of a JSON value: one, or several in a list."""
    return [call_of(one) for one in found] if isinstance(found, list) and found else [call_of(found)]


def canonical(value: object) -> str:
    """Return a JSON value as a text that is the same for equal values: 2 is 2.0, and true is not 1.

    >>> canonical({"b": 1e2, "a": [2.0, True]})
    '{"a": [2, true], "b": 100}'
    """
    return json.dumps(_plain(value), sort_keys=True, default=str)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value
