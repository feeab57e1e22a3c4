"""Finding the answer in a completion: one declared rule, applied after the reasoning."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

Rule = Literal["boxed", "answer_tag", "hash4", "last_number", "whole"]
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
NUMBER = re.compile(r"[-+]?[$€£]?\s*\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion, which is a list of messages where the prompt was a chat."""
    if isinstance(completion, str):
        return completion
    return "".join(str(m.get("content") or "") for m in completion if m.get("role") == "assistant")


def extract(completion: str | list[dict[str, Any]], rule: Rule) -> str | None:
    r"""The answer as ``rule`` finds it after the reasoning; None where there is none.

    >>> extract("<think>2+2</think><answer> 4 </answer>", "answer_tag")
    '4'
    >>> extract(r"<think>so \boxed{4}", "boxed") is None  # the reasoning never ended
    True
    """
    spoken = after_reasoning(text_of(completion))
    found = None if spoken is None else RULES[rule](spoken)
    return found.strip() or None if found is not None else None


def after_reasoning(text: str) -> str | None:
    """What follows the last closing reasoning tag; None if reasoning was opened and never closed."""
    spoken = text.rpartition(THINK_CLOSE)[2]
    return None if THINK_OPEN in spoken else spoken


def tagged(text: str, tag: str) -> str | None:
    """Inside of the last complete <tag>...</tag>."""
    before, close, _ = text.rpartition(f"</{tag}>")
    if not close:
        return None
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if opening else None


def boxed(text: str) -> str | None:
    r"""Inside of the last complete \boxed{...}, braces balanced.

    >>> boxed(r"\boxed{1} no, \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    for start in reversed([m.end() for m in re.finditer(r"\\f?boxed\s*{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None


def hash4(text: str) -> str | None:
    """The line after the last `####`, as GSM8K writes answers."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().split("\n")[0] if mark else None


def last_number(text: str) -> str | None:
    """The last number of the text."""
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


RULES: Mapping[str, Callable[[str], str | None]] = {
    "boxed": boxed,
    "answer_tag": lambda text: tagged(text, "answer"),
    "hash4": hash4,
    "last_number": last_number,
    "whole": lambda text: text,
}
