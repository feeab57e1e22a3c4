"""Reading calls, and what is said of wrong ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.sampling.tools.builtin import calculate
from covey.sampling.tools.reader import calls_in_text as calls_in


def call(inside: str) -> str:
    return f"<tool_call>{inside}</tool_call>"


def test_every_call_at_the_end_of_a_turn_is_read() -> None:
    two = "First " + call('{"name": "a", "arguments": {"x": 1}}') + "\n" + call('{"name": "b"}') + "\n"
    assert [(c.name, dict(c.arguments), c.wrong) for c in calls_in(two)] == [
        ("a", {"x": 1}, ""),
        ("b", {}, ""),
    ]


def test_a_call_that_was_only_thought_of_is_not_made_with_the_others() -> None:
    thought = "<think>perhaps " + call('{"name": "a"}') + "?</think>" + call('{"name": "b"}')
    assert [c.name for c in calls_in(thought)] == ["b"]


def test_arguments_may_be_json_in_a_text() -> None:
    (found,) = calls_in(call('{"name": "a", "arguments": "{\\"x\\": 1}"}'))
    assert found.arguments == {"x": 1}


@pytest.mark.parametrize(
    "turn",
    [
        "no call",
        call('{"name": "a"}') + " and then the answer",
        "<think>" + call('{"name": "a"}') + "</think> 4",
        '<tool_call>{"name": "a"}',
    ],
)
def test_what_does_not_end_with_a_call_is_answered_by_nobody(turn: str) -> None:
    assert calls_in(turn) == ()


@pytest.mark.parametrize(
    "inside", ["", "x", "[]", '{"name": 3}', '{"name": "a", "arguments": [1]}', "[" * 5000]
)
def test_a_malformed_call_says_so(inside: str) -> None:
    (found,) = calls_in(call(inside))
    assert "no JSON object" in found.wrong


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    for found in calls_in(call(text)):
        assert found.wrong or isinstance(found.name, str)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        (" (1 + 2) * -3", "-9"),
        ("7/2", "3.5"),
        ("6/3", "2"),
        ("2**100", str(2**100)),
        ("7 % 4", "3"),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1/0",
        "9**9**9**9",
        "10**400",
        "(-1)**.5",
        "x",
        "f(1)",
        "__import__('os')",
        "1 if 2 else 3",
        "'a'*9",
        "1e999",
        "0**-1",
        "-" * 900 + "x",
        "(" * 500,
        "1" * 2000,
    ],
)
def test_what_is_no_arithmetic_is_an_error(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        calculate(expression)
