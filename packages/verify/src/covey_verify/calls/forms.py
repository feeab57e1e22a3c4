"""Call forms, recognized by a chat template or by a text.

    <tool_call>{"name": "look_up", "arguments": {"word": "covey"}}</tool_call>         Qwen, Hermes, SmolLM
    <tool_call><function=look_up><parameter=word>covey</parameter></function></tool_call>      Qwen 3.5
    <tool_call>look_up<arg_key>word</arg_key><arg_value>covey</arg_value></tool_call>  GLM
    <atem:invoke name="look_up"><atem:parameter name="word">covey</atem:parameter>...  Muse
    {"name": "look_up", "parameters": {"word": "covey"}}                               Llama 3
    [TOOL_CALLS][{"name": "look_up", "arguments": {"word": "covey"}}]                  Mistral, or
    [TOOL_CALLS]look_up[ARGS]{"word": "covey"}

`families.py` has the forms of single families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from covey_verify.calls.arguments import Misfit, convert_value
from covey_verify.calls.call import NO_JSON, UNCLOSED, ReadAt, ToolCall, Types, call_of, calls_of, no_json
from covey_verify.calls.families import (
    DEEPSEEK,
    GEMMA,
    HARMONY,
    LFM2,
    deepseek_calls,
    gemma_calls,
    harmony_calls,
    python_calls,
)
from covey_verify.extract import THINK_CLOSE
from covey_verify.isolated import after_blanks, strict_json, strict_json_at

OPEN_CALL = "<tool_call>"
CLOSE_CALL = "</tool_call>"
TOOL_CALLS = "[TOOL_CALLS]"
PYTHON_WORDS: Mapping[str, object] = {"True": True, "False": False, "None": None}
"""Python's words for JSON's constants, common in forms that write values as texts."""


class ValueMarks(NamedTuple):
    """Patterns of a form that writes each argument between marks; all are matched at a position in a text."""

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
    """Remove from a value the characters that the template writes around it."""
    shown: str
    """The expected form, in words for the model."""
    begin: str = OPEN_CALL
    """The beginning of a call."""
    close: str = CLOSE_CALL
    """The end of a call. If it occurs twice before the next call, the call may end at either place."""


FUNCTION_MARKS = ValueMarks(
    name=re.compile(r"<tool_call>\s*<function=([\w.-]+)>"),
    opens=re.compile(r"\s*<parameter=([\w.-]+)>\n?"),
    opening="<parameter={}>",
    closes=re.compile(r"</parameter>(?=\s*(?:<parameter=[\w.-]+>|</function>\s*</tool_call>))"),
    ends=re.compile(r"\s*</function>\s*</tool_call>"),
    value=lambda value: value.removesuffix("\n"),
    shown="<function=...> with its <parameter=...>, each closed",
)
PAIR_MARKS = ValueMarks(
    name=re.compile(r"<tool_call>\s*([^<>\s]+)"),
    opens=re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>"),
    opening="<arg_key>{}</arg_key>",
    closes=re.compile(r"</arg_value>(?=\s*(?:<arg_key>[^<>]*</arg_key>\s*<arg_value>|</tool_call>))"),
    ends=re.compile(r"\s*</tool_call>"),
    value=str,
    shown="name with its <arg_key> and <arg_value>, each closed",
)
ELEMENT_MARKS = ValueMarks(
    name=re.compile(r'<atem:invoke name="([\w.-]+)">'),
    opens=re.compile(r'\s*<atem:parameter name="([\w.-]+)">'),
    opening='<atem:parameter name="{}">',
    closes=re.compile(r"</atem:parameter>(?=\s*(?:<atem:parameter name=|</atem:invoke>))"),
    ends=re.compile(r"\s*</atem:invoke>"),
    value=str,
    shown="<atem:invoke> with its <atem:parameter>, each closed",
    begin="<atem:invoke name=",
    close="</atem:invoke>",
)
NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


class CallForm(NamedTuple):
    """The form in which a family of models writes calls."""

    shown: str
    """Part of a chat template that shows it."""
    mark: re.Pattern[str]
    """The beginning of a call."""
    read: ReadAt
    sign: re.Pattern[str]
    """The beginning of a call in this form and in no other."""
    ends: re.Pattern[str] | None = None
    """The end of a turn that ends with calls; None if any end will do."""
    first: bool = False
    """Whether a call can only begin a turn, or its answer."""


def _tagged_calls(text: str, position: int, _: Types) -> tuple[list[ToolCall], int]:
    """Read calls in JSON after a mark. If there is no JSON, reading continues after the mark."""
    position = after_blanks(text, position + len(OPEN_CALL))
    try:
        calls, end = strict_json_at(text, position)
    except ValueError as error:
        return [no_json(error)], position
    # After the JSON only the closing mark may follow, or the next call's mark.
    closed = after_blanks(text, end)
    if not text.startswith((CLOSE_CALL, OPEN_CALL), closed):
        return [ToolCall("", {}, NO_JSON if closed < len(text) else UNCLOSED)], end
    return calls_of(calls), closed


def _marked_calls(marks: ValueMarks, text: str, start: int, types: Types) -> tuple[list[ToolCall], int]:
    """Read a call whose arguments are between marks. A mark that cannot end a value belongs to the value."""
    call, end = _marked_call(types, marks, text, start)
    rest = text[end : _next(text, marks.begin, end)]
    if not call.wrong and marks.close in rest:  # the call could end at either of the two
        call = ToolCall("", {}, f"{marks.close} stands twice behind a call: its values cannot be told apart")
    return [call], end


def _marked_call(types: Types, marks: ValueMarks, text: str, position: int) -> tuple[ToolCall, int]:
    """Read the call at a position. Return it, or a call that tells its fault, and where reading continues."""
    named = marks.name.match(text, position)
    if named is None:
        return ToolCall("", {}, f"this is no {marks.shown}"), position + 1
    name = named[1].strip()
    schemas = types.get(name, {})
    texts = dict[str, str]()
    position = named.end()
    while (opened := marks.opens.match(text, position)) is not None:
        key = opened[1].strip()
        value = _marked_value(marks, opened, text, schemas)
        if value.wrong:
            return ToolCall(name, {}, value.wrong), value.end
        if key in texts:
            return ToolCall(name, {}, f"{key[:40]!r} is given twice"), value.end
        texts[key] = value.text
        position = value.end
    ended = marks.ends.match(text, position)
    if ended is None:
        return ToolCall(name, {}, f"this is no {marks.shown}"), position
    arguments = {key: _parse_bare(written, schemas.get(key)) for key, written in texts.items()}
    return ToolCall(name, arguments), ended.end()


class MarkedValue(NamedTuple):
    """The value of one argument, as it was written between its marks."""

    text: str
    end: int
    """The end of its closing mark, or where reading continues if it is wrong."""
    wrong: str = ""
    """The fault, in words for the model; empty if there is none."""


def _marked_value(
    marks: ValueMarks, opened: re.Match[str], text: str, schemas: Mapping[str, object]
) -> MarkedValue:
    """Read the value after an opening mark. The tool's arguments are the keys of ``schemas``."""
    unclosed = f"the value of {opened[1].strip()[:40]!r} is never closed"
    start = opened.end()
    closed = marks.closes.search(text, start)
    if closed is None:
        return MarkedValue("", _next(text, THINK_CLOSE, start), unclosed)
    value = text[start : closed.start()]
    # The closing mark may belong to another call, if this call was abandoned within a thought that ended.
    thought_end = value.find(THINK_CLOSE)
    if thought_end >= 0 and OPEN_CALL in value[thought_end:]:
        return MarkedValue("", start + thought_end, f"this is no {marks.shown}")
    # It may also belong to another argument of this call.
    if any(marks.opening.format(other) in value for other in schemas):
        return MarkedValue("", closed.end(), unclosed)
    return MarkedValue(marks.value(value), closed.end())


