"""Countdown: combine three numbers with + - * to reach a target. Many answers are right.

The verifier computes the expression itself, so the model is free to find its own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from covey.rewards.extract import tagged
from covey.tasks.generated import Task


def countdown(rng: random.Random) -> dict[str, Any]:
    """Three numbers and a target that can be reached by using each once."""
    numbers = [rng.randint(1, 9) for _ in range(3)]
    first, second = rng.choice("+-*"), rng.choice("+-*")
    a, b, c = rng.sample(numbers, 3)
    inner = compute(f"{a}{first}{b}")
    expression = f"({a}{first}{b}){second}{c}"
    target = compute(expression)
    return {
        "prompt": f"use {' '.join(map(str, numbers))} to make {target}: ",
        "numbers": numbers,
        "target": target,
        "answer": expression,
        "completion": f"<think>{a}{first}{b}={inner} {inner}{second}{c}={target}</think>"
        f"<answer>{expression}</answer>",
    }


def reaches_target(completion: str, numbers: Sequence[int], target: int) -> float:
    """1 if the tagged expression uses each number once and equals the target."""
    expression = tagged(completion, "answer") or ""
    used = sorted(int(n) for n in re.findall(r"\d+", expression)[:20])
    return float(used == sorted(numbers) and compute(expression) == target)


def compute(expression: str) -> int | None:
    """The value of integers combined by + - * and parentheses, or None. A parser, not eval.

    >>> compute("(7-2)*3"), compute("7-2*3"), compute("7-(2*3"), compute("__import__")
    (15, 1, None, None)
    """
    tokens = re.findall(r"\d+|[-+*()]", expression)
    if "".join(tokens) != expression.replace(" ", "") or not 0 < len(tokens) < 100:
        return None
    try:
        value, rest = _sum(tokens)
    except (IndexError, ValueError):
        return None
    return value if not rest else None


def _sum(tokens: list[str]) -> tuple[int, list[str]]:
    value, rest = _product(tokens)
    while rest and rest[0] in "+-":
        term, after = _product(rest[1:])
        value = value + term if rest[0] == "+" else value - term
        rest = after
    return value, rest


def _product(tokens: list[str]) -> tuple[int, list[str]]:
    value, rest = _atom(tokens)
    while rest and rest[0] == "*":
        factor, rest = _atom(rest[1:])
        value *= factor
    return value, rest


def _atom(tokens: list[str]) -> tuple[int, list[str]]:
    if tokens[0] == "-":
        value, rest = _atom(tokens[1:])
        return -value, rest
    if tokens[0] == "(":
        value, rest = _sum(tokens[1:])
        if not rest or rest[0] != ")":
            raise ValueError("unbalanced parenthesis")
        return value, rest[1:]
    return int(tokens[0]), tokens[1:]


COUNTDOWN = Task(
    "countdown",
    "reach a target with three numbers and + - *; any right expression counts",
    countdown,
    ({reaches_target: 1.0}, {"answer_format": 0.1}),
)
