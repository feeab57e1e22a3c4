"""Call formats, recognized by the tokenizer's chat template.

    <tool_call>{"name": "look_up", "arguments": {"word": "covey"}}</tool_call>         Qwen, Hermes, SmolLM
    <tool_call><function=look_up><parameter=word>covey</parameter></function></tool_call>      Qwen 3.5
    <tool_call>look_up<arg_key>word</arg_key><arg_value>covey</arg_value></tool_call>  GLM
    {"name": "look_up", "parameters": {"word": "covey"}}                               Llama 3
    [TOOL_CALLS][{"name": "look_up", "arguments": {"word": "covey"}}]                  Mistral, or
    [TOOL_CALLS]look_up[ARGS]{"word": "covey"}

`families.py` has formats of single families. A tokenizer that has a `response_template` defines itself how
its model's calls are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from covey.models.chat import chat_tokens
from covey.models.policy import Policy
from covey.models.template import HEADER, begun_in, template_facts, without_thoughts
from covey.rewards.reading import CallReader
from covey.sampling.tools.calls import NO_JSON, ToolCall, as_message, call_of, calls_in, calls_of
from covey.sampling.tools.families import deepseek_calls, gemma_calls, harmony_calls, muse_calls, python_calls
from covey.types import Completion, Problem
from covey_verify.errors import ConfigError
from covey_verify.extract import THINK_CLOSE, THINK_OPEN
from covey_verify.isolated import after_blanks, strict_json, strict_json_at
from covey_verify.texts.structured import CLOSE_CALL, OPEN_CALL


class Speaker(Protocol):
    """A policy, or its tokenizer and end tokens without its weights."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def end_ids(self) -> Sequence[int]:
        """Tokens that end a completion."""


Reader = Callable[[np.ndarray, np.ndarray], list[ToolCall]]
"""(tokens of a turn, tokens before it) -> the calls that the turn ends with."""
Types = Mapping[str, Mapping[str, object]]
"""The JSON type of each tool's arguments: name of a tool -> name of an argument -> type."""


class ValueMarks(NamedTuple):
    """Patterns of a format that writes each argument between marks; each is matched at a place of a text."""

    name: re.Pattern[str]
    """The call's beginning, up to and including the tool's name."""
    opens: re.Pattern[str]
    """The mark before a value, with the argument's name."""
    opening: str
    """The opening mark as text, to be formatted with an argument's name."""
    closes: re.Pattern[str]
    """The mark after a value; it counts only before another argument or the call's end."""
    ends: re.Pattern[str]
    """The call's end."""
    value: Callable[[str], str]
    """Remove from a value what the template writes around it."""
    shown: str
    """The expected form, in words for the model."""


FUNCTION_MARKS = ValueMarks(
    re.compile(r"\s*<function=([\w.-]+)>"),
    re.compile(r"\s*<parameter=([\w.-]+)>\n?"),
    "<parameter={}>",
    re.compile(r"</parameter>(?=\s*(?:<parameter=[\w.-]+>|</function>\s*</tool_call>))"),
    re.compile(r"\s*</function>\s*</tool_call>"),
    lambda value: value.removesuffix("\n"),
    "<function=...> with its <parameter=...>, each closed",
)
PAIR_MARKS = ValueMarks(
    re.compile(r"\s*([^<>\s]+)"),
    re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>"),
    "<arg_key>{}</arg_key>",
    re.compile(r"</arg_value>(?=\s*(?:<arg_key>[^<>]*</arg_key>\s*<arg_value>|</tool_call>))"),
    re.compile(r"\s*</tool_call>"),
    lambda value: value,
    "name with its <arg_key> and <arg_value>, each closed",
)
NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
TOOL_CALLS = "[TOOL_CALLS]"
MISTRAL_MARKS = re.compile(r"\[TOOL_CALLS\]|\[/THINK\]")


def reader_of(policy: Speaker, schemas: Sequence[Mapping[str, object]]) -> Reader:
    """Return the reader of calls in a model's chats. Raises ConfigError for an invalid response_template."""
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
    # The first format whose mark the template contains; most templates show the model a call.
    read = next((form for mark, form in CALL_FORMS.items() if mark in template), _as_json)
    types = _types(schemas)
    marks = template_facts(tokenizer).marks

    def reader(turn: np.ndarray, prompt: np.ndarray) -> list[ToolCall]:
        # The end of the prompt says whether the template has opened thoughts, which the turn then continues.
        header = tokenizer.decode(prompt[-HEADER:].tolist()).rstrip()
        opened = begun_in(header, marks) if header.endswith(marks.open) else marks._replace(begun=False)
        text = turn_text(policy, turn)
        whole = without_thoughts(text, opened)
        # The forms' readers know `<think>` themselves, also as a word in an argument.
        return [] if whole is None else read(text if marks.open == THINK_OPEN else whole, types)

    return reader


