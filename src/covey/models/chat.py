"""Chats in the words of a model: messages rendered by its template and encoded as token ids."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from covey.models.text import continuation_ids
from covey_verify.errors import ConfigError, DataError
from covey_verify.types import Messages

RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {
    "tools",
    "documents",
}
"""Arguments of the template that a user cannot set."""

SEAM = "\ue0f7"
"""A private character that marks where a rendered text is split before it is encoded."""
LITERAL = "\ue0f8"
"""Behind a seam: there is no seam, the text itself has that character."""
ESCAPE = r"\ue0f7"
ESCAPED_LITERAL = r"\ue0f8"
"""The two as JSON or Python shows them in an object that a template prints."""
SEAMS = re.compile(f"{SEAM}(?!{LITERAL})|{re.escape(ESCAPE)}(?!{re.escape(ESCAPED_LITERAL)})")
_clock: list[datetime] = []
"""Time of the first rendering; empty before it."""


def rendered_at() -> datetime:
    """The time that templates print: of the first rendering in this process or in the resumed run."""
    if not _clock:
        _clock.append(datetime.now())
    return _clock[0]


def render_at(time: datetime | None) -> None:
    """Set the time that templates print from now on; None means the time of the next rendering."""
    _clock[:] = [] if time is None else [time]


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    arguments: Mapping[str, object],
    begin: bool = True,
    controls: Sequence[str] = (),
) -> list[int]:
    """Token ids of messages, with ``begin`` up to where the assistant begins.

    ``arguments`` are the template's other variables: `tools`, `documents`, `enable_thinking`, ...
    ``controls`` are the template's own words; in messages, tools and documents they are encoded as letters.

    Raises ConfigError where the model has no template, DataError where the template refuses the messages.
    """
    return encoded_apart(tokenizer, chat_text(tokenizer, messages, arguments, begin, controls))


def spelled_out(text: str, controls: Sequence[str]) -> str:
    """Put a seam into each control word of a text, so that its letters are encoded apart."""
    text = text.replace(SEAM, SEAM + LITERAL)
    # A seam inside tells the text's own escape from one that a template prints.
    text = text.replace(ESCAPE, f"{ESCAPE[0]}{SEAM}{ESCAPE[1:]}")
    # Nothing is taken out, so no control word can arise from what is left. Longest words match first.
    if not any(word in text for word in controls):
        return text
    pattern = "|".join(re.escape(word) for word in sorted(controls, key=len, reverse=True))
    return re.sub(pattern, lambda m: f"{m[0][0]}{SEAM}{m[0][1:]}", text)


def _safe_message(message: Mapping[str, object], controls: Sequence[str]) -> Mapping[str, object]:
    """Spell out the control words of a message: of its content, calls, thoughts and role."""
    content = message.get("content")
    safe = _safe_value(message, controls)
    return {**safe, "content": spelled_out(content, controls)} if isinstance(content, str) else safe


def _safe_value(value: Any, controls: Sequence[str]) -> Any:
    """Spell out the control words of all texts in a value, of its keys too."""
    if isinstance(value, str):
        # Templates compare roles, types and keys with such words, so these stay.
        return spelled_out(value, [word for word in controls if not word.isidentifier()])
    if isinstance(value, Mapping):
        return {_safe_value(key, controls): _safe_value(part, controls) for key, part in value.items()}
    return [_safe_value(part, controls) for part in value] if isinstance(value, list | tuple) else value


def encoded_apart(tokenizer: PreTrainedTokenizerBase, text: str, after_prompt: bool = False) -> list[int]:
    """Token ids of a text whose parts between seams are encoded apart; ``after_prompt``: it follows one."""
    first, *parts = _parts(text)
    ids = (
        continuation_ids(tokenizer, first)
        if after_prompt
        else tokenizer(first, add_special_tokens=False)["input_ids"]
    )
    return [*ids, *(token for part in parts for token in continuation_ids(tokenizer, part))]


def without_seams(text: str) -> str:
    """Return a text of ``chat_text`` as it reads."""
    return "".join(_parts(text))


def _parts(text: str) -> list[str]:
    """Return the parts of a text between its seams, as they read."""
    parts = SEAMS.split(text)
    return [p.replace(SEAM + LITERAL, SEAM).replace(ESCAPE + ESCAPED_LITERAL, ESCAPE) for p in parts]


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    arguments: Mapping[str, object],
    begin: bool = True,
    controls: Sequence[str] = (),
) -> str:
    """The text that ``chat_tokens`` encodes. Raises the same errors."""
    name = tokenizer.name_or_path or "the model"
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{name}: the prompt is a chat, but this model has no chat template. Use an instruct model, add "
            "chat_template.jinja to the model's folder, or use plain text (data.chat: false and text "
            "prompts; for `covey sample`, no --chat)"
        )
    reserved = RESERVED & set(arguments)
    if reserved:
        raise ConfigError(
            f"data.chat_template_kwargs: {min(reserved)} is not a variable of the template, and cannot be "
            "set. To change the template, put chat_template.jinja into the model's folder"
        )
    template = tokenizer.apply_chat_template
    refusal = None
    _keep_time(tokenizer, arguments)
    others = {
        key: _safe_value(value, controls) if key in ("tools", "documents") else value
        for key, value in arguments.items()
    }
    # Some templates want a call's arguments as JSON; the first refusal tells more than the second.
    for form in (_with_objects(messages), messages):
        # Not before: an escape in JSON can hide a control word.
        safe = [_safe_message(message, controls) for message in form]
        try:
            return str(template(safe, add_generation_prompt=begin, tokenize=False, **others))
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            refusal = refusal or error
    raise DataError(f"the chat template of {name} refuses the messages: {refusal}") from None


def _keep_time(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> None:
    """Make a template that asks for the time print ``rendered_at()`` instead of the current time."""
    source = tokenizer.get_chat_template(tools=arguments.get("tools"))
    if "strftime_now" in source:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        # Arguments are reduced to plain data, so a function can only be a global of the compiled template.
        # That is cached by its source, and the call that renders gets the same object.
        _compile_jinja_template(source).globals["strftime_now"] = _written_time


def _written_time(form: str) -> str:
    return rendered_at().strftime(form)


def _with_objects(messages: Messages) -> Messages:
    """Messages whose calls have arguments as objects, as most templates want; OpenAI's form is JSON text."""
    normalized = []
    for message in messages:
        calls = message.get("tool_calls")
        parsed = {"tool_calls": [_with_object(call) for call in calls]} if isinstance(calls, list) else {}
        normalized.append({**message, **parsed})
    return normalized


