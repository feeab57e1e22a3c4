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
from covey.rewards.reading import Reader
from covey.types import Completion, Problem
from covey_verify.calls.call import ToolCall, call_of
from covey_verify.calls.forms import form_of_template, types_of
from covey_verify.calls.turn import read_turn
from covey_verify.errors import ConfigError
from covey_verify.extract import TAGS

PLAIN = TAGS._replace(open="")
"""The marks of thoughts in plain text: what is behind `</think>` is the answer."""


class Speaker(Protocol):
    """A policy, or its tokenizer and end tokens without its weights."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def end_ids(self) -> Sequence[int]:
        """Tokens that end a completion."""


TurnReader = Callable[[np.ndarray, np.ndarray, bool | None], Sequence[ToolCall]]
"""(tokens of a turn, tokens before it, whether these open thoughts) -> the calls that the turn ends with.

None: the end of the tokens before it tells.
"""


def turn_reader(policy: Speaker, schemas: Sequence[Mapping[str, object]]) -> TurnReader:
    """Return the reader of turns in a model's chats. Raises ConfigError for an invalid response_template."""
    tokenizer = policy.tokenizer
    if given := getattr(tokenizer, "response_template", None):
        try:
            from transformers.utils.chat_parsing import ResponseParser

            ResponseParser(given, prefix="")
        except (ImportError, ValueError) as error:
            name = tokenizer.name_or_path or "the model"
            raise ConfigError(f"{name}: the response_template of its tokenizer: {error}") from None
        return partial(_by_response_template, policy, schemas)
    template = tokenizer.get_chat_template(tools=schemas) if tokenizer.chat_template else ""
    form = form_of_template(template)
    types = types_of(schemas)
    marks = template_facts(tokenizer).marks
    text_of = FaithfulText(tokenizer, policy.end_ids)

    def read(turn: np.ndarray, prompt: np.ndarray, begun: bool | None = None) -> Sequence[ToolCall]:
        own = marks.begun_by(tokenizer.decode(prompt[-HEADER:].tolist()))
        own = own if begun is None else marks._replace(begun=begun)
        return read_turn(text_of(turn.tolist()), own, form, types).calls

    return read


def calls_in_text(text: str) -> Sequence[ToolCall]:
    """Return the calls of a turn in plain text, whose prompt says how to call, and nothing of thoughts."""
    return read_turn(text, PLAIN).calls


def reader_by(policy: Policy) -> Reader:
    """Return the reader of a model's completions, for rewards."""

    def calls(problem: Problem, completion: Completion) -> Sequence[ToolCall]:
        told = problem.template.get("tools")
        if isinstance(problem.prompt, str) or not (policy.tokenizer.chat_template and len(completion.tokens)):
            return calls_in_text(completion.text)
        prompt = completion.tokens[:0]
        if getattr(policy.tokenizer, "response_template", None):  # whose parser begins with the prompt
            prompt = np.array(chat_tokens(policy.tokenizer, problem.prompt, problem.template), np.int64)
        read = turn_reader(policy, told if isinstance(told, Sequence) else ())
        return read(completion.tokens, prompt, problem.thoughts.begun)

    return Reader(policy.decode, calls)


def _by_response_template(
    policy: Speaker,
    schemas: Sequence[Mapping[str, object]],
    turn: np.ndarray,
    prompt: np.ndarray,
    _: bool | None = None,
) -> Sequence[ToolCall]:
    """Return the calls that the tokenizer's own parser finds; a turn that it cannot read has none."""
    whole, before = (policy.tokenizer.decode(ids.tolist()) for ids in (turn, prompt))
    try:
        message = policy.tokenizer.parse_response(whole, prefix=before, tools=list(schemas))
        return [call_of(call.get("function", call)) for call in message.get("tool_calls") or ()]
    except Exception:  # a template is its author's, and fails in ways of its own at what a model writes
        return []
