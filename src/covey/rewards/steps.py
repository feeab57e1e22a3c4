"""Process rewards: where the steps of a completion end, in characters and in tokens, and one verifier.

A reward that asks for ``token_ends`` gets, for each token, where its text ends in the completion. With
it spans of characters become spans of tokens, whatever the tokenizer does with spaces and bytes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from covey.rewards.compare import decimals
from covey.rewards.contract import reward
from covey.rewards.extract import LONGEST, Completion, text_of
from covey.rewards.notation import number
from covey.types import Score

Span = tuple[int, int]
Split = Literal["paragraphs", "lines", "numbered", "tool_calls"]
STARTS: Mapping[Split, re.Pattern[str]] = {
    "paragraphs": re.compile(r"\n[ \t]*\n\s*"),
    "lines": re.compile(r"\n\s*"),
    "numbered": re.compile(r"\n\s*(?=(?:step\s*)?\d{1,3}[.):])|^(?=(?:step\s*)?\d{1,3}[.):])", re.IGNORECASE),
    "tool_calls": re.compile(r"(?<=</tool_call>)"),
}
"""What stands between two steps."""
MOST = 200
"""Steps of a completion; what follows belongs to the last one."""
ANNOTATION = re.compile(r"<<([^<>=]{1,200})=([^<>=]{1,60})>>")
TOKEN = re.compile(r"\s*(\d[\d,]*\.?\d*|\.\d+|[-+*/x×÷()%$])")


def split(text: str, how: Split = "paragraphs") -> list[Span]:
    r"""Character spans of the steps; together they cover the text.

    >>> text = "1. add\n2. divide"
    >>> [text[a:b] for a, b in split(text, "numbered")]
    ['1. add\n', '2. divide']
    """
    ends = [m.end() for m in STARTS[how].finditer(text) if 0 < m.end() < len(text)]
    edges = [0, *ends[: MOST - 1], len(text)]
    return [(a, b) for a, b in pairwise(edges) if text[a:b].strip()]


def token_spans(spans: Sequence[Span], token_ends: Sequence[int]) -> list[Span]:
    """Character spans as token spans, [first, last + 1); a token belongs to the step it ends in.

    Steps without a token of their own are left out as (n, n).

    >>> token_spans([(0, 3), (3, 9)], [2, 4, 9])  # the second token reaches into the second step
    [(0, 1), (1, 3)]
    """
    edges = [0, *(bisect_left(token_ends, end + 1) for _, end in spans)]
    if spans:
        edges[-1] = len(token_ends)  # an end-of-sequence token has no text
    return [(a, max(a, b)) for a, b in pairwise(edges)]


@reward(concurrent=True)
def calculations(
    completion: Completion,
    token_ends: list[int],
    *,
    split_by: Split = "lines",
    total: Literal["min", "mean", "last"] = "min",
) -> Score:
    r"""Whether the annotations `<<48/2=24>>` of a completion, as GSM8K has them, are right.

    Steps get 1 if all of theirs are right, -1 if one is wrong, 0 without any; the value is 1 for a
    right step and 0 for a wrong one, over all annotated steps: the least (`min`), the mean or the last.

    >>> calculations("48/2 = <<48/2=24>>24\n24+1 = <<24+1=26>>26", []).value
    0.0
    """
    text = text_of(completion)[:LONGEST]
    spans = split(text, split_by)
    verdicts = [_verdict(text[a:b]) for a, b in spans]
    known = [float(v > 0) for v in verdicts if v]
    if not known:
        return Score(0.0, "no_answer")
    value = {"min": min(known), "mean": sum(known) / len(known), "last": known[-1]}[total]
    places = token_spans(spans, token_ends)
    steps = tuple((a, b, float(v)) for (a, b), v in zip(places, verdicts, strict=True) if b > a)
    return Score(value, parts={"steps": float(len(known))}, steps=steps)


def _verdict(step: str) -> int:
    """1 if all annotations of a step are right, -1 if one is wrong, 0 without any."""
    found = [right(m[1], m[2]) for m in ANNOTATION.finditer(step)]
    return 0 if not found else 1 if all(found) else -1


def right(expression: str, result: str) -> bool:
    """Whether a calculation gives what is written, up to the decimals it is written with.

    >>> right("1/3", "0.33"), right("2*(3+.5)", "7"), right("20%*50", "10"), right("1/0", "1")
    (True, True, True, False)
    """
    written, value = number(result.strip()), calculated(expression)
    if written is None or value is None:
        return False
    places = decimals(result.strip())
    return written == value or (places is not None and 2 * abs(written - value) <= Fraction(1, 10**places))


def calculated(expression: str) -> Fraction | None:
    """The value of + - * / and parentheses over decimal numbers; None for anything else."""
    found = TOKEN.findall(expression)
    if "".join(found) != "".join(expression.split()) or len(found) > 60:
        return None
    tokens = [t for t in found if t != "$"]
    try:
        value = _sum(tokens)
    except (IndexError, ZeroDivisionError, ValueError):
        return None
    return None if tokens else value


def _sum(tokens: list[str]) -> Fraction:
    value = _product(tokens)
    while tokens and tokens[0] in "+-":
        value += _product(tokens) if tokens.pop(0) == "+" else -_product(tokens)
    return value


def _product(tokens: list[str]) -> Fraction:
    value = _factor(tokens)
    while tokens and tokens[0] in "*x×/÷":
        value = value * _factor(tokens) if tokens.pop(0) in "*x×" else value / _factor(tokens)
    return value


def _factor(tokens: list[str]) -> Fraction:
    first = tokens.pop(0)
    if first in ("-", "+"):
        return _factor(tokens) if first == "+" else -_factor(tokens)
    if first == "(":
        value = _sum(tokens)
        if tokens.pop(0) != ")":
            raise ValueError("a parenthesis is not closed")
    else:
        value = Fraction(first.replace(",", "").rstrip("."))
    if tokens and tokens[0] == "%":
        tokens.pop(0)
        value /= 100
    return value
