"""Arguments of calls against the schemas that the model was told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config.sampling import ToolUse
from covey.config.schema import Sandbox
from covey.sampling.tools.reader import calls_in_text as calls_in
from covey.sampling.tools.running import ERROR, Toolbox
from covey.types import Problem
from covey_verify.calls.arguments import Misfit, convert_value
from covey_verify.calls.call import ToolCall

FILE = '''
from typing import Any, Literal

def walk(step: int, pace: float = 1.0, where: Literal["left", "right"] = "left", names: list[str] = None,
         counts: dict[str, int] = {}, note: str | None = None, both: int | list[str] = 0, free: Any = None,
         sure: bool = False) -> str:
    """Walk.

    Args:
        step: How far.
        pace: How fast.
        where: To where.
        names: Of whom.
        counts: Of what.
        note: A word.
        both: This or that.
        free: Anything.
        sure: Whether.
    """
    return repr((step, pace, where, names, counts, note, both, free, sure))
'''
PROBLEM = Problem("p", "?")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Toolbox:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "walking.py").write_text(FILE)
    return Toolbox(ToolUse(functions=("walking.py:walk",)), folder, Sandbox())


def said(box: Toolbox, arguments: str, problem: Problem = PROBLEM) -> str:
    text = f'<tool_call>{{"name": "walk", "arguments": {arguments}}}</tool_call>'
    (call,) = calls_in(text)
    return box.result(call, problem)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"step": 3}', "(3, 1.0, 'left', None, {}, None, 0, None, False)"),
        ('{"step": 3.0}', "(3, 1.0, 'left', None, {}, None, 0, None, False)"),
        ('{"step": -1, "pace": 2, "where": "right"}', "(-1, 2, 'right', None, {}, None, 0, None, False)"),
        ('{"step": 1, "names": null, "note": null}', "(1, 1.0, 'left', None, {}, None, 0, None, False)"),
        ('{"step": 1, "counts": {"a": 2.0}}', "(1, 1.0, 'left', None, {'a': 2}, None, 0, None, False)"),
        (
            '{"step": 1, "both": ["a"], "free": [1.5, {}]}',
            "(1, 1.0, 'left', None, {}, None, ['a'], [1.5, {}], False)",
        ),
    ],
)
def test_what_fits_is_called(box: Toolbox, arguments: str, value: str) -> None:
    assert said(box, arguments) == value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"step": "3"}', 'walk.step must be an integer, but is the text "3"'),
        ('{"step": [3]}', "walk.step must be an integer, but is [3]"),
        ('{"step": null}', "walk.step must be an integer, but is null"),
        ('{"step": true}', "walk.step must be an integer, but is true"),
        ('{"step": 2.5}', "walk.step must be an integer, but is 2.5"),
        ('{"step": 1, "pace": "fast"}', 'walk.pace must be a number, but is the text "fast"'),
        ('{"step": 1, "pace": false}', "walk.pace must be a number, but is false"),
        ('{"step": 1, "where": "up"}', 'walk.where must be one of "left", "right", but is the text "up"'),
        ('{"step": 1, "names": "me"}', 'walk.names must be a list, but is the text "me"'),
        ('{"step": 1, "names": ["me", 4]}', "walk.names[1] must be a text, but is 4"),
        ('{"step": 1, "counts": {"a": "b"}}', 'walk.counts.a must be an integer, but is the text "b"'),
        ('{"step": 1, "both": ["a", 1]}', 'walk.both must be an integer, but is ["a", 1]; or walk.both[1]'),
        ('{"step": 1, "sure": 1}', "walk.sure must be true or false, but is 1"),
        ('{"pace": 1}', "walk lacks 'step'"),
        ('{"step": 1, "far": 2}', "walk has no argument 'far'"),
        ('{"step": 1e999}', "this is no JSON object"),
        ('{"step": Infinity}', "this is no JSON object"),
        ('{"step": 1, "free": [NaN]}', "this is no JSON object"),
        ('{"step": ' + "9" * 400 + "}", "this is no JSON object"),
    ],
)
def test_what_does_not_fit_is_said_to_the_model_and_never_called(
    box: Toolbox, arguments: str, words: str
) -> None:
    answer = said(box, arguments)
    assert answer.startswith(ERROR + words), answer


def test_a_number_that_a_tokenizers_own_reader_lets_through_is_refused(box: Toolbox) -> None:
    from covey_verify.calls.call import call_of

    for value in (float("inf"), float("nan"), [{"a": -float("inf")}], 10**400):
        call = call_of({"name": "walk", "arguments": {"step": 1, "free": value}})
        assert "too large" in box.result(call, PROBLEM)


def test_a_row_that_tells_of_its_tools_is_held_to_what_it_says(box: Toolbox) -> None:
    parameters = {"type": "object", "properties": {"step": {"type": "integer", "enum": [1, 2]}}}
    tools = [{"type": "function", "function": {"name": "walk", "parameters": parameters}}]
    row = Problem("p", [{"role": "user", "content": "?"}], template={"tools": tools})
    assert said(box, '{"step": 2}', row).startswith("(2,")
    assert said(box, '{"step": 3}', row) == f"{ERROR}walk.step must be one of 1, 2, but is 3"


def test_other_keywords_are_the_tools_own_affair() -> None:
    schema = {"type": "string", "pattern": "(a+)+$", "minLength": 9, "x-mine": 1}
    assert convert_value("b", schema, "x") == "b"
    with pytest.raises(Misfit):
        convert_value(1, schema, "x")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"prefixItems": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [1]),
        ({"prefixItems": [{"type": "integer"}], "items": {"type": "null"}}, [1, None], [1, 2]),
        ({"allOf": [{"required": ["a"]}, {"properties": {"a": {"const": 1}}}]}, {"a": 1}, {"a": True}),
        ({"additionalProperties": False, "properties": {"a": {}}}, {"a": 3}, {"b": 3}),
        ({"type": ["integer", "null"]}, None, "x"),
        ({"oneOf": [{"type": "string"}, {"type": "object"}]}, {}, []),
        ({"enum": [2, "a"]}, 2.0, True),
        (False, None, 1),
    ],
)
def test_keywords_that_people_write(schema: Any, good: Any, bad: Any) -> None:
    if schema is not False:
        assert convert_value(good, schema, "x") == good
    with pytest.raises(Misfit, match=r"^x"):
        convert_value(bad, schema, "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
PARAMETERS = st.sampled_from(["step", "pace", "where", "names", "counts", "note", "both", "free", "sure"])


@given(st.dictionaries(PARAMETERS, JSON))
def test_no_call_is_the_end_of_a_run(box: Toolbox, arguments: dict[str, Any]) -> None:
    """Either it fits, and then all are of the types that the function declares, or the model is told."""
    try:
        found = box.functions["walk"].convert_arguments(arguments)
    except Misfit as misfit:
        assert str(misfit).startswith("walk")
        return
    assert type(found["step"]) is int
    assert type(found.get("pace", 1)) in (int, float)
    assert found.get("where", "left") in ("left", "right")
    assert all(type(name) is str for name in found.get("names") or ())
    assert json.dumps(found)


def test_a_call_that_is_wrong_already_says_why(box: Toolbox) -> None:
    assert box.result(ToolCall("walk", {}, "odd"), PROBLEM) == f"{ERROR}odd"
