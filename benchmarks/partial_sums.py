"""A process reward for the demo's task: whether each partial sum is right, and the answer."""

from __future__ import annotations

import re

from covey.rewards.contract import reward
from covey.rewards.steps import score_steps
from covey.types import Score

STEP = re.compile(r"(\d)\+(\d)=(\d)|<answer>(\d)</answer>")


@reward(verdict=False)
def partial_sums(completion: str, prompt: str, token_ends: list[int]) -> Score:
    """1 for a step that adds the next term to what was written before it; errors are not blamed twice.

    >>> partial_sums("<think>7+8=5 5+9=3</think><answer>3</answer>", "7+8+9=", []).parts
    {'steps': 3.0}
    """
    total, *terms = prompt.rstrip("=").split("+")
    found = list(STEP.finditer(completion))
    right = []
    for step, term in zip(found, [*terms, None], strict=False):
        first, second, result, answer = step.groups()
        follows = (answer or first, second) == (total, term if answer is None else None)
        right.append(
            float(follows and (answer is not None or (int(first) + int(second)) % 10 == int(result)))
        )
        total = result
    right += [0.0] * (len(found) - len(right))
    if not found:  # nothing but one wrong step
        return score_steps([(0, len(completion))], [0.0], token_ends, "min")
    return score_steps([m.span() for m in found], right, token_ends, "min")
