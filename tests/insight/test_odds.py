"""Odds of a dead group: unbiased where enough was drawn, and honest where it was not."""

from __future__ import annotations

from dataclasses import replace
from math import comb

import numpy as np
import pytest

from covey.insight.odds import dead_share, reward_counts
from covey_verify.types import StepRewards
from tests.fakes import component, group


@pytest.mark.parametrize(("p", "size"), [(0.05, 8), (0.2, 4), (0.5, 2), (0.3, 8)])
def test_the_mean_over_all_outcomes_is_the_formula(p: float, size: int) -> None:
    """Sum over k of Binomial(8, p)(k) x estimate(k) = p^G + (1 - p)^G; putting k/8 in for p would not be."""
    outcomes = [{1.0: k, 0.0: 8 - k} for k in range(9)]
    chances = [comb(8, k) * p**k * (1 - p) ** (8 - k) for k in range(9)]
    values = [dead_share([{r: n for r, n in o.items() if n}], size).value for o in outcomes]
    assert np.dot(chances, values) == pytest.approx(p**size + (1 - p) ** size)


def test_by_hand() -> None:
    """Two of four correct, groups of 2: the pairs (1, 1) and (0, 0) are 2 of 6."""
    assert dead_share([{1.0: 2, 0.0: 2}], 2).value == pytest.approx(1 / 3)
    assert dead_share([{1.0: 4}], 2).value == 1
    three_rewards = [{1.0: 2, 0.1: 1, 0.0: 1}]  # only (1, 1) ties: 1 of 6
    assert dead_share(three_rewards, 2).value == pytest.approx(1 / 6)


@pytest.mark.parametrize("shape", [(0.5, 4.0), (2.0, 2.0), (0.3, 0.3)])
def test_beyond_what_was_drawn_the_interval_holds_the_truth(shape: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(30):
        rates = rng.beta(*shape, size=32)
        counts = [{r: n for r, n in ((1.0, k), (0.0, 8 - k)) if n} for k in rng.binomial(8, rates).tolist()]
        many = rng.beta(*shape, size=20_000)
        truth = float((many**32 + (1 - many) ** 32).mean())
        found = dead_share(counts, 32)
        inside += found.low <= truth <= found.high
    assert inside >= 27


def test_groups_without_a_success_may_still_be_live() -> None:
    """32 problems, 8 failures each: all groups tied, and 11 % may still be live (Wilson, 0 of 32)."""
    found = dead_share([{0.0: 8}] * 32, 8)
    assert found.value == 1
    assert found.low == pytest.approx(0.893, abs=0.001)
    assert dead_share([{0.0: 8}] * 32, 64).value < 1


def test_unscored_completions_do_not_count() -> None:
    assert reward_counts(group([1.0, float("nan"), 0.0])) == {1.0: 1, 0.0: 1}
    assert dead_share([reward_counts(group([float("nan")] * 4))], 4).value == 1


def test_by_step_a_completion_with_two_values_makes_any_group_live() -> None:
    """Outcomes 1 and 2 are all right, 3 is mixed, 4 all wrong: of the six pairs only (1, 2) ties."""
    steps = tuple(StepRewards(values, range(len(values))) for values in ((1, 1), (1,), (1, 0), (0, 0)))
    values = [2.0, 1.0, 1.0, 0.0]
    by_step = replace(group(values), components={"judge": component(values, steps=steps)}, credit="step")
    assert not by_step.dead
    assert dead_share([reward_counts(by_step)], 2).value == pytest.approx(1 / 6)
    alike = replace(by_step, components={"judge": component(values, steps=(steps[0], steps[1]) * 2)})
    assert alike.dead
    assert dead_share([reward_counts(alike)], 4).value == 1


def test_compared_with_a_critic_every_group_is_live() -> None:
    by_token = replace(group([1.0, 1.0, 1.0, 1.0]), credit="token")
    assert dead_share([reward_counts(by_token)], 4).value == 0
    assert dead_share([reward_counts(by_token)], 16).value < 0.01
