"""What the model reads after its calls: their results as tokens, in the form of its chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from covey.calling.calls import ToolCall
from covey.errors import ConfigError
from covey.models.chat import chat_tokens
from covey.models.policy import Policy
from covey.types import Problem

RESULT_TAGS = "<tool_response>", "</tool_response>"
"""Around a result, in plain text and in the templates of Qwen and Hermes."""
IN_TEXT = f"\n{RESULT_TAGS[0]}\n{{}}\n{RESULT_TAGS[1]}\n"
"""A result where prompts are plain text."""


def answer_tokens(
    policy: Policy,
    problem: Problem,
    calls: Sequence[ToolCall],
    results: Sequence[str],
    closed: bool = True,
) -> list[int]:
    """What is inserted after a turn: the results of its calls, and the next turn's beginning.

    ``closed``: the turn has the end of turn that the template asks for; else it is inserted too. Raises
    DataError or ConfigError where the chat template has no place for results.
    """
    if not problem.chat:
        text = "".join(IN_TEXT.format(result) for result in results)
        return list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])
    # Of the turn before only the end counts: a made-up one, because some templates refuse several calls.
    made = {"id": "call00000", "type": "function", "function": {"name": "call", "arguments": {}}}
    asked: list[dict[str, object]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
    ]
    answered: list[dict[str, object]] = [
        {"role": "tool", "name": c.name or "call", "tool_call_id": made["id"], "content": result}
        for c, result in zip(calls, results, strict=True)
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
    ends = [n for n, token in enumerate(before) if token in policy.end_ids]
    return after[ends[-1] + closed if ends else len(before) :]


def plain_result(policy: Policy, text: str, most: int) -> str:
    """A result of at most ``most`` tokens, in which nothing passes for the template's own words."""
    text = text.encode("utf-8", "replace").decode()
    controls = [*RESULT_TAGS, *_controls(policy.tokenizer)]
    while found := [c for c in controls if c in text]:  # what is left of one may make another
        for control in found:
            text = text.replace(control, "")
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return text if len(ids) <= most else policy.decode(ids[:most]) + " [cut]"


def _controls(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Tokens of the template's own: some are not special, as `<｜User｜>` of R1's distilled models."""
    template = str(tokenizer.chat_template)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (token.content.strip() and token.content in template):
            yield token.content
