"""Process rewards: the ends of a completion's steps, in characters and in tokens, and two verifiers.

A reward that asks for ``token_ends`` gets for each token the position in the completion where its text ends.
This turns spans of characters into spans of tokens, whatever the tokenizer does with spaces and bytes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from covey_verify.contract import reward
from covey_verify.extract import MAX_CHARACTERS, TextOrMessages, text_of
from covey_verify.mathematics.exact import decimals
from covey_verify.mathematics.rational import constant
from covey_verify.mathematics.reader import Reader, plain_number
from covey_verify.mathematics.tokens import Token, tokens
from covey_verify.mathematics.tree import TooLarge, Unreadable
from covey_verify.types import Score

# [begin, end), in characters or in tokens.
Span = tuple[int, int]
SplitRule = Literal["paragraphs", "lines", "numbered", "tool_calls", "code_blocks"]
Total = Literal["min", "mean", "last"]
STARTS: Mapping[SplitRule, re.Pattern[str]] = {
    "paragraphs": re.compile(r"\n[ \t]*\n\s*"),
    "lines": re.compile(r"\n\s*"),
    "numbered": re.compile(r"\n\s*(?=(?:step\s*)?\d{1,3}[.):])|^(?=(?:step\s*)?\d{1,3}[.):])", re.IGNORECASE),
    "tool_calls": re.compile(r"(?<=</tool_call>)"),
    "code_blocks": re.compile(r"^(?=```\w)|^```[ \t]*\n", re.MULTILINE),
}
"""The separators of steps: a step begins where the pattern's match ends."""
MAX_STEPS = 200
"""Largest number of steps of a completion; the rest belongs to the last one."""
ANNOTATION = re.compile(r"<<([^<>=]{1,200})=([^<>=]{1,60})>>")
TIMES = Token("sign", "*")


def split(text: str, how: SplitRule = "paragraphs") -> list[Span]:
    r"""Return the character spans of the steps, which together cover the text.

    >>> text = "1. add\n2. divide"
    >>> [text[a:b] for a, b in split(text, "numbered")]
    ['1. add\n', '2. divide']
    """
    ends = [m.end() for m in STARTS[how].finditer(text) if 0 < m.end() < len(text)]
    edges = [0, *ends[: MAX_STEPS - 1], len(text)]
    return [(a, b) for a, b in pairwise(edges) if text[a:b].strip()]


def token_spans(spans: Sequence[Span], token_ends: Sequence[int]) -> list[Span]:
    """Return character spans as token spans, [first, last + 1); a token belongs to the step it ends in.

    A step without a token of its own is empty, (n, n).

    >>> token_spans([(0, 3), (3, 9)], [2, 4, 9])  # the second token reaches into the second step
    [(0, 1), (1, 3)]
    """
    # The first token that ends after a step's end begins the next step.
    edges = [0, *(bisect_left(token_ends, end + 1) for _, end in spans)]
    if spans:
        edges[-1] = len(token_ends)  # an end-of-sequence token has no text
    return [(a, max(a, b)) for a, b in pairwise(edges)]


@reward(concurrent=True, verdict=False)
def calculations(
    completion: TextOrMessages, token_ends: list[int], *, split_by: SplitRule = "lines", total: Total = "min"
) -> Score:
    r"""Return whether the annotations `<<48/2=24>>` of a completion, such as GSM8K's, are correct.

    A step is correct if all of its annotations are; ``total`` has the meaning that ``score_steps`` gives it.

    >>> calculations("48/2 = <<48/2=24>>24\n24+1 = <<24+1=26>>26", []).value
    0.0
    """
    text = text_of(completion)[:MAX_CHARACTERS]
    spans = split(text, split_by)
    verdicts = [[is_correct(m[1], m[2]) for m in ANNOTATION.finditer(text[a:b])] for a, b in spans]
    values = [float(all(of_step)) if of_step else None for of_step in verdicts]
    return score_steps(spans, values, token_ends, total)


def _check_labels(rows: Sequence[Mapping[str, object]], **_: object) -> list[str | None]:
    return [_labels_fault(row.get("step_labels")) for row in rows]


def _labels_fault(labels: object) -> str | None:
    if isinstance(labels, Mapping) and all(label in (-1, 0, 1) for label in labels.values()):
        return None
    return "column 'step_labels' has to be {text of a step: -1, 0 or 1}"


@reward(concurrent=True, check_references=_check_labels, verdict=False)
def step_labels(
    completion: TextOrMessages,
    step_labels: Mapping[str, float],
    token_ends: list[int],
    *,
    split_by: SplitRule = "lines",
    total: Total = "min",
) -> Score:
    r"""Score steps by human labels of a column: {text of a step: -1 incorrect, 0 neutral, 1 correct}.

    A step is looked up by its text, ignoring white space. Unlabelled steps are unknown, and a
    completion without a labelled step is not judged.

    >>> step_labels("2+2 = 4\n4+1 = 6", {"2+2 = 4": 1, "4+1 = 6": -1}, [], total="mean").value
    0.5
    """
    labels = {" ".join(step.split()): (1 + label) / 2 for step, label in step_labels.items()}
    text = text_of(completion)[:MAX_CHARACTERS]
    spans = split(text, split_by)
    values = [labels.get(" ".join(text[a:b].split())) for a, b in spans]
    judged = any(v is not None for v in values)
    return score_steps(spans, values, token_ends, total) if judged else Score(None, "not_applicable")


def score_steps(
    spans: Sequence[Span], values: Sequence[float | None], token_ends: Sequence[int], total: Total
) -> Score:
    """Return the score of a process reward from values of its steps: 0 incorrect, 1 correct, None unknown.

    The score's value is the least of the known values (`min`), their mean or the `last`. As step rewards they
    are mapped to -1 .. 1, unknown values to 0.
    """
    judged = [v for v in values if v is not None]
    if not judged:
        return Score(0.0, "no_answer", steps=())
    value = {"min": min(judged), "mean": sum(judged) / len(judged), "last": judged[-1]}[total]
    step_values = zip(token_spans(spans, token_ends), values, strict=True)
    steps = tuple((a, b, 0.0 if v is None else 2 * v - 1) for (a, b), v in step_values if b > a)
    return Score(value, metrics={"steps": float(len(judged))}, steps=steps)


def is_correct(expression: str, result: str) -> bool:
    """Return whether a calculation gives the written result, to as many decimals as that has.

    >>> is_correct("1/3", "0.33"), is_correct("20%*50", "10"), is_correct("1/0", "1")
    (True, True, False)
    """
    written = plain_number(result.strip())
    value = calculate(expression)
    if written is None or value is None:
        return False
    places = decimals(result.strip())
    if places is None:
        return written == value
    return 2 * abs(written - value) <= Fraction(1, 10**places)


def calculate(expression: str) -> Fraction | None:
    """Return the value of + - * / and parentheses over decimal numbers; None for anything else."""
    try:
        signs = [TIMES if token.text == "x" else token for token in tokens(expression.replace("÷", "/"))]
        # No powers or factorials, and no products without a sign: 2(3).
        if any(token.kind != "number" and token.text not in "+-*/×()%" for token in signs):
            return None
        for first, second in pairwise(signs):
            ends_factor = first.text in ")%" or first.kind == "number"
            begins_factor = second.text == "(" or second.kind == "number"
            if ends_factor and begins_factor:
                return None
        return constant(Reader(signs).whole())
    except (Unreadable, TooLarge):
        return None
