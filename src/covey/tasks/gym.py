"""The procedurally generated tasks of reasoning-gym: `data.task: gym:basic_arithmetic`."""

from __future__ import annotations

import importlib.util

from covey.rng import key
from covey.tasks.generated import TEST_ONE_IN, Split, split_of
from covey.types import Problem
from covey_verify.contract import ISOLATED
from covey_verify.errors import ConfigError, DataError
from covey_verify.sandbox.client import verifier_server
from covey_verify.sandbox.confine import Limits
from covey_verify.sandbox.wire import decode_value

PREFIX = "gym:"
GYM_REWARDS = ({"gym_answer": {"rule": "answer_tag"}}, {"answer_format": 0.1})
# Generous, because one call of trusted code generates thousands of problems.
GYM_LIMITS = Limits(wall=1800.0, cpu=1800, memory=8 << 30, output=1 << 30)
INSTRUCTION = "{}\nThink first, inside <think></think>; then give the final answer inside <answer></answer>."


def gym_problems(task: str, split: Split, size: int) -> list[Problem]:
    """Return the first ``size`` different problems of a split.

    Raises ConfigError if reasoning-gym or the task is missing.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"data.task: {task} needs reasoning-gym: pip install 'covey[gym]'")
    name = task.removeprefix(PREFIX)
    seed = key("gym", task) % 2**31
    # Enough for the split (an eighth are test problems) and for repeated ones.
    offered = 4 * (TEST_ONE_IN if split == "test" else 1) * size + 64
    server = verifier_server(ISOLATED, "reasoning_gym")
    reply = server.call(f"{ISOLATED}:gym_items", name, seed, offered, limits=GYM_LIMITS)
    if reply.kind != "ok":
        raise ConfigError(f"data.task: {task}: {reply.text}")
    problems: dict[str, Problem] = {}
    for index, encoded in enumerate(reply.value):
        item = decode_value(encoded)
        prompt = INSTRUCTION.format(item["question"])
        if split_of(prompt) == split:
            row = {"gym": {"name": name, "item": encoded}, "answer": item["answer"]}
            problems.setdefault(prompt, Problem(f"{task}/{split}/{index}", prompt, row))
        if len(problems) == size:
            return list(problems.values())
    raise DataError(f"task {task} has only {len(problems)} different {split} problems, but {size} are needed")
