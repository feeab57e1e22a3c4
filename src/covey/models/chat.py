"""Chat messages through a model's own template."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from covey.models.text import ids_behind
from covey_verify.errors import ConfigError, DataError
from covey_verify.types import Messages

OWN = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
"""Arguments that are not the user's to set; tools and documents are."""
OWN -= {"tools", "documents"}


SEAM = "\ue0f7"
"""Of a private area of Unicode: where a rendered text is encoded in two parts."""
_clock: list[datetime] = []
"""Of the first rendering, once there was one."""


def rendered_at() -> datetime:
    """The time that templates print: that of this process' first rendering, or of the run it follows."""
    if not _clock:
        _clock.append(datetime.now())
    return _clock[0]


def render_at(time: datetime | None) -> None:
    """Give templates this time from now on; None: that of the next rendering."""
    _clock[:] = [] if time is None else [time]


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    arguments: Mapping[str, object],
    begin: bool = True,
    controls: Sequence[str] = (),
) -> list[int]:
    """Token ids of messages, with ``begin`` up to where the assistant begins.

    ``arguments`` is what the template gets besides them: `tools`, `documents`, `enable_thinking`, ...
    ``controls`` are the template's own words: where a content has one it is encoded as letters.

    Raises ConfigError where the model has no template, DataError where the template refuses the messages.
    """
    texts = [message.get("content") for message in messages]
    spelled = [
        {**message, "content": spelled_out(text, controls)} if isinstance(text, str) else message
        for message, text in zip(messages, texts, strict=True)
    ]
    return encoded_apart(tokenizer, chat_text(tokenizer, spelled, arguments, begin))


def spelled_out(text: str, controls: Sequence[str]) -> str:
    """A text in which a seam keeps the letters of control words apart. None is taken out, so none arises."""
    if not any(word in text for word in controls):
        return text
    pattern = "|".join(re.escape(word) for word in sorted(controls, key=len, reverse=True))
    return re.sub(pattern, lambda m: f"{m[0][0]}{SEAM}{m[0][1:]}", text)


def encoded_apart(tokenizer: PreTrainedTokenizerBase, text: str, behind: bool = False) -> list[int]:
    """Token ids of a text, what is on either side of a seam by itself; ``behind``: it follows a prompt."""
    first, *others = text.split(SEAM)
    begun = (
        ids_behind(tokenizer, first) if behind else tokenizer(first, add_special_tokens=False)["input_ids"]
    )
    return [*begun, *(token for part in others for token in ids_behind(tokenizer, part))]


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    arguments: Mapping[str, object],
    begin: bool = True,
) -> str:
    """The text that ``chat_tokens`` gives the tokens of. Raises as that does."""
    name = tokenizer.name_or_path or "the model"
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{name}: this model has no chat template, but the prompt is a chat. Take a model with one (an "
            "instruct model), put a chat_template.jinja into its folder, or use plain text (data.chat: false "
            "and text prompts; for `covey sample`, no --chat)"
        )
    if taken := OWN & set(arguments):
        raise ConfigError(
            f"data.chat_template_kwargs: {min(taken)} is no variable of the template. Another template goes "
            "into the model's folder as chat_template.jinja; the rest of the rendering is fixed"
        )
    template, refusal = tokenizer.apply_chat_template, None
    _keep_time(tokenizer, arguments)
    for said in (_with_objects(messages), messages):
        try:
            return str(template(said, add_generation_prompt=begin, tokenize=False, **arguments))
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            refusal = refusal or error
    raise DataError(f"the chat template of {name} refuses the messages: {refusal}") from None


def _keep_time(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> None:
    """Give a template that asks for the time that of ``rendered_at``; Transformers would give it another."""
    source = tokenizer.get_chat_template(tools=arguments.get("tools"))
    if "strftime_now" in source:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        # Arguments are reduced to plain data, so a function can only be a global of the compiled template.
        _compile_jinja_template(source).globals["strftime_now"] = _written_time


def _written_time(form: str) -> str:
    return rendered_at().strftime(form)


def _with_objects(messages: Messages) -> Messages:
    """Messages whose calls have their arguments as objects, which most templates want; OpenAI's are JSON."""
    found = []
    for message in messages:
        calls = message.get("tool_calls")
        own = {"tool_calls": [_with_object(call) for call in calls]} if isinstance(calls, list) else {}
        found.append({**message, **own})
    return found


def _with_object(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _with_object(call["function"])}
    try:
        found = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "arguments": found} if isinstance(found, dict) else call


def leaves_out(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, arguments: Mapping[str, object], other: Messages
) -> bool:
    """Whether a template writes the same for other messages, so that a model cannot tell what differs."""
    try:
        return chat_text(tokenizer, messages, arguments) == chat_text(tokenizer, other, arguments)
    except DataError:
        return False


def ignored(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, arguments: Mapping[str, object]
) -> list[str]:
    """Names of the template arguments that have no effect on what the model reads.

    Tools and documents have to change the tokens. A variable may equal its default, so it is enough that
    the template mentions it.
    """
    source = tokenizer.get_chat_template(tools=arguments.get("tools"))
    whole = chat_tokens(tokenizer, messages, arguments)

    def unseen(name: str) -> bool:
        if name not in ("tools", "documents"):
            return not re.search(rf"\b{re.escape(name)}\b", source)
        others = {k: v for k, v in arguments.items() if k != name}
        return chat_tokens(tokenizer, messages, others) == whole

    return [name for name in arguments if unseen(name)]
