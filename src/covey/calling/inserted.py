"""What the model reads after its calls: their results as tokens, in the form of its chat template."""

from __future__ import annotations

from collections.abc import Sequence

from covey.calling.calls import ToolCall
from covey.errors import ConfigError
from covey.models.chat import chat_tokens
from covey.models.policy import Policy
from covey.types import Problem

IN_TEXT = "\n<tool_response>\n{}\n</tool_response>\n"
"""A result where prompts are plain text."""


def answer_tokens(
    policy: Policy, problem: Problem, calls: Sequence[ToolCall], results: Sequence[str], most: int
) -> list[int]:
    """What is inserted after a turn: results of at most ``most`` tokens each, and the next turn's beginning.

    Raises DataError or ConfigError where the chat template has no place for them.
    """
    said = [_shortened(policy, result, most) for result in results]
    if not problem.chat:
        text = "".join(IN_TEXT.format(result) for result in said)
        return list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])
    made = [
        {
            "id": f"call{n:05}",
            "type": "function",
            "function": {"name": c.name, "arguments": dict(c.arguments)},
        }
        for n, c in enumerate(calls)
    ]
    asked: list[dict[str, object]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": made},
    ]
    answered: list[dict[str, object]] = [
        {"role": "tool", "name": c.name, "tool_call_id": m["id"], "content": result}
        for c, m, result in zip(calls, made, said, strict=True)
    ]
    before = chat_tokens(policy.tokenizer, asked, problem.template, begin=False)
    after = chat_tokens(policy.tokenizer, [*asked, *answered], problem.template)
    if after[: len(before)] != before:
        raise ConfigError(
            "rollout.tools: the model's chat template writes a conversation anew once a tool has answered, "
            "so that what it read would not be what is trained on. Use a template that only appends, or "
            "prompts in plain text"
        )
    # The turn's own end is the model's; what the template writes behind it, a line break say, is not.
    ends = [n for n, token in enumerate(before, start=1) if token in policy.end_ids]
    return after[ends[-1] if ends else len(before) :]


def _shortened(policy: Policy, text: str, most: int) -> str:
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return text if len(ids) <= most else policy.decode(ids[:most]) + " [cut]"
