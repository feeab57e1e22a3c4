"""Rollouts: order of problems, refills, scoring as results come in."""

from __future__ import annotations

import numpy as np
import pytest

from covey.config.algorithm import build_algorithm
from covey.config.schema import Rollout
from covey.rewards.base import load_rewards
from covey.rollout import Rollouts
from tests.fakes import ScriptedSampler, prompted


def quiet(done: int, total: int) -> None:
    assert 0 < done <= total


def rollouts(sampler, problems, algorithm="dapo", seed=0, **settings) -> Rollouts:
    rewards = load_rewards([{"exact_answer": {"rule": "whole"}}], None)
    config = Rollout(**{"group_size": 4, "prompts_per_step": 3, "max_tokens": 8, **settings})
    return Rollouts(problems, sampler, rewards, config, build_algorithm(algorithm), seed)


def half_right(prompt: np.ndarray, stream: int) -> str:
    return str(prompt[0] - 1) if stream % 2 else "wrong"


def test_every_problem_is_used_once_per_epoch_in_a_new_order() -> None:
    source = rollouts(ScriptedSampler(half_right), prompted(6), algorithm="grpo")
    ids = [g.problem.id for step in range(4) for g in source.sample(step, quiet).groups]
    assert sorted(ids[:6]) == sorted(ids[6:]) == [f"p{i}" for i in range(6)]
    assert ids[:6] != ids[6:]


def test_a_resumed_cursor_goes_on_exactly() -> None:
    whole, resumed = (rollouts(ScriptedSampler(half_right), prompted(5)) for _ in range(2))
    first = [whole.sample(step, quiet) for step in range(3)]
    cursor = whole.cursor
    then = whole.sample(3, quiet)
    resumed.cursor = cursor
    again = resumed.sample(3, quiet)
    assert [g.problem.id for g in then.groups] == [g.problem.id for g in again.groups]
    for a, b in zip(then.groups, again.groups, strict=True):
        np.testing.assert_array_equal(a.rewards, b.rewards)
    assert len(first) == 3


def test_keys_of_draws_never_repeat() -> None:
    sampler = ScriptedSampler(lambda *_: "wrong")
    source = rollouts(sampler, prompted(2), prompts_per_step=5, max_refills=2)
    for step in range(4):
        source.sample(step, quiet)
    assert len(set(sampler.streams)) == len(sampler.streams) > 100


def test_dead_groups_are_replaced_in_bounded_rounds() -> None:
    # Problems 0..4 are never solved, 5..9 half of the time.
    def answer(prompt: np.ndarray, stream: int) -> str:
        return half_right(prompt, stream) if prompt[0] > 5 else "wrong"

    batch = rollouts(ScriptedSampler(answer), prompted(10), group_size=16, max_refills=8).sample(0, quiet)
    assert len(batch.groups) == 3
    assert not any(g.dead for g in batch.groups)
    assert all(g.dead for g in batch.rejected)
    hopeless = rollouts(ScriptedSampler(lambda *_: "wrong"), prompted(10), max_refills=2).sample(0, quiet)
    assert hopeless.groups == []
    assert hopeless.metrics["rollout/refills"] == 2
    assert len(hopeless.rejected) == 9


def test_without_a_filter_dead_groups_are_kept() -> None:
    batch = rollouts(ScriptedSampler(lambda *_: "wrong"), prompted(4), algorithm="grpo").sample(0, quiet)
    assert len(batch.groups) == 3
    assert batch.metrics["rollout/refills"] == 0


def test_a_stop_in_the_middle_leaves_the_cursor() -> None:
    source = rollouts(ScriptedSampler(half_right), prompted(5))

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.sample(0, stop)
    assert source.cursor == 0


def test_remax_scores_a_greedy_completion_too() -> None:
    batch = rollouts(ScriptedSampler(lambda p, _: str(p[0] - 1)), prompted(3), algorithm="remax").sample(
        0, quiet
    )
    assert [g.greedy_reward for g in batch.groups] == [1.0, 1.0, 1.0]
