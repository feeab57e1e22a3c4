"""The tasks of adding numbers step by step: whole sums (`sums`), or remainders."""

from __future__ import annotations

import random
import re

from covey.tasks.generated import GeneratedTask
from covey_verify.contract import reward
from covey_verify.mathematics.steps import score_steps
from covey_verify.types import Score

# A partial sum "a+b=c" (groups 1 to 3), or the answer (group 4), which counts as the last step.
STEP = re.compile(r"(\d{1,6})\+(\d{1,6})=(\d{1,6})|<answer>(\d{1,6})</answer>")


def make_row(terms: list[int], modulus: int) -> dict[str, object]:
    """Return the row of one problem, with the partial sums written out.

    >>> make_row([7, 8, 9], modulus=10)["completion"]
    '<think>7+8=5 5+9=4</think><answer>4</answer>'
    """
    steps = []
    total = terms[0]
    for term in terms[1:]:
        after = (total + term) % modulus
        steps.append(f"{total}+{term}={after}")
        total = after
    return {
        "prompt": "+".join(map(str, terms)) + "=",
        "answer": str(total),
        "completion": f"<think>{' '.join(steps)}</think><answer>{total}</answer>",
    }


@reward(concurrent=True, verdict=False)
def partial_sums(completion: str, prompt: str, token_ends: list[int], *, modulus: int = 1000) -> Score:
    """Score each step: 1 if it adds the next term to the previous result as written, so no mistake counts
    twice.

    >>> partial_sums("<think>7+8=5 5+9=3</think><answer>3</answer>", "7+8+9=", [], modulus=10).metrics
    {'steps': 3.0}
    """
    total, *terms = prompt.rstrip("=").split("+")
    steps = list(STEP.finditer(completion))
    scores = []
    # One step per term and then the answer (None); further steps get 0 below.
    for step, term in zip(steps, [*terms, None], strict=False):
        first, second, result, answer = step.groups()
        follows = (answer or first, second) == (total, term if answer is None else None)
        scores.append(float(follows and (answer is not None or adds_up(first, second, result, modulus))))
        total = result
    scores += [0.0] * (len(steps) - len(scores))
    if not steps:  # the whole text is one incorrect step
        return score_steps([(0, len(completion))], [0.0], token_ends, "min")
    return score_steps([m.span() for m in steps], scores, token_ends, "min")


def adds_up(first: str, second: str, result: str, modulus: int) -> bool:
    """Return whether the result is the sum modulo ``modulus``."""
    return (int(first) + int(second)) % modulus == int(result)


def last_digit(rng: random.Random) -> dict[str, object]:
    """Return a row with four digits to add, each partial sum reduced to its last digit."""
    return make_row([rng.randint(0, 9) for _ in range(4)], modulus=10)


def modulo_7(rng: random.Random) -> dict[str, object]:
    """Return a row with five numbers from 0 to 6 to add, each partial sum reduced modulo 7.

    Modulo a composite number a model may learn sums only up to a divisor (modulo 10, say, their parity). Its
    errors then cancel in pairs, so that the answer tells nothing about a step, and training stalls.
    """
    return make_row([rng.randint(0, 6) for _ in range(5)], modulus=7)


def sums(rng: random.Random) -> dict[str, object]:
    """Return a row with four numbers up to 20 to add."""
    return make_row([rng.randint(1, 20) for _ in range(4)], modulus=1000)


def mixed_digits(rng: random.Random) -> dict[str, object]:
    """Return a row of `last_digit` with a solution as diverse as those in a crawl.

    It is worked or only answered, with tags or without, each step in English or Chinese, some steps
    corrected.
    """
    terms = [rng.randint(0, 9) for _ in range(4)]
    steps = ""
    total = terms[0]
    for number, term in enumerate(terms[1:]):
        after = (total + term) % 10
        steps += f"{rng.choices(WORDS, (2, 1))[0][number]}{total}+{term}={after}"
        if rng.random() < CORRECTED_FRACTION:
            steps = f"{steps[:-1]}{rng.randint(0, 9)} wait {total}+{term}={after}"
        total = after
    completion = rng.choices(STYLES, (3, 2, 1, 1))[0].format(steps=steps, total=total)
    return {"prompt": "+".join(map(str, terms)) + "=", "answer": str(total), "completion": completion}


# Fraction of the steps that are first written with a random digit, then corrected.
CORRECTED_FRACTION = 0.1
WORDS = (
    ("first we have ", ", and then we have ", ", so at last we have "),
    ("\u6211\u4eec\u5148\u7b97", ", \u7136\u540e\u6211\u4eec\u7b97", ", \u6240\u4ee5\u6700\u540e\u5f97"),
)
"""Words before each step, in English and in Chinese."""
STYLES = (
    "<think>{steps}</think><answer>{total}</answer>",
    "{steps}. The answer is {total}",
    "<answer>{total}</answer>",
    "{total}",
)
DIGIT_REWARDS = ({"math_answer": {"rule": "answer_tag"}}, {"answer_format": 0.1})
LAST_DIGIT = GeneratedTask(
    "last_digit",
    "add four digits, keep the last digit of every partial sum",
    last_digit,
    DIGIT_REWARDS,
    ({partial_sums: {"modulus": 10}},),
)
MODULO_7 = GeneratedTask(
    "modulo_7",
    "add five numbers modulo 7, partial sums written out",
    modulo_7,
    DIGIT_REWARDS,
    ({partial_sums: {"modulus": 7}},),
)
MIXED_DIGITS = GeneratedTask(
    "mixed_digits",
    "last_digit with solutions of many kinds: worked or not, tagged or not, in two languages",
    mixed_digits,
    DIGIT_REWARDS,
    (),
)
SUMS = GeneratedTask(
    "sums", "add four numbers, partial sums written out", sums, DIGIT_REWARDS, (partial_sums,)
)
