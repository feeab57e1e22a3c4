"""Adding numbers step by step: `sums` keeps whole sums, `last_digit` only their last digit."""

from __future__ import annotations

import random

from covey.tasks.generated import Task


def worked(terms: list[int], modulus: int) -> dict[str, object]:
    """The row of one problem, with the partial sums written out.

    >>> worked([7, 8, 9], modulus=10)["completion"]
    '<think>7+8=5 5+9=4</think><answer>4</answer>'
    """
    steps, total = [], terms[0]
    for term in terms[1:]:
        after = (total + term) % modulus
        steps.append(f"{total}+{term}={after}")
        total = after
    return {
        "prompt": "+".join(map(str, terms)) + "=",
        "answer": str(total),
        "completion": f"<think>{' '.join(steps)}</think><answer>{total}</answer>",
    }


def last_digit(rng: random.Random) -> dict[str, object]:
    """Four digits to add, each partial sum reduced to its last digit."""
    return worked([rng.randint(0, 9) for _ in range(4)], modulus=10)


def sums(rng: random.Random) -> dict[str, object]:
    """Four numbers up to 20 to add."""
    return worked([rng.randint(1, 20) for _ in range(4)], modulus=1000)


REWARDS = ({"math_answer": {"rule": "answer_tag"}}, {"answer_format": 0.1})
LAST_DIGIT = Task(
    "last_digit", "add four digits, keep the last digit of every partial sum", last_digit, REWARDS
)
SUMS = Task("sums", "add four numbers, partial sums written out", sums, REWARDS)
