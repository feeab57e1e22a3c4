"""In which words a model calls: read off its tokenizer.

    <tool_call>{"name": "look_up", "arguments": {"word": "covey"}}</tool_call>         Qwen, Hermes, SmolLM
    <tool_call><function=look_up><parameter=word>covey</parameter></function></tool_call>      Qwen 3.5
    <tool_call>look_up<arg_key>word</arg_key><arg_value>covey</arg_value></tool_call>  GLM
    {"name": "look_up", "parameters": {"word": "covey"}}                               Llama 3
    [TOOL_CALLS][{"name": "look_up", "arguments": {"word": "covey"}}]                  Mistral, or
    [TOOL_CALLS]look_up[ARGS]{"word": "covey"}

Families with words of their own are in `families.py`. A tokenizer that has a `response_template` says itself
how its model's calls are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from covey.calling.calls import NO_JSON, ToolCall, call_of, calls_in, read_json
from covey.calling.families import deepseek_calls, gemma_calls, harmony_calls, muse_calls, python_calls
from covey.errors import ConfigError
from covey.models.template import HEADER, begun_in, template_facts, without_thoughts
from covey.rewards.isolated import strict_json


class Speaker(Protocol):
    """A policy, or what is known of one without its weights."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def end_ids(self) -> Sequence[int]:
        """Tokens that end a completion."""


Reader = Callable[[np.ndarray, np.ndarray], list[ToolCall]]
"""Tokens of a turn, and of all before it -> the calls that it ends with."""
Types = Mapping[str, Mapping[str, object]]
"""The JSON type of each argument of each tool."""

FUNCTION = re.compile(r"<function=([\w.-]+)>(.*)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
TOOL_CALLS = "[TOOL_CALLS]"


def reader_of(policy: Speaker, schemas: Sequence[Mapping[str, object]]) -> Reader:
    """How to read the calls in a model's chats. Raises ConfigError where its tokenizer says it wrongly."""
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
    read = next((form for mark, form in CALL_FORMS.items() if mark in template), _as_json)
    types = _types(schemas)
    marks = template_facts(tokenizer).marks

    def reader(turn: np.ndarray, prompt: np.ndarray) -> list[ToolCall]:
        header = tokenizer.decode(prompt[-HEADER:].tolist()).rstrip()
        opened = begun_in(header, marks) if header.endswith(marks.open) else marks._replace(begun=False)
        said = without_thoughts(turn_text(policy, turn), opened)
        return [] if said is None else read(said, types)

    return reader


def turn_text(policy: Speaker, turn: np.ndarray) -> str:
    """A turn's text with the control tokens that calls may have, but for its end."""
    kept = len(turn) - (int(turn[-1]) in policy.end_ids)
    return policy.tokenizer.decode(turn[:kept].tolist(), skip_special_tokens=False)


def _by_response_template(
    policy: Speaker, schemas: Sequence[Mapping[str, object]], turn: np.ndarray, prompt: np.ndarray
) -> list[ToolCall]:
    """What the tokenizer makes of a turn; what it cannot read is no call."""
    whole, before = (policy.tokenizer.decode(ids.tolist()) for ids in (turn, prompt))
    try:
        message = policy.tokenizer.parse_response(whole, prefix=before, tools=list(schemas))
        return [call_of(call.get("function", call)) for call in message.get("tool_calls") or ()]
    except Exception:  # a template is its author's, and fails in ways of its own at what a model writes
        return []


def _as_json(turn: str, _: Types) -> list[ToolCall]:
    return calls_in(turn)


def _as_functions(turn: str, types: Types) -> list[ToolCall]:
    def read(text: str) -> ToolCall:
        if not (found := FUNCTION.fullmatch(text.strip())):
            return ToolCall("", {}, "this is no <function=...> with its <parameter=...>")
        return _typed(found[1], PARAMETER.findall(found[2]), types)

    return calls_in(turn, read)


def _as_pairs(turn: str, types: Types) -> list[ToolCall]:
    def read(text: str) -> ToolCall:
        return _typed(text.partition("<arg_key>")[0].strip(), PAIR.findall(text), types)

    return calls_in(turn, read)


def _bare(turn: str, _: Types) -> list[ToolCall]:
    """A turn that is JSON with a name and parameters, and nothing else."""
    said = turn.rpartition("</think>")[2].strip().removeprefix("<|python_tag|>").strip()
    if not said.startswith("{"):
        return []
    try:
        found = strict_json(said)
    except ValueError:
        return [ToolCall("", {}, NO_JSON)] if '"parameters"' in said else []
    if not isinstance(found, Mapping) or not {"name", "parameters"} <= set(found):
        return []
    return [call_of({"name": found["name"], "arguments": found["parameters"]})]


def _after_mark(turn: str, _: Types) -> list[ToolCall]:
    """A list of calls, or a name and its arguments, after each mark."""
    found: list[ToolCall] = []
    for block in turn.rpartition("[/THINK]")[2].split(TOOL_CALLS)[1:]:
        if named := NAMED.fullmatch(block):
            found.append(call_of({"name": named[1], "arguments": named[2]}))
            continue
        try:
            several = strict_json(block)
        except ValueError:
            several = None
        found += [call_of(one) for one in several] if isinstance(several, list) else [read_json(block)]
    return found


def _as_elements(turn: str, types: Types) -> list[ToolCall]:
    return [_typed(name, given, types) for name, given in muse_calls(turn)]


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
"""What stands in the chat templates that teach a form, and its reader; others have JSON between tags."""


def _types(schemas: Sequence[Mapping[str, object]]) -> Types:
    functions = [schema["function"] for schema in schemas]
    # The schemas are Transformers', which declares no type for them.
    return {
        f["name"]: {n: p.get("type") for n, p in f["parameters"]["properties"].items()}  # type: ignore[index]
        for f in functions
    }


def _typed(name: str, given: Sequence[tuple[str, str]], types: Types) -> ToolCall:
    """A call whose arguments were texts: those that the tool does not want as such are JSON."""
    wanted = types.get(name, {})
    return ToolCall(name, {key: _value(text, wanted.get(key)) for key, text in given})


def _value(text: str, kind: object) -> object:
    if kind == "string":
        return text
    try:
        return strict_json(text.lower() if kind == "boolean" else text)
    except ValueError:
        return text
