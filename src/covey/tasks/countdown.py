"""The task Countdown: combine three numbers with + - * to reach a target. Many answers are correct.

The verifier evaluates the expression, so the model may find any solution.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

from covey.tasks.generated import GeneratedTask
from covey_verify.contract import reward
from covey_verify.extract import find_tagged
from covey_verify.mathematics.steps import calculate, score_steps
from covey_verify.types import Score

EQUATION = re.compile(r"(-?\d{1,6})([-+*])(-?\d{1,6})=(-?\d{1,9})(?!\d)")


def countdown(rng: random.Random) -> dict[str, object]:
    """Return a row with three numbers and a target that can be reached by using each once."""
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
    """Return 1 if the tagged expression uses each number once and equals the target, else 0."""
    expression = find_tagged(completion, "answer") or ""
    # At most 20 numbers are read: three are allowed, and the text may be huge.
    used = sorted(int(n) for n in re.findall(r"\d+", expression)[:20])
    return float(used == sorted(numbers) and compute(expression) == target)


def compute(expression: str) -> int | None:
    """Return the value of integers combined by + - * and parentheses, or None.

    >>> compute("(7-2)*3"), compute("7-2*3"), compute("7-(2*3"), compute("__import__")
    (15, 1, None, None)
    """
    compact = expression.replace(" ", "")
    # A minus before a number is allowed, a plus is not.
    if not re.fullmatch(r"[-+*()\d]+", compact) or re.search(r"(^|[-+*(])\+", compact):
        return None
    value = calculate(expression)
    return None if value is None else int(value)


@reward(concurrent=True, verdict=False)
def equations(completion: str, numbers: Sequence[int], token_ends: list[int]) -> Score:
    """Score each step: 1 for a correct calculation with available numbers, whose result is then available
    too.

    >>> equations("3+4=7 7*2=15", [2, 3, 4], []).value, equations("3+4=7 7*2=14", [2, 3, 4], []).value
    (0.0, 1.0)
    """
    numbers_left = Counter(map(str, numbers))
    steps = list(EQUATION.finditer(completion))
    scores = []
    for step in steps:
        first, sign, second, result = step.groups()
        used = Counter([first, second])
        correct = used <= numbers_left and compute(f"({first}){sign}({second})") == int(result)
        scores.append(float(correct))
        # A Counter's difference drops negative counts, so an unavailable number costs nothing further.
        numbers_left = numbers_left - used + Counter([result])
    return score_steps([m.span() for m in steps], scores, token_ends, "min")


COUNTDOWN = GeneratedTask(
    "countdown",
    "reach a target with three numbers and + - *; any correct expression counts",
    countdown,
    ({reaches_target: 1.0}, {"answer_format": 0.1}),
    (equations,),
)
