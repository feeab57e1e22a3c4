"""Rewards for structured output: JSON, JSON that conforms to a schema, tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

from covey_verify.calls.call import ToolCall, as_message, call_of, canonical
from covey_verify.calls.forms import CLOSE_CALL, OPEN_CALL, form_of_text
from covey_verify.calls.turn import read_turn
from covey_verify.contract import in_subprocess, reward, score_without_result
from covey_verify.extract import (
    TextOrMessages,
    Turns,
    after_reasoning,
    code_block,
    extract,
    find_tagged,
    model_turns,
    text_of,
)
from covey_verify.isolated import unchecked_formats
from covey_verify.mathematics.reader import plain_number as number
from covey_verify.types import Check, Score

UNUSABLE = ("ModuleNotFound", "UnknownType", "SchemaError", "_WrappedReferencingError")
"""Names of exceptions of a validator that blame the schema, not the document."""


def bad_schemas(rows: Sequence[Mapping[str, object]], **settings: object) -> list[str | None]:
    """Return the fault of each row's own schema, or None."""
    return [_schema_fault({**row, **settings}.get("schema")) for row in rows]


def _schema_fault(schema: object) -> str | None:
    if schema is None:
        return None
    try:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
    except ImportError:
        return "a schema needs jsonschema: pip install 'covey-verify[schema]'"
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        validator_for(parsed).check_schema(parsed)
        if fault := _unchecked_format(parsed):
            return fault
    except SchemaError as error:
        return f"the schema cannot be used: {error.message[:200]}"
    except (ValueError, RecursionError) as error:
        return f"the schema cannot be used: {str(error)[:200]}"
    return None


def _unchecked_format(schema: object) -> str | None:
    formats = unchecked_formats(schema)
    if not formats:
        return None
    remedy = "pip install 'jsonschema[format]', or express it as a pattern"
    return f"the format {min(formats)!r} is not checked here: {remedy}"


def _usable(schema: Mapping[str, object] | str | None) -> Mapping[str, object] | str | None:
    if fault := _schema_fault(schema):
        raise ValueError(fault)
    return schema


@reward(concurrent=True, format_only=True, check_references=bad_schemas)
def json_schema(
    completion: TextOrMessages,
    turns: Turns = (),
    *,
    schema: Annotated[Mapping[str, object] | str | None, Check(_usable)] = None,
    where: Literal["whole", "block", "answer_tag"] = "whole",
) -> Score:
    """Return 1 if the text after the reasoning is JSON that conforms to ``schema``, if there is one, else 0.

    ``schema`` is a setting or a column. Validation runs in a killable subprocess, because a schema's pattern
    may backtrack endlessly.
    """
    text = model_turns(completion, turns)[-1] if where == "whole" else text_of(completion)
    answer = after_reasoning(text)
    if answer is None:
        return Score(0.0, "no_answer")
    document: str | None = answer
    if where == "block":
        document = code_block(answer, "json")
    elif where == "answer_tag":
        document = find_tagged(answer, "answer")
    if not document or not document.strip():
        return Score(0.0, "no_answer")
    parsed = json.loads(schema) if isinstance(schema, str) else schema
    # The column of a row that a script passes has not been checked before.
    if fault := _unchecked_format(parsed):
        return Score(None, "bad_reference", detail=fault)
    result = in_subprocess("conforms", [(document.strip(), parsed)])
    if result.kind == "error" and result.text.startswith(UNUSABLE):
        raise ValueError(f"the schema cannot be used: {result.text}")
    if result.kind != "ok":
        return score_without_result(result)
    return Score(float(result.value is None), extracted=document[:500], detail=result.value or "")


NOT_LAST = "a call before the end of a turn is not made"
Comparator = Literal["exact", "number", "text", "set", "any"]
# Each gets the expected and the made argument.
COMPARATORS: Mapping[str, Callable[[object, object], bool]] = {
    "exact": lambda a, b: canonical(a) == canonical(b),
    "number": lambda a, b: _number(a) is not None and _number(a) == _number(b),
    "text": lambda a, b: (
        str(a).split() == str(b).split() or str(a).casefold().split() == str(b).casefold().split()
    ),
    "set": lambda a, b: (
        sorted(map(canonical, a)) == sorted(map(canonical, b))
        if isinstance(a, list) and isinstance(b, list)
        else False
    ),
    "any": lambda *_: True,
}


