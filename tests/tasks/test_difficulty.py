"""Difficulty: what to sample next, and how much of it."""

from __future__ import annotations

from functools import partial
from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import ScriptedSampler, prompted
from tests.rollouts.small_rollouts import rollouts

from covey.config.sampling import Rollout
from covey.rng import key
from covey.rollouts.choose import Chooser
from covey.tasks.difficulty import Difficulty, allocate


def test_problems_near_one_half_are_drawn_more_often() -> None:
    difficulty = Difficulty(30)
    for index in range(30):
        difficulty.update(index, [0.0, 0.5, 1.0][index % 3])
    drawn = np.zeros(30)
    for step in range(500):
        drawn[difficulty.choose(key("t", step), 3)] += 1
    frontier = drawn[1::3].sum() / drawn.sum()
    assert frontier > 0.75
    assert drawn.min() > 0  # none is lost for good
    assert all(len(set(difficulty.choose(key("u", s), 10))) == 10 for s in range(20))
    assert not set(difficulty.choose(key("v"), 25, without=[1, 2, 3])) & {1, 2, 3}
    assert len(difficulty.choose(key("w"), 99)) == 30


def test_pass_rates_are_remembered_with_forgetting_and_survive_a_checkpoint() -> None:
    difficulty = Difficulty(3)
    difficulty.update(1, 0.0)
    difficulty.update(1, 1.0)
    assert difficulty.rates.tolist() == [0.5, 0.5, 0.5]
    difficulty.update(1, 1.0)
    assert difficulty.rates[1] == 0.75
    again = Difficulty(3)
    again.load(difficulty.state())
    np.testing.assert_array_equal(again.rates, difficulty.rates)
    seen = again.metrics(4)
    assert [v for k, v in seen.items() if "pass_rate" in k] == [0.0, 0.0, 0.0, 1.0]
    assert seen["difficulty/tried"] == 1 / 3
    assert seen["difficulty/pass_rate_0.75_1.00"] == 1.0


def test_a_pass_before_the_first_step_measures_every_problem_once() -> None:
    # Problem 3 is always solved, the others never.
    def answer(prompt: np.ndarray, _: int) -> str:
        return "3" if prompt[0] == 4 else "x"

    sampler = ScriptedSampler(answer)
    settings = {"algorithm": "grpo", "group_size": 2, "prompts_per_step": 2, "curriculum": "frontier"}
    make = partial(rollouts, sampler, prompted(6), **settings, prepass=3)
    first = next(make().batches())
    assert len(set(sampler.streams)) == len(sampler.streams) == 6 * 3 + 2 * 2
    rates = {int(i): rate for i, (rate, *_) in first.position.difficulty.items()}
    assert rates == {0: 0, 1: 0, 2: 0, 3: 1, 4: 0, 5: 0}
    assert first.metrics["difficulty/tried"] == 1.0
    sampler.streams.clear()
    next(make(first_step=1, position=first.position).batches())  # a resumed run knows them
    assert len(sampler.streams) == 2 * 2


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(2, 16))
def test_an_allocation_spends_the_budget_within_its_bounds(rates: list[float], size: int) -> None:
    total = size * len(rates)
    sizes = allocate(rates, total, max_size=8 * size)
    assert sum(sizes) == total
    assert all(2 <= s <= 8 * size for s in sizes)
    for a, b in zip(rates, sizes, strict=True):
        for c, d in zip(rates, sizes, strict=True):
            assert abs(a - 0.5) <= abs(c - 0.5) or b <= d + 1 or a * (1 - a) < 1e-3


def test_rollouts_follow_the_frontier_and_adapt_group_sizes() -> None:
    # Problem 0 is solved half of the time, all others never.
    def answer(prompt: np.ndarray, stream: int) -> str:
        return str(prompt[0] - 1) if prompt[0] == 1 and stream % 2 else "wrong"

    source = rollouts(
        ScriptedSampler(answer),
        prompted(8),
        algorithm="grpo",
        group_size=8,
        curriculum="frontier",
        adapt_group_size=True,
    )
    sizes: dict[str, list[int]] = {}
    for batch in islice(source.batches(), 40):
        assert sum(len(g.completions) for g in batch.groups) == 24
        for g in batch.groups:
            sizes.setdefault(g.problem.id, []).append(len(g.completions))
    others = [n for name, ns in sizes.items() if name != "p0" for n in ns[3:]]
    assert len(sizes["p0"]) > 25
    assert np.mean(sizes["p0"][3:]) > 2 * np.mean(others)


def test_solved_in_a_row_is_not_solved_now_and_then() -> None:
    difficulty = Difficulty(2)
    for first, second in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.0)):
        difficulty.update(0, first)
        difficulty.update(1, second)
    assert difficulty.retired_mask(2).tolist() == [False, False]
    difficulty.update(0, 1.0)
    assert difficulty.retired_mask(2).tolist() == [True, False]


def test_the_frontier_draws_no_problem_twice_in_a_step() -> None:
    """Of six problems four are taken: only the other two are left for the next round."""
    chooser, difficulty = Chooser(6, Rollout(curriculum="frontier"), seed=0), Difficulty(6)
    first = [c.problem for c in chooser.choose(0, 0, 0, 4, (), difficulty).choices]
    then = [c.problem for c in chooser.choose(0, 0, 4, 2, first, difficulty).choices]
    assert sorted([*first, *then]) == list(range(6))
