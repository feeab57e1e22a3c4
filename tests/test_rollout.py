"""Rollouts: order of problems, refills, scoring as results come in."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from covey.config.algorithm import build_algorithm
from covey.config.schema import Rollout
from covey.rewards.base import load_rewards
from covey.rollout import Position, RolloutBatch, Rollouts
from covey.tasks.difficulty import Difficulty
from tests.fakes import ScriptedSampler, prompted


def quiet(done: int, total: int) -> None:
    assert 0 < done <= total


def rollouts(sampler, problems, algorithm="dapo", seed=0, **settings) -> Rollouts:
    rewards = load_rewards([{"exact_answer": {"rule": "whole"}}], None)
    config = Rollout(**{"group_size": 4, "prompts_per_step": 3, "max_tokens": 8, **settings})
    return Rollouts(problems, sampler, rewards, config, build_algorithm(algorithm), seed)


def first(source: Rollouts) -> RolloutBatch:
    return next(source.after(0, Position(), quiet))


def half_right(prompt: np.ndarray, stream: int) -> str:
    return str(prompt[0] - 1) if stream % 2 else "wrong"


def test_every_problem_is_used_once_per_epoch_in_a_new_order() -> None:
    source = rollouts(ScriptedSampler(half_right), prompted(6), algorithm="grpo")
    ids = [g.problem.id for batch in islice(source.after(0, Position(), quiet), 4) for g in batch.groups]
    assert sorted(ids[:6]) == sorted(ids[6:]) == [f"p{i}" for i in range(6)]
    assert ids[:6] != ids[6:]


def test_a_batch_carries_the_position_that_the_next_one_continues_from() -> None:
    whole, resumed = (rollouts(ScriptedSampler(half_right), prompted(5)) for _ in range(2))
    *_, third, then = islice(whole.after(0, Position(), quiet), 4)
    again = next(resumed.after(3, third.position, quiet))
    assert [g.problem.id for g in then.groups] == [g.problem.id for g in again.groups]
    assert then.position == again.position
    for a, b in zip(then.groups, again.groups, strict=True):
        np.testing.assert_array_equal(a.rewards, b.rewards)


def test_keys_of_draws_never_repeat() -> None:
    sampler = ScriptedSampler(lambda *_: "wrong")
    source = rollouts(sampler, prompted(2), prompts_per_step=5, max_resampling_rounds=2)
    list(islice(source.after(0, Position(), quiet), 4))
    assert len(set(sampler.streams)) == len(sampler.streams) > 100


def test_dead_groups_are_replaced_in_bounded_rounds() -> None:
    # Problems 0..4 are never solved, 5..9 half of the time.
    def answer(prompt: np.ndarray, stream: int) -> str:
        return half_right(prompt, stream) if prompt[0] > 5 else "wrong"

    batch = first(rollouts(ScriptedSampler(answer), prompted(10), group_size=16, max_resampling_rounds=8))
    assert len(batch.groups) == 3
    assert not any(g.dead for g in batch.groups)
    assert all(g.dead for g in batch.filtered)
    hopeless = first(rollouts(ScriptedSampler(lambda *_: "wrong"), prompted(10), max_resampling_rounds=2))
    assert hopeless.groups == []
    assert hopeless.metrics["rollout/resampling_rounds"] == 2
    assert len(hopeless.filtered) == 9


def test_without_a_filter_dead_groups_are_kept() -> None:
    batch = first(rollouts(ScriptedSampler(lambda *_: "wrong"), prompted(4), algorithm="grpo"))
    assert len(batch.groups) == 3
    assert batch.metrics["rollout/resampling_rounds"] == 0


def test_a_stop_in_the_middle_leaves_no_trace() -> None:
    source, other = (rollouts(ScriptedSampler(half_right), prompted(5)) for _ in range(2))

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(source.after(0, Position(), stop))
    batches = (next(r.after(0, Position(), quiet)) for r in (source, other))
    first, fresh = ([g.problem.id for g in batch.groups] for batch in batches)
    assert first == fresh


def test_remax_scores_a_greedy_completion_too() -> None:
    source = rollouts(ScriptedSampler(lambda p, _: str(p[0] - 1)), prompted(3), algorithm="remax")
    batch = first(source)
    assert [g.greedy_reward for g in batch.groups] == [1.0, 1.0, 1.0]


def test_the_greedy_baseline_is_drawn_greedily_and_once_per_problem() -> None:
    sampler = ScriptedSampler(lambda p, _: str(p[0] - 1) if sampler.greedy else "wrong")
    batch = first(rollouts(sampler, prompted(3), algorithm="remax"))
    assert [g.greedy_reward for g in batch.groups] == [1.0, 1.0, 1.0]
    assert [g.rewards.tolist() for g in batch.groups] == [[0.0] * 4] * 3
    assert len(sampler.streams) == 3 * 4 + 3


def test_the_cursor_counts_problems_that_replaced_others() -> None:
    # Every other problem is never solved, so every step takes more problems than it keeps.
    def answer(prompt: np.ndarray, stream: int) -> str:
        return half_right(prompt, stream) if prompt[0] % 2 else "wrong"

    source = rollouts(ScriptedSampler(answer), prompted(12), group_size=16, max_resampling_rounds=8)
    taken: list[str] = []
    for batch in islice(source.after(0, Position(), quiet), 2):
        taken += [g.problem.id for g in (*batch.groups, *batch.filtered)]
        assert batch.position.cursor == len(taken)
    assert batch.filtered
    assert len(set(taken[:12])) == min(len(taken), 12)


def test_a_filter_does_not_see_what_could_not_be_judged() -> None:
    def judged(completion: str) -> float | None:
        return None if completion == "unclear" else 0.0

    answer = ScriptedSampler(lambda _, stream: "unclear" if stream % 2 else "wrong")
    config = Rollout(group_size=8, prompts_per_step=3, max_tokens=8, max_resampling_rounds=0)
    rewards, algorithm = load_rewards([judged], None), build_algorithm("dapo")
    batch = first(Rollouts(prompted(3), answer, rewards, config, algorithm, 0))
    assert any(0 < g.scorable.sum() < 8 for g in batch.filtered)
    assert batch.groups == []


def test_problems_that_were_rejected_are_remembered_as_hard() -> None:
    source = rollouts(
        ScriptedSampler(lambda *_: "wrong"), prompted(3), curriculum="frontier", max_resampling_rounds=0
    )
    batch = first(source)
    assert len(batch.filtered) == 3
    memory = Difficulty(3)
    memory.load(batch.position.difficulty)
    assert memory.rates.tolist() == [0.0, 0.0, 0.0]
