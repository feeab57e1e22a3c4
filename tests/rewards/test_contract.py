"""Reward functions as users write them."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest

from covey.rewards.base import RewardError, load_rewards, score
from covey.types import Problem, StepRewards
from tests.fakes import completion

PROBLEM = Problem("p1", "2+2=", {"answer": "4", "completion": "the worked answer"})
COMPLETIONS = [completion("4"), completion("5")]


def judged(*functions):
    rewards = load_rewards(functions, Path())
    return score(PROBLEM, np.array([1]), COMPLETIONS, rewards)


def test_both_forms_get_what_their_signature_asks_for() -> None:
    def batch(prompts, completions, completion_ids, answer, **rest):
        assert prompts == ["2+2="] * 2
        assert completion_ids == [c.tokens.tolist() for c in COMPLETIONS]
        assert rest == {"completion": ["the worked answer"] * 2}
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def single(completion, answer):
        return completion == answer

    group = judged(batch, {single: 0.5})
    assert group.rewards.tolist() == [1.5, 0.0]
    assert group.components["single"].tolist() == [1.0, 0.0]
    assert group.weights == {"batch": 1.0, "single": 0.5}


def test_the_sampled_completion_wins_over_a_column_of_that_name() -> None:
    def seen(completion):
        return float(completion == "the worked answer")

    assert judged(seen).rewards.tolist() == [0.0, 0.0]


def test_async_rewards_run_together() -> None:
    running = []

    async def slow(completions):
        running.append(1)
        await asyncio.sleep(0.01)
        assert len(running) == 3
        return [1.0] * len(completions)

    async def also_slow(completion):
        running.append(1)
        await asyncio.sleep(0.05)
        return 1.0

    assert judged(slow, also_slow).rewards.tolist() == [2.0, 2.0]


def test_none_means_not_applicable() -> None:
    def sometimes(completion):
        return 1.0 if completion == "4" else None

    def never(completions):
        return [None, None]

    group = judged(sometimes, {never: 3.0})
    assert group.rewards[0] == 1.0
    assert math.isnan(group.rewards[1])
    assert group.dead


def test_step_rewards_are_kept_and_summed() -> None:
    def steps(completion):
        return StepRewards([0.5, 0.25], [0, 2])

    group = judged(steps)
    assert group.rewards.tolist() == [0.75, 0.75]
    assert group.steps == (StepRewards([0.5, 0.25], [0, 2]),) * 2


def test_numpy_and_torch_scalars_count_as_numbers() -> None:
    def scalars(completions):
        return [np.float32(0.5), np.array(1)]

    assert judged(scalars).rewards.tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: [1.0], "returned 1 values for 2 completions"),
        (lambda: "ab", "a list with one number per completion"),
        (lambda: 1.0, "a list with one number per completion"),
        (lambda: [1.0, math.inf], "a finite number or None"),
        (lambda: [1.0, "1"], "a finite number or None"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_broken_contract_names_the_function_and_the_problem(value, says) -> None:
    def bad(completions):
        return value()

    with pytest.raises(RewardError, match="reward bad on problem p1") as caught:
        judged(bad)
    assert says in str(caught.value)
