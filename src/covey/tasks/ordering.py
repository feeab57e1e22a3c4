"""Sorting digits by taking the smallest one that is left, again and again."""

from __future__ import annotations

import random

from covey.tasks.generated import Task


def ordering(rng: random.Random) -> dict[str, object]:
    """Five digits to sort; the reasoning shows what is left after each choice."""
    digits = [rng.randint(0, 9) for _ in range(5)]
    left, steps = list(digits), []
    for smallest in sorted(digits)[:-1]:
        left.remove(smallest)
        steps.append(f"{smallest}:{''.join(map(str, left))}")
    answer = "".join(map(str, sorted(digits)))
    return {
        "prompt": f"sort {''.join(map(str, digits))}=",
        "answer": answer,
        "completion": f"<think>{' '.join(steps)}</think><answer>{answer}</answer>",
    }


ORDERING = Task(
    "ordering",
    "sort five digits, one choice at a time",
    ordering,
    ({"exact_answer": {"rule": "answer_tag"}}, {"answer_format": 0.1}),
)
