"""Process rewards: steps as token spans that fit the tokenizer, arithmetic that is checked, not evaluated."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_verify.mathematics.steps import (
    calculate,
    calculations,
    is_correct,
    split,
    step_labels,
    token_spans,
)

WORKED = "48/2 = <<48/2=24>>24 clips\n48+24 = <<48+24=72>>72 clips\n#### 72"


@pytest.mark.parametrize(
    ("how", "text", "steps"),
    [
        ("paragraphs", "a\nb\n\nc\n \n d", ["a\nb\n\n", "c\n \n ", "d"]),
        ("lines", "a\n\nb\n", ["a\n\n", "b\n"]),
        ("numbered", "So\n1. a 3. b\n2) go\nStep 3: end", ["So\n", "1. a 3. b\n", "2) go\n", "Step 3: end"]),
        ("tool_calls", "<tool_call>1</tool_call> so <tool_call>2</tool_call>",
         ["<tool_call>1</tool_call>", " so <tool_call>2</tool_call>"]),
        ("code_blocks", "So\n```python\nx\n\ny\n```\nand\n", ["So\n", "```python\nx\n\ny\n```\n", "and\n"]),
        ("paragraphs", "", []),
    ],
)  # fmt: skip
def test_steps_are_found(how, text, steps) -> None:
    assert [text[a:b] for a, b in split(text, how)] == steps


@given(
    st.text(st.sampled_from("a1. \n):"), max_size=40), st.sampled_from(["paragraphs", "lines", "numbered"])
)
def test_steps_are_in_order_and_lose_nothing_but_white_space(text, how) -> None:
    spans = split(text, how)
    assert all(a < b <= c for (a, b), (c, _) in pairwise(spans))
    assert "".join(text[a:b] for a, b in spans).split() == text.split()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.data())
def test_token_spans_cover_all_tokens_once(lengths, data) -> None:
    ends = np.cumsum(lengths).tolist()
    cuts = sorted(data.draw(st.sets(st.integers(1, ends[-1]), max_size=4)) | {ends[-1]})
    spans = token_spans(list(zip([0, *cuts], cuts, strict=False)), ends)
    assert [i for a, b in spans for i in range(a, b)] == list(range(len(ends)))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", 24),
        ("2*(3+.5)", 7),
        ("1,000-1", 999),
        ("-3+5", 2),
        ("20%*50", 10),
        ("$5 x 3", 15),
        ("2-3-4", -5),
        ("8/4/2", 1),
        ("1/0", None),
        ("2**3", None),
        ("(2", None),
        ("2)", None),
        ("a+1", None),
        ("__import__('os')", None),
        ("", None),
        ("(" * 100 + "1" + ")" * 100, None),
    ],
)
def test_arithmetic_is_parsed(expression, value) -> None:
    assert calculate(expression) == value


@given(st.integers(-99, 99), st.integers(1, 99), st.integers(-99, 99))
def test_arithmetic_is_exact(a, b, c) -> None:
    assert calculate(f"({a})/{b}+({c})") == Fraction(a, b) + c


def test_results_are_right_up_to_their_decimals() -> None:
    assert is_correct("1/3", "0.33") and is_correct("2/3", ".67") and is_correct("1/3", "1/3")
    assert not is_correct("1/3", "0.34") and not is_correct("1/3", "0") and not is_correct("5/2", "2")


def test_annotations_are_checked_step_by_step() -> None:
    assert calculations(WORKED, []).value == 1.0
    wrong = WORKED.replace("=72>>", "=73>>")
    assert [calculations(wrong, [], total=t).value for t in ("min", "mean", "last")] == [0.0, 0.5, 0.0]
    assert calculations("it is 72", []).status == "no_answer"


LABELS = {"48/2 = <<48/2=24>>24 clips": 1, "48+24 =  <<48+24=72>>72 clips": -1, "#### 72": 0}


def test_labels_of_people_are_found_by_the_text_of_a_step() -> None:
    score = step_labels(WORKED, LABELS, [20, 50, len(WORKED)], total="mean")
    assert (score.value, score.metrics) == (0.5, {"steps": 3.0})
    assert [value for *_, value in score.steps] == [1.0, -1.0, 0.0]
    assert step_labels(WORKED, {"#### 72": 1}, []).value == 1.0
    unknown = step_labels("nobody has seen this", LABELS, [20])
    assert (unknown.value, unknown.status) == (None, "not_applicable")