def _parse_bare(text: str, schema: object) -> object:
    """Return an argument that was written without quotes: as JSON if that fits its schema, else as text."""
    try:
        value = strict_json(text)
    except ValueError:
        value = PYTHON_WORDS.get(text.strip().capitalize(), text) if isinstance(schema, Mapping) else text
    if isinstance(value, str) or (not _fits(value, schema) and _fits(text, schema)):
        return text
    return value


def _fits(value: object, schema: object) -> bool:
    try:
        convert_value(value, schema, "")
    except Misfit:
        return False
    return True


def _next(text: str, mark: str, start: int) -> int:
    """Return where the next mark begins; the text's length if there is none."""
    index = text.find(mark, start)
    return len(text) if index < 0 else index


def _bare_calls(text: str, position: int, _: Types) -> tuple[list[ToolCall], int]:
    """Read JSON objects with a name and parameters, if nothing else follows."""
    start = text.index("{", position)
    position = start
    values = list[object]()
    while text.startswith("{", position):
        try:
            value, position = strict_json_at(text, position)
        except ValueError:
            looks_like_a_call = '"parameters"' in text[start:]
            return [ToolCall("", {}, NO_JSON)] if looks_like_a_call else [], position + 1
        values.append(value)
        position = after_blanks(text, position)
        # Llama 3 separates several calls by semicolons; some models write commas.
        if text.startswith((";", ","), position):
            position = after_blanks(text, position + 1)
    are_calls = all(isinstance(value, Mapping) and {"name", "parameters"} <= set(value) for value in values)
    return list(map(call_of, values)) if are_calls and position == len(text) else [], position


