"""The reader of a model's texts: calls in the form that its chat template shows, thoughts by its marks.

A tokenizer that has a `response_template` defines itself how its model's calls are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from covey.models.chat import chat_tokens
from covey.models.policy import Policy
from covey.models.template import HEADER, template_facts
from covey.models.text import FaithfulText
from covey.rewards.reading import ReplyReader
from covey.types import Completion, Problem
from covey_verify.calls.call import ToolCall, call_of
from covey_verify.calls.forms import form_of_template, types_of
from covey_verify.calls.turn import read_turn
from covey_verify.errors import ConfigError
from covey_verify.extract import TAGS

PLAIN = TAGS._replace(open="")
"""The marks of thoughts in plain text: the answer is what comes after `</think>`."""


class Speaker(Protocol):
    """A policy, or its tokenizer and end tokens without its weights."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def end_ids(self) -> Sequence[int]:
        """Tokens that end a completion."""


TurnReader = Callable[[np.ndarray, np.ndarray, bool | None], Sequence[ToolCall]]
"""(tokens of a turn, tokens before it, whether these open thoughts) -> the calls that the turn ends with.

With None the reader looks at the end of the tokens before it.
"""


def turn_reader(policy: Speaker, schemas: Sequence[Mapping[str, object]]) -> TurnReader:
    """Return the reader of turns in a model's chats. Raises ConfigError for an invalid response_template."""
    tokenizer = policy.tokenizer
    response_template = getattr(tokenizer, "response_template", None)
    if response_template:
        try:
            from transformers.utils.chat_parsing import ResponseParser

            ResponseParser(response_template, prefix="")
        except (ImportError, ValueError) as error:
            name = tokenizer.name_or_path or "the model"
            raise ConfigError(f"{name}: the response_template of its tokenizer: {error}") from None
        return partial(_by_response_template, policy, schemas)
    template = tokenizer.get_chat_template(tools=schemas) if tokenizer.chat_template else ""
    form = form_of_template(template)
    types = types_of(schemas)
    marks = template_facts(tokenizer).marks
    text_of = FaithfulText(tokenizer, policy.end_ids)

    def read_calls(turn: np.ndarray, prompt: np.ndarray, begun: bool | None = None) -> Sequence[ToolCall]:
        if begun is None:
            turn_marks = marks.begun_by(tokenizer.decode(prompt[-HEADER:].tolist()))
        else:
            turn_marks = marks._replace(begun=begun)
        return read_turn(text_of(turn.tolist()), turn_marks, form, types).calls

    return read_calls


def calls_in_text(text: str) -> Sequence[ToolCall]:
    """Return the calls of a turn in plain text. Its prompt says how to call, and nothing about thoughts."""
    return read_turn(text, PLAIN).calls


def reader_by(policy: Policy) -> ReplyReader:
    """Return the reader of a model's completions, for rewards."""

    def calls(problem: Problem, completion: Completion) -> Sequence[ToolCall]:
        if isinstance(problem.prompt, str) or not (policy.tokenizer.chat_template and len(completion.tokens)):
            return calls_in_text(completion.text)
        prompt = completion.tokens[:0]
        if getattr(policy.tokenizer, "response_template", None):  # its parser reads from the prompt on
            prompt = np.array(chat_tokens(policy.tokenizer, problem.prompt, problem.template), np.int64)
        schemas = problem.template.get("tools")
        read = turn_reader(policy, schemas if isinstance(schemas, Sequence) else ())
        return read(completion.tokens, prompt, problem.thoughts.begun)

    return ReplyReader(policy.decode, calls)


def _by_response_template(
    policy: Speaker,
    schemas: Sequence[Mapping[str, object]],
    turn: np.ndarray,
    prompt: np.ndarray,
    _: bool | None = None,
) -> Sequence[ToolCall]:
    """Return the calls that the tokenizer's own parser finds; a turn that it cannot read has none."""
    turn_text, prompt_text = (policy.tokenizer.decode(ids.tolist()) for ids in (turn, prompt))
    try:
        message = policy.tokenizer.parse_response(turn_text, prefix=prompt_text, tools=list(schemas))
        return [call_of(call.get("function", call)) for call in message.get("tool_calls") or ()]
    except Exception:  # a response_template is someone else's code, and may fail in any way
        return []