def calls_by(policy: Policy) -> CallReader:
    """Return the reader of calls for rewards, where no tool answers: it reads them as ``reader_of`` does."""

    def read(problem: Problem, completion: Completion) -> list[dict[str, object]]:
        told = problem.template.get("tools")
        if isinstance(problem.prompt, str) or not (policy.tokenizer.chat_template and len(completion.tokens)):
            return list(map(as_message, calls_in(completion.text)))
        prompt = completion.tokens[:0]
        # A response template's reader begins with the prompt; others ask it whether thoughts are open.
        if problem.thoughts.begun or getattr(policy.tokenizer, "response_template", None):
            prompt = np.array(chat_tokens(policy.tokenizer, problem.prompt, problem.template), np.int64)
        reader = reader_of(policy, told if isinstance(told, Sequence) else ())
        return list(map(as_message, reader(completion.tokens, prompt)))

    return read


def text_calls(text: str) -> list[dict[str, object]]:
    """Return the calls in a text where no model is at hand: in the format whose mark the text has."""
    forms = (form for mark, form in CALL_FORMS.items() if mark in text)
    read = next(forms, _bare if text.lstrip().startswith("{") else _as_json)
    return list(map(as_message, read(text, {})))


def turn_text(policy: Speaker, turn: np.ndarray) -> str:
    """Return a turn's text with the control tokens that calls may have, but without its end token."""
    kept = len(turn) - (int(turn[-1]) in policy.end_ids)
    return policy.tokenizer.decode(turn[:kept].tolist(), skip_special_tokens=False)


def _by_response_template(
    policy: Speaker, schemas: Sequence[Mapping[str, object]], turn: np.ndarray, prompt: np.ndarray
) -> list[ToolCall]:
    """Return the calls that the tokenizer's own parser finds; a turn that it cannot read has none."""
    whole, before = (policy.tokenizer.decode(ids.tolist()) for ids in (turn, prompt))
    try:
        message = policy.tokenizer.parse_response(whole, prefix=before, tools=list(schemas))
        return [call_of(call.get("function", call)) for call in message.get("tool_calls") or ()]
    except Exception:  # a template is its author's, and fails in ways of its own at what a model writes
        return []


def _as_json(turn: str, _: Types) -> list[ToolCall]:
    return calls_in(turn)


def _as_functions(turn: str, types: Types) -> list[ToolCall]:
    return calls_in(turn, partial(_marked, types, FUNCTION_MARKS))


def _as_pairs(turn: str, types: Types) -> list[ToolCall]:
    return calls_in(turn, partial(_marked, types, PAIR_MARKS))


def _marked(types: Types, marks: ValueMarks, text: str, place: int) -> tuple[list[ToolCall], int]:
    """Read a call whose arguments are between marks. A mark that cannot end a value belongs to the value."""
    call, end = _values(types, marks, text, place)
    # Up to the next call, or the end of the text.
    behind = text[end : _next(text, OPEN_CALL, end)]
    if not call.wrong and CLOSE_CALL in behind:  # it could end at either of the two
        call = ToolCall("", {}, f"{CLOSE_CALL} stands twice behind a call: its values cannot be told apart")
    return [call], end


def _values(types: Types, marks: ValueMarks, text: str, place: int) -> tuple[ToolCall, int]:
    named = marks.name.match(text, place)
    if named is None:
        return ToolCall("", {}, f"this is no {marks.shown}"), place
    name = named[1].strip()
    place = named.end()
    arguments = dict[str, str]()
    # Each round reads one argument: its mark, its value, and the mark that closes it.
    while (opened := marks.opens.match(text, place)) is not None:
        closed = marks.closes.search(text, opened.end())
        key = opened[1].strip()
        start = opened.end()
        if closed is None:
            unclosed = ToolCall(name, {}, f"the value of {key[:40]!r} is never closed")
            return unclosed, _next(text, THINK_CLOSE, start)
        value = text[start : closed.start()]
        thought = value.find(THINK_CLOSE)
        if thought >= 0 and OPEN_CALL in value[thought:]:  # a call that was only thought of, and not finished
            return ToolCall(name, {}, f"this is no {marks.shown}"), start + thought
        # A value that holds the mark of one of the tool's arguments: its own closing mark is missing.
        if any(marks.opening.format(other) in value for other in types.get(name, ())):
            return ToolCall(name, {}, f"the value of {key[:40]!r} is never closed"), closed.end()
        if key in arguments:
            return ToolCall(name, {}, f"{key[:40]!r} is given twice"), closed.end()
        arguments[key] = marks.value(value)
        place = closed.end()
    ended = marks.ends.match(text, place)
    if ended is None:
        return ToolCall(name, {}, f"this is no {marks.shown}"), place
    return _typed(name, arguments, types), ended.end()


