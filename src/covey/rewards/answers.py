"""Rewards for final answers: numbers and texts, compared with the gold in column `answer`."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Any

from covey.rewards.extract import Rule, extract, hash4

Completion = str | list[dict[str, Any]]


def math_answer(completion: Completion, answer: str, *, rule: Rule = "boxed") -> float | None:
    """1 if the extracted number equals the gold exactly, else 0; None if the gold is no number.

    A gold that holds a worked solution ends in `#### number`.
    """
    gold = number(hash4(str(answer)) or str(answer))
    if gold is None:
        return None
    found = extract(completion, rule)
    return float(found is not None and number(found) == gold)


def exact_answer(completion: Completion, answer: str, *, rule: Rule = "answer_tag") -> float:
    """1 if the extracted text equals the gold up to case, width and spaces, else 0."""
    found = extract(completion, rule)
    return float(found is not None and _folded(found) == _folded(str(answer)))


def number(text: str) -> Fraction | None:
    """The exact value of a number as people write it, or None.

    >>> [str(number(t)) for t in ("1,000", "$6.00", "0.5", "1/2", "-3", "42.", "3 apples")]
    ['1000', '6', '1/2', '1/2', '-3', '42', 'None']
    """
    plain = unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-").strip().rstrip(".,")
    plain = re.sub(r"\s+|\\[,!$%]|[$€£%]", "", plain)
    match = re.fullmatch(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d{1,400})?(\.\d{1,400})?(?:/(\d{1,400}))?", plain)
    if match is None or not (match[2] or match[3]):
        return None
    below = int(match[4] or 1)
    value = Fraction((match[2] or "0").replace(",", "") + (match[3] or ""))
    if below == 0:
        return None
    return (-value if match[1] == "-" else value) / below


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
