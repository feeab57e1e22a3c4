"""Inserted tokens: the results of calls, in the form of the chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from covey.models.chat import chat_tokens
from covey.models.controls import ControlWords, template_words
from covey.models.policy import Policy
from covey.models.template import template_facts
from covey.types import Problem
from covey_verify.calls.call import ToolCall
from covey_verify.errors import ConfigError, DataError

RESULT_TAGS = "<tool_response>", "</tool_response>"
"""Marks around a result, in plain text and in the templates of Qwen and Hermes."""
IN_TEXT = f"\n{RESULT_TAGS[0]}\n{{}}\n{RESULT_TAGS[1]}\n"
"""Form of a result where prompts are plain text."""
NOT_SHOWN = "error: the result cannot be told from the words of the chat template"
NAME = re.compile(r"[\w.-]{1,64}")
"""Names of tools that are rendered as the model wrote them: others could contain the template's own words."""


def answer_tokens(
    policy: Policy,
    problem: Problem,
    calls: Sequence[ToolCall],
    results: Sequence[str],
    closed: bool = True,
) -> list[int]:
    """Return the tokens that are inserted after a turn: results of its calls, and the next turn's beginning.

    ``closed``: the turn ends as the template asks; otherwise that end is inserted too. Raises
    DataError or ConfigError where the chat template has no place for results.
    """
    if not problem.chat:
        text = "".join(IN_TEXT.format(result) for result in results)
        return list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])
    question: list[Mapping[str, object]] = [{"role": "user", "content": "?"}]
    # Three renderings: a question alone, with a made-up turn of calls, and with the results too. What the
    # third has after the end of that turn is inserted.
    opening = chat_tokens(policy.tokenizer, question, problem.template, begin=False)
    without_results, with_results = _around(policy, problem, question, calls, results)
    # End tokens within the turn with calls: most templates have one, some (GLM's) none.
    end_count = sum(token in policy.end_ids for token in without_results[len(opening) :])
    # Only what follows the turn counts: some templates, such as Qwen 3's, write a turn differently when it is
    # the last.
    ends = [n for n in range(len(opening), len(with_results)) if with_results[n] in policy.end_ids][
        :end_count
    ]
    only_appends = with_results[: len(opening)] == opening and (
        ends or with_results[: len(without_results)] == without_results
    )
    if not only_appends:
        raise ConfigError(
            "rollout.tools: the chat template changes earlier messages when a tool answers, so training "
            "would see other tokens than sampling. Use a template that only appends, or plain-text prompts"
        )
    # The turn's own end is the model's; what the template writes after it, such as a line break, is not.
    start = ends[-1] + closed if ends else len(without_results)
    return with_results[start:]


def _around(
    policy: Policy,
    problem: Problem,
    question: Sequence[Mapping[str, object]],
    calls: Sequence[ToolCall],
    results: Sequence[str],
) -> tuple[list[int], list[int]]:
    """Return a conversation up to the end of a turn with calls, and the same with their results.

    The turn is made up, because the model's own tokens stay as they are. Some templates refuse several calls,
    others require arguments as text. Raises DataError if every form is refused.
    """
    all_names = [call.name if NAME.fullmatch(call.name) else "call" for call in calls]
    refusal = None
    # In this order: all calls, one call, and both again with arguments as text. Arguments do not matter here.
    for names, arguments in ((all_names, {}), (all_names[:1], {}), (all_names, "{}"), (all_names[:1], "{}")):
        ids = [f"call{n:05}" for n in range(len(names))]  # nine characters, as Mistral's templates require
        tool_calls = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, name in zip(ids, names, strict=True)
        ]
        turn = [*question, {"role": "assistant", "content": "", "tool_calls": tool_calls}]
        answers = [
            {"role": "tool", "name": name, "tool_call_id": ids[n % len(ids)], "content": result}
            for n, (name, result) in enumerate(zip(all_names, results, strict=True))
        ]
        try:
            without_results = chat_tokens(policy.tokenizer, turn, problem.template, begin=False)
            return without_results, chat_tokens(policy.tokenizer, [*turn, *answers], problem.template)
        except DataError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def plain_result(policy: Policy, words: ControlWords, text: str, limit: int) -> str:
    """Return a result of at most ``limit`` tokens, without anything that reads as a template's ``words``."""
    # Lone surrogates, which no tokenizer takes, become question marks first.
    text = words.remove_from(text.encode("utf-8", "replace").decode())
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not set(policy.tokenizer.all_special_ids).isdisjoint(ids):
        return NOT_SHOWN  # some tokenizers read other letters, such as full-width ones, as their own tokens
    return text if len(ids) <= limit else policy.decode(ids[:limit]) + " [cut]"


def result_words(policy: Policy) -> ControlWords:
    """Return the words that no result may contain: the template's own, and tokens unknown to the model."""
    added = policy.tokenizer.added_tokens_decoder.items()
    unknown = [token.content for n, token in added if n >= policy.embedded]
    marks = template_facts(policy.tokenizer).result_marks
    return ControlWords([*RESULT_TAGS, *marks, *template_words(policy.tokenizer), *unknown])
