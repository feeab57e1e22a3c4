"""Countdown: combine three numbers with + - * to reach a target. Many answers are right.

The verifier computes the expression itself, so the model is free to find its own.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.rewards.extract import tagged
from covey.tasks.generated import Task

OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


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
        plain = " ".join(str(int(t)) if t.isdecimal() else t for t in tokens)
        return _value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()):
            return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no arithmetic")


COUNTDOWN = Task(
    "countdown",
    "reach a target with three numbers and + - *; any right expression counts",
    countdown,
    ({reaches_target: 1.0}, {"answer_format": 0.1}),
)