def _mistral_calls(text: str, position: int, _: Types) -> tuple[list[ToolCall], int]:
    """Read a list of calls, or a name and its arguments, after Mistral's mark."""
    position += len(TOOL_CALLS)
    named = NAMED.match(text, position)
    start = after_blanks(text, position) if named is None else named.end()
    try:
        value, end = strict_json_at(text, start)
    except ValueError as error:
        return [no_json(error)], start
    if named is not None:
        return [call_of({"name": named[1], "arguments": value})], end
    return calls_of(value), end


TAG = re.compile(re.escape(OPEN_CALL))
TAG_END = re.compile(rf"{CLOSE_CALL}\s*\Z")
MISTRAL = re.compile(re.escape(TOOL_CALLS))
BARE = re.compile(r"\s*+(?:<\|python_tag\|>)?+\s*+(?=\{)")
BARE_SIGN = re.compile(rf'(?:\A|{THINK_CLOSE}){BARE.pattern}\{{\s*"name"')
PYTHON = re.compile(re.escape(LFM2))
GEMMA_END = re.compile(r"<tool_call\|>\s*(?:<\|tool_response>\s*)?\Z")
DEEPSEEK_END = re.compile(r"<｜tool▁calls?▁end｜>\s*\Z")
ELEMENT = re.compile("<atem:invoke name=")
ELEMENT_END = re.compile(r"</atem:function_calls>\s*(?:<\|eom\|>\s*)?\Z")
FORMS = (
    CallForm(
        "<function=",
        TAG,
        partial(_marked_calls, FUNCTION_MARKS),
        re.compile(r"<tool_call>\s*<function="),
        TAG_END,
    ),
    CallForm(
        "<arg_key>",
        TAG,
        partial(_marked_calls, PAIR_MARKS),
        re.compile(r"<tool_call>\s*[\w.-]+\s*<"),
        TAG_END,
    ),
    CallForm(TOOL_CALLS, MISTRAL, _mistral_calls, MISTRAL),
    CallForm('{"name": function name, "parameters"', BARE, _bare_calls, BARE_SIGN, first=True),
    CallForm("<|tool_call>call:", re.compile(r"<\|tool_call>call:"), gemma_calls, GEMMA, GEMMA_END),
    CallForm(LFM2, PYTHON, python_calls, PYTHON),
    CallForm("<|channel|>commentary", HARMONY, harmony_calls, HARMONY),
    CallForm(
        "<｜tool▁call▁begin｜>", re.compile("<｜tool▁call▁begin｜>"), deepseek_calls, DEEPSEEK, DEEPSEEK_END
    ),
    CallForm("<atem:invoke", ELEMENT, partial(_marked_calls, ELEMENT_MARKS), ELEMENT, ELEMENT_END),
)
"""The forms that a chat template shows; all others have JSON between tags."""
TAGGED = CallForm(OPEN_CALL, TAG, _tagged_calls, TAG, TAG_END)


def form_of_template(template: str) -> CallForm:
    """Return the form that a chat template shows: most contain an example of a call."""
    return next((form for form in FORMS if form.shown in template), TAGGED)


def form_of_text(text: str) -> CallForm:
    """Return the form of the first call in a text of an unknown model."""
    start = len(text)
    first = TAGGED
    for form in (*FORMS, TAGGED):
        sign = form.sign.search(text)
        if sign is not None and sign.start() < start:
            start = sign.start()
            first = form
    return first


def types_of(schemas: Sequence[object]) -> Types:
    """Return the schemas of arguments in tools' schemas. A row may bring its own, of any structure."""
    types = {}
    for schema in schemas:
        # Both OpenAI's form, {"type": "function", "function": {...}}, and the inner object alone.
        function = schema.get("function", schema) if isinstance(schema, Mapping) else None
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(function, Mapping) and isinstance(properties, Mapping):
            types[str(function.get("name"))] = properties
    return types