def _next(text: str, mark: str, place: int) -> int:
    found = text.find(mark, place)
    return len(text) if found < 0 else found


def _bare(turn: str, _: Types) -> list[ToolCall]:
    """Read a turn that is nothing but JSON objects with a name and parameters."""
    text = turn.rpartition("</think>")[2].strip().removeprefix("<|python_tag|>").strip()
    values = list[object]()
    place = 0
    while text.startswith("{", place):
        try:
            value, place = strict_json_at(text, place)
        except ValueError:
            return [ToolCall("", {}, NO_JSON)] if '"parameters"' in text else []
        values.append(value)
        place = after_blanks(text, place)
        # Llama 3 separates several calls by semicolons; some models write commas.
        if text.startswith((";", ","), place):
            place = after_blanks(text, place + 1)
    whole = bool(values) and place == len(text)
    if not whole or not all(
        isinstance(value, Mapping) and {"name", "parameters"} <= set(value) for value in values
    ):
        return []
    return list(map(call_of, values))


def _after_mark(turn: str, _: Types) -> list[ToolCall]:
    """Read a list of calls, or a name and its arguments, after each of Mistral's marks."""
    result: list[ToolCall] = []
    mark = MISTRAL_MARKS.search(turn)
    while mark is not None:
        place = mark.end()
        if mark[0] == TOOL_CALLS:
            calls, place = _behind_mark(turn, place)
            result += calls
        else:
            result = []  # they were thought of
        mark = MISTRAL_MARKS.search(turn, place)
    return result


def _behind_mark(turn: str, place: int) -> tuple[list[ToolCall], int]:
    named = NAMED.match(turn, place)
    start = after_blanks(turn, place) if named is None else named.end()
    try:
        found, end = strict_json_at(turn, start)
    except ValueError:
        return [ToolCall("", {}, NO_JSON)], start
    if named is not None:
        return [call_of({"name": named[1], "arguments": found})], end
    return calls_of(found), end


def _as_elements(turn: str, types: Types) -> list[ToolCall]:
    return [_typed(name, dict(given), types) for name, given in muse_calls(turn)]


CALL_FORMS: Mapping[str, Callable[[str, Types], list[ToolCall]]] = {
    "<function=": _as_functions,
    "<arg_key>": _as_pairs,
    TOOL_CALLS: _after_mark,
    '{"name": function name, "parameters"': _bare,
    "<|tool_call>call:": lambda turn, _: gemma_calls(turn),
    "<|tool_call_start|>": lambda turn, _: python_calls(turn),
    "<|channel|>commentary": lambda turn, _: harmony_calls(turn),
    "<｜tool▁call▁begin｜>": lambda turn, _: deepseek_calls(turn),
    "<atem:invoke": _as_elements,
}
"""Part of a chat template -> reader of the format that it shows; all others have JSON between tags."""


def _types(schemas: Sequence[object]) -> Types:
    """Return the types in schemas, which may be a row's own and so of any structure."""
    types = {}
    for schema in schemas:
        # Both OpenAI's form, {"type": "function", "function": {...}}, and the inner object alone.
        function = schema.get("function", schema) if isinstance(schema, Mapping) else None
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        known = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(function, Mapping) and isinstance(known, Mapping):
            kinds = {n: p.get("type") for n, p in known.items() if isinstance(p, Mapping)}
            types[str(function.get("name"))] = kinds
    return types


def _typed(name: str, given: Mapping[str, str], types: Types) -> ToolCall:
    """Return a call whose arguments were written as texts: those that are no strings to the tool are JSON."""
    wanted = types.get(name, {})
    return ToolCall(name, {key: _value(text, wanted.get(key)) for key, text in given.items()})


def _value(text: str, kind: object) -> object:
    if kind == "string":
        return text
    try:
        # Python's True and False are common in these formats. Other text is left to the schema's check.
        return strict_json(text.lower() if kind == "boolean" else text)
    except ValueError:
        return text
