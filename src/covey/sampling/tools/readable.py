"""A proof that calls can be read: one is made up, written by the chat template and read back."""

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

ASKED: Messages = [{"role": "user", "content": "?"}]
MADE_UP: Mapping[object, object] = {
    "string": "covey", "integer": 3, "number": 1.5, "boolean": True, "array": ["a"], "object": {"a": "b"},
}  # fmt: skip
"""A value of each JSON type."""


class WrittenCall(NamedTuple):
    """A call as a chat template writes it, and whether it can be read back."""

    name: str
    text: str
    """The turn's text; empty if the template shows no call."""
    right: bool
    """Whether it was read as it was made."""


def written_call(
    policy: Speaker, template: Mapping[str, object], schemas: Sequence[Mapping[str, object]]
) -> WrittenCall:
    """Let the template write a call of the first tool, and read it back. Raises ConfigError."""
    call = _made_up(schemas[0])
    before = chat_tokens(policy.tokenizer, ASKED, template)
    for message, bare in _messages(call):
        try:
            whole = chat_tokens(policy.tokenizer, [*ASKED, message], template, begin=False)
            without = chat_tokens(policy.tokenizer, [*ASKED, bare], template, begin=False)
        except DataError:
            continue
        # The template shows no call in this form, if the turn looks the same without it.
        text = "" if whole == without else policy.tokenizer.decode(_turn(policy, before, whole))
        if not text.strip():
            continue
        # The turn's first token: the rendering with the turn and that without part there.
        start = _shared(before, whole)
        turn = np.array(_turn(policy, before, whole))
        prompt = np.array(whole[:start])
        calls = turn_reader(policy, schemas)(turn, prompt, None)
        right = [(c.name, dict(c.arguments), c.wrong) for c in calls] == [(*call[:2], "")]
        return WrittenCall(call.name, text, right)
    return WrittenCall(call.name, "", right=False)


def prove_readable(
    policy: Speaker, problem: Problem, schemas: Sequence[Mapping[str, object]]
) -> Iterator[str]:
    """Yield a note if a chat template shows no calls. Raises ConfigError if calls it shows cannot be read."""
    for schema in schemas:
        written = written_call(policy, problem.template, [schema, *schemas])
        if not written.text:
            yield (
                f"{problem.id}: the model's chat template does not show the calls of an assistant "
                "(tool_calls), so nobody knows whether those of the model are read; see docs/tools.md for "
                "the forms that are"
            )
            return
        if not written.right:
            raise ConfigError(
                f"rollout.tools: the chat template writes a call of {written.name} as {written.text!r}, "
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


def _turn(policy: Speaker, before: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Return the tokens that the model would write: from the prompt's end up to the first end token."""
    turn = list(whole[_shared(before, whole) :])
    return turn[: next((n + 1 for n, token in enumerate(turn) if token in policy.end_ids), len(turn))]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
