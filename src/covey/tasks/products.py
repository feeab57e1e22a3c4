"""The task of multiplying with or without a calculator: chats, a third of whose worked answers call it.

The others guess, so that a model trained on them does both, and has to find out which is rewarded.
"""

from __future__ import annotations

import json
import random

from covey.tasks.generated import GeneratedTask


def worked_answer(first: int, second: int) -> list[dict[str, str]]:
    """Return a worked answer: the call, the tool's reply, the product.

    >>> [message["content"] for message in worked_answer(12, 34)][1:]
    ['408', '<answer>408</answer>']
    """
    call = {"name": "calculate", "arguments": {"expression": f"{first}*{second}"}}
    return [
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "tool", "content": str(first * second)},
        {"role": "assistant", "content": f"<answer>{first * second}</answer>"},
    ]


def multiplication(rng: random.Random) -> dict[str, object]:
    """Return a row with two numbers of two digits."""
    first, second = rng.randint(10, 99), rng.randint(10, 99)
    guess = [{"role": "assistant", "content": f"<answer>{rng.randint(100, 9801)}</answer>"}]
    return {
        "prompt": [{"role": "user", "content": f"{first}*{second}="}],
        "answer": str(first * second),
        "completion": worked_answer(first, second) if rng.random() < 1 / 3 else guess,
    }


PRODUCTS = GeneratedTask(
    "products",
    "chat: multiply two numbers, with the tool `calculate` (rollout.tools)",
    multiplication,
    ({"math_answer": {"rule": "answer_tag"}},),
    (),
)
