"""A proof that calls can be read: a made-up call is written by the chat template and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from covey.models.chat import chat_tokens
from covey.sampling.tools.reader import Speaker, turn_reader
from covey.types import Problem
from covey_verify.calls.call import ToolCall
from covey_verify.errors import ConfigError, DataError
from covey_verify.types import Messages

QUESTION: Messages = [{"role": "user", "content": "?"}]
MADE_UP: Mapping[object, object] = {
    "string": "covey", "integer": 3, "number": 1.5, "boolean": True, "array": ["a"], "object": {"a": "b"},
}  # fmt: skip
"""A value of each JSON type."""


class WrittenCall(NamedTuple):
    """A call as a chat template writes it, and whether it can be read back."""

    name: str
    text: str
    """The turn's text; empty if the template shows no call."""
    is_readable: bool
    """Whether it was read as it was made."""


def written_call(
    policy: Speaker, template: Mapping[str, object], schemas: Sequence[Mapping[str, object]]
) -> WrittenCall:
    """Let the template write a call of the first tool, and read it back. Raises ConfigError."""
    call = _made_up(schemas[0])
    prompt = chat_tokens(policy.tokenizer, QUESTION, template)
    for message, bare in _messages(call):
        try:
            with_call = chat_tokens(policy.tokenizer, [*QUESTION, message], template, begin=False)
            without_call = chat_tokens(policy.tokenizer, [*QUESTION, bare], template, begin=False)
        except DataError:
            continue
        if with_call == without_call:
            continue  # the template does not show a call in this form
        # The prompt ends where the rendering with the turn departs from the one without it.
        start = _common_length(prompt, with_call)
        turn = _up_to_end(policy, with_call[start:])
        text = policy.tokenizer.decode(turn)
        if not text.strip():
            continue
        calls = turn_reader(policy, schemas)(np.array(turn), np.array(with_call[:start]), None)
        is_readable = [(c.name, dict(c.arguments), c.wrong) for c in calls] == [
            (call.name, call.arguments, "")
        ]
        return WrittenCall(call.name, text, is_readable)
    return WrittenCall(call.name, "", is_readable=False)


def prove_readable(
    policy: Speaker, problem: Problem, schemas: Sequence[Mapping[str, object]]
) -> Iterator[str]:
    """Yield a note if a chat template shows no calls. Raises ConfigError if calls it shows cannot be read."""
    for schema in schemas:
        sample = written_call(policy, problem.template, [schema, *schemas])
        if not sample.text:
            yield (
                f"{problem.id}: the model's chat template does not show the calls of an assistant "
                "(tool_calls), so it is unknown whether the model's own calls can be read; docs/tools.md "
                "lists the forms that can"
            )
            return
        if not sample.is_readable:
            raise ConfigError(
                f"rollout.tools: the chat template writes a call of {sample.name} as {sample.text!r}, "
                "which covey cannot read, so no call would be answered. Use a model whose form is known "
                "(docs/tools.md), a tokenizer with a response_template, or plain-text prompts"
            )


def _made_up(schema: Mapping[str, Any]) -> ToolCall:
    """Return a call of the schema's function, with an argument for each parameter of a known type."""
    function = schema["function"]
    arguments = {}
    for name, accepted in function["parameters"].get("properties", {}).items():
        if "enum" in accepted:
            arguments[name] = accepted["enum"][0]
        elif str(accepted.get("type")) in MADE_UP:
            arguments[name] = MADE_UP[accepted["type"]]
    return ToolCall(str(function["name"]), arguments)


def _messages(call: ToolCall) -> Iterator[tuple[Mapping[str, object], Mapping[str, object]]]:
    """Yield a turn with the call, in each way that templates accept, and the same turn without the call."""
    for content in ("", None):
        for arguments in (call.arguments, json.dumps(call.arguments)):
            function = {"name": call.name, "arguments": arguments}
            calls = [{"id": "call00000", "type": "function", "function": function}]
            bare = {"role": "assistant", "content": content}
            yield {**bare, "tool_calls": calls}, {**bare, "content": ""}


def _up_to_end(policy: Speaker, tokens: Sequence[int]) -> list[int]:
    """Return the tokens that the model itself would write: all up to the first end token."""
    turn = list[int]()
    for token in tokens:
        turn.append(token)
        if token in policy.end_ids:
            break
    return turn


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens with which both sequences begin."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length
