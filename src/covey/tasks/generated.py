"""Built-in tasks: generated problems, the same in every run, with disjoint training and test splits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from covey.rng import key
from covey.types import Problem
from covey_verify.errors import DataError
from covey_verify.types import Messages

Split = Literal["train", "test"]
TEST_ONE_IN = 8
"""One prompt in eight belongs to the test split, by its hash."""


@dataclass(frozen=True)
class GeneratedTask:
    """A generator of problems: rows with `prompt`, `answer` and a worked `completion`."""

    name: str
    summary: str
    generate: Callable[[random.Random], dict[str, object]]
    rewards: tuple[object, ...]
    """Default rewards, for a config that names none."""
    steps: tuple[object, ...]
    """Rewards of single steps, for an algorithm that credits steps."""


def generate_problems(task: GeneratedTask, split: Split, size: int) -> list[Problem]:
    """Return the first ``size`` different problems of a split.

    Raises DataError if the task has fewer.
    """
    # Attempts are limited, since a small task may have fewer different problems than are needed.
    result = list(islice(_generate_distinct(task, split, 200 * size), size))
    if len(result) < size:
        raise DataError(
            f"task {task.name} has only {len(result)} different {split} problems, but {size} are needed"
        )
    return result


def _generate_distinct(task: GeneratedTask, split: Split, attempts: int) -> Iterator[Problem]:
    prompts: set[str] = set()
    rng = random.Random(key("task", task.name, split))
    for _ in range(attempts):
        row = task.generate(rng)
        text = row.pop("prompt")
        prompt: str | Messages = text if isinstance(text, list) else str(text)
        if str(prompt) in prompts or split_of(str(prompt)) != split:
            continue
        prompts.add(str(prompt))
        yield Problem(f"{task.name}/{split}/{len(prompts)}", prompt, row)


def split_of(prompt: str) -> Split:
    """Return the split of a prompt, independent of its task and of any order."""
    return "test" if key("split", prompt) % TEST_ONE_IN == 0 else "train"
