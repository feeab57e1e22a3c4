"""Rewards for the shape of a completion."""

from __future__ import annotations

import re
from typing import Any

from covey.rewards.extract import THINK_CLOSE, THINK_OPEN, text_of

Completion = str | list[dict[str, Any]]


def think_format(completion: Completion) -> float:
    """1 for `<think>some reasoning</think>` followed by something, each tag exactly once, else 0."""
    text = text_of(completion).strip()
    return float(
        text.count(THINK_OPEN) == text.count(THINK_CLOSE) == 1
        and re.fullmatch(r"<think>(.*\S.*)</think>(.*\S.*)", text, flags=re.DOTALL) is not None
    )


def answer_format(completion: Completion) -> float:
    """1 for reasoning and then exactly one non-empty `<answer>...</answer>` at the end, else 0."""
    text = text_of(completion).strip()
    parts = re.fullmatch(r"<think>(.*\S.*)</think>\s*<answer>(.*\S.*)</answer>", text, flags=re.DOTALL)
    return float(parts is not None and all(text.count(t) == 1 for t in (THINK_OPEN, THINK_CLOSE, "<answer>")))