@reward(
    concurrent=True,
    verdict=True,
    check_references=lambda rows, **_: bad_calls(rows),
    example=lambda row, **_: "\n".join(
        f"{OPEN_CALL}{json.dumps(as_message(c)['function'])}{CLOSE_CALL}"
        for c in _expected_calls(row["tool_calls"])
    ),
    counterexample=lambda *_, **__: f'{OPEN_CALL}{{"name": "canary", "arguments": {{}}}}{CLOSE_CALL}',
)
def tool_calls(
    completion: TextOrMessages,
    tool_calls: object,
    turns: Turns = (),
    *,
    ordered: bool = False,
    partial: bool = False,
    compare: Mapping[str, Comparator] | None = None,
) -> Score:
    """Return 1 if exactly the expected calls are made, else 0; with ``partial`` the fraction that matches.

    If the run has parsed calls, in the form that its model writes, these count; otherwise the calls of the
    messages, or of the text after the reasoning. ``compare`` names the comparator of an argument, by
    `tool.argument` or `argument`; 2.0 equals 2. Unexpected calls count against the completion.
    """
    expected = _expected_calls(tool_calls)
    try:
        calls = _calls_of(completion, turns)
    except ValueError as error:
        return Score(0.0, "unparsable", detail=str(error)[:200])
    if calls is None:
        return Score(0.0, "no_answer")
    # Dividing by the larger number counts both missing and unexpected calls.
    larger = max(len(expected), len(calls))
    fraction = _matches(expected, calls, ordered, compare or {}) / larger if larger else 1.0
    value = fraction if partial else float(fraction == 1.0)
    return Score(
        value,
        extracted=json.dumps([as_message(call)["function"] for call in calls])[:500],
        metrics={"calls": float(len(calls))},
    )


def _matches(
    expected: Sequence[ToolCall], calls: Sequence[ToolCall], ordered: bool, compare: Mapping[str, Comparator]
) -> int:
    """Count the expected calls that were made; if ``ordered``, at the same position."""
    if ordered:
        return sum(_same_call(ours, theirs, compare) for ours, theirs in zip(expected, calls, strict=False))
    matches = 0
    unmatched = list(calls)
    for call in expected:
        match = next((other for other in unmatched if _same_call(call, other, compare)), None)
        if match is not None:
            matches += 1
            unmatched.remove(match)
    return matches


def _expected_calls(column: object) -> list[ToolCall]:
    try:
        calls = json.loads(column) if isinstance(column, str) else column
    except ValueError:
        calls = None
    expected = [call_of(_function_of(call)) for call in calls] if isinstance(calls, Sequence) else None
    if expected is None or any(call.wrong for call in expected):
        raise ValueError("column 'tool_calls' must be a list of {name, arguments}")
    return expected


def _function_of(call: object) -> object:
    """Return {name, arguments} of a call, which chats wrap as {"type": "function", "function": ...}."""
    return call.get("function", call) if isinstance(call, Mapping) else call


def bad_calls(rows: Sequence[Mapping[str, object]], **_: object) -> list[str | None]:
    """Return the reason why each row's expected calls cannot be read, or None."""

    def complaint(row: Mapping[str, object]) -> str | None:
        try:
            _expected_calls(row.get("tool_calls"))
        except ValueError as error:
            return str(error)
        return None

    return list(map(complaint, rows))


def _calls_of(completion: TextOrMessages, turns: Turns) -> Sequence[ToolCall] | None:
    """Return the calls of a completion; None if its reasoning never ended. Raises ValueError."""
    messages = completion if isinstance(completion, list) else ()
    of_messages = _calls_in(messages)
    of_turns = _calls_in(turns)
    answer = extract(completion, "whole") if text_of(completion).strip() else ""
    answered = any(turn["role"] == "tool" for turn in turns)
    # Unfinished reasoning is not an answer, unless a tool has answered calls made before it.
    if answer is None and not of_messages and not (of_turns and answered):
        return None
    raw_calls = [*of_messages, *of_turns]
    calls = [call_of(_function_of(call)) for call in raw_calls]
    wrong = [call["error"] for call in raw_calls if isinstance(call, Mapping) and call.get("error")]
    if not raw_calls:  # the text's calls have not been read yet
        text = model_turns(completion, turns)[-1]
        turn = read_turn(text, form=form_of_text(text))
        calls = list(turn.written)
        wrong = [NOT_LAST] if calls and not turn.ended else []
    if complaints := [*wrong, *(call.wrong for call in calls if call.wrong)]:
        raise ValueError(complaints[0])
    return calls


def _calls_in(turns: Turns) -> list[Any]:
    return [call for turn in turns for call in turn.get("tool_calls") or ()]


def _same_call(expected: ToolCall, call: ToolCall, compare: Mapping[str, Comparator]) -> bool:
    ours = expected.arguments
    theirs = call.arguments
    if expected.name != call.name or set(ours) != set(theirs):
        return False
    for name, value in ours.items():
        comparator = compare.get(f"{expected.name}.{name}", compare.get(name, "exact"))
        if not COMPARATORS[comparator](value, theirs[name]):
            return False
    return True


def _number(value: object) -> Fraction | None:
    return None if isinstance(value, bool) else number(str(value))
