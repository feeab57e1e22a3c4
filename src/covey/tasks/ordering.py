"""The task of sorting digits by repeatedly taking the smallest digit that is left."""

from __future__ import annotations

import random
import re

from covey.tasks.generated import GeneratedTask
from covey_verify.contract import reward
from covey_verify.mathematics.steps import score_steps
from covey_verify.types import Score

CHOSEN = re.compile(r"(\d):(\d{1,5})(?!\d)")


def ordering(rng: random.Random) -> dict[str, object]:
    """Return a row with five digits to sort; the reasoning shows the remaining digits after each choice."""
    digits = [rng.randint(0, 9) for _ in range(5)]
    remaining = list(digits)
    steps = []
    for smallest in sorted(digits)[:-1]:
        remaining.remove(smallest)
        steps.append(f"{smallest}:{''.join(map(str, remaining))}")
    answer = "".join(map(str, sorted(digits)))
    return {
        "prompt": f"sort {''.join(map(str, digits))}=",
        "answer": answer,
        "completion": f"<think>{' '.join(steps)}</think><answer>{answer}</answer>",
    }


@reward(concurrent=True, verdict=False)
def choices(completion: str, prompt: str, token_ends: list[int]) -> Score:
    """Score each step: 1 if it takes the smallest of the digits that were left before it.

    >>> choices("1:32 2:3", "sort 321=", []).value, choices("2:31 1:3", "sort 321=", []).value
    (1.0, 0.0)
    """
    digits = sorted(prompt.strip("sort ="))
    steps = list(CHOSEN.finditer(completion))
    scores = []
    for step in steps:
        choice = step[1]
        rest = sorted(step[2])
        scores.append(float(bool(digits) and choice == digits[0] and rest == digits[1:]))
        digits = rest
    return score_steps([m.span() for m in steps], scores, token_ends, "min")


ORDERING = GeneratedTask(
    "ordering",
    "sort five digits, one choice at a time",
    ordering,
    ({"exact_answer": {"rule": "answer_tag"}}, {"answer_format": 0.1}),
    (choices,),
)