def _with_object(call: object) -> object:
    """The same for one call, bare or as {"function": {...}}; arguments that are no JSON object stay."""
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _with_object(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def leaves_out(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, arguments: Mapping[str, object], variant: Messages
) -> bool:
    """Whether a template renders ``variant`` the same, so that a model cannot see the difference."""
    try:
        return chat_text(tokenizer, messages, arguments) == chat_text(tokenizer, variant, arguments)
    except DataError:
        return False


def unused_arguments(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, arguments: Mapping[str, object]
) -> list[str]:
    """Names of the template arguments that have no effect on what the model reads.

    Tools and documents have to change the tokens. For other variables it is enough that the template
    mentions them, since a value may equal the template's default.
    """
    source = tokenizer.get_chat_template(tools=arguments.get("tools"))
    with_all = chat_tokens(tokenizer, messages, arguments)

    def has_no_effect(name: str) -> bool:
        if name not in ("tools", "documents"):
            return not re.search(rf"\b{re.escape(name)}\b", source)
        without = {k: v for k, v in arguments.items() if k != name}
        return chat_tokens(tokenizer, messages, without) == with_all

    return [name for name in arguments if has_no_effect(name)]


class AssistantSpan(NamedTuple):
    """The tokens of a message of the assistant within a conversation."""

    message: int
    """Number of the message."""
    start: int
    stop: int
    """Behind the end token."""
    whole: int
    """Behind all that the template writes with the message, such as a line break after the end token."""


def assistant_spans(
    render: Callable[[Messages, bool], list[int]],
    messages: Messages,
    first: int,
    conversation: list[int],
    ends: Collection[int],
) -> list[AssistantSpan] | None:
    """Locate the assistant's messages from number ``first`` on in the tokens of a conversation.

    ``render`` returns the ids of messages, and with True also the template's beginning of an answer.

    Returns None if the template changes earlier messages when one is added.
    """
    numbers = [n for n in range(first, len(messages)) if messages[n]["role"] == "assistant"]
    beginnings = [render(messages[:number], True) for number in numbers]
    if any(conversation[: len(beginning)] != beginning for beginning in beginnings):
        return None
    starts = [len(beginning) for beginning in beginnings]
    spans = []
    for number, start, next_start in zip(numbers, starts, [*starts[1:], len(conversation)], strict=True):
        is_last = number + 1 == len(messages)
        whole = conversation if is_last else render(messages[: number + 1], False)
        # Some templates, as Qwen 3's, write a last message differently: then a token has to mark its end.
        is_prefix = conversation[: len(whole)] == whole
        limit = len(whole) if is_prefix else next_start
        end = _end_of_message(conversation, start, limit, ends)
        if end is None and not is_prefix:
            return None
        if end is None:
            # If a template writes no such token, as GLM's, the beginning of the next turn may be one.
            end = limit if limit < len(conversation) and conversation[limit] in ends else limit - 1
        spans.append(AssistantSpan(number, start, end + 1, limit if is_prefix else end + 1))
    return spans


def _end_of_message(tokens: list[int], start: int, limit: int, ends: Collection[int]) -> int | None:
    """The index of the first end token from ``start`` up to ``limit``; None if there is none."""
    return next((index for index in range(start, limit) if tokens[index] in ends), None)
