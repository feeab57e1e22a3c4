"""The signs that findings rest on, each by a value derived by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from covey.objective.signs import gradient_signs, group_signs, lone, shared_prefixes
from covey.types import Completion, Component, Group, Problem
from covey_verify.types import Score, StepRewards
from tests.fakes import completion, component, group


def written(*tokens: list[int]) -> tuple[Completion, ...]:
    return tuple(
        Completion(np.array(t), np.zeros(len(t), np.float32), " ".join(map(str, t)), "stop") for t in tokens
    )


def of(rewards: list[float], *tokens: list[int]) -> Group:
    values = np.array(rewards)
    return Group(Problem("p", "p"), np.array([1]), written(*tokens), values, {"a": component(values)})


def test_dead_groups_are_split_into_collapse_and_cliff() -> None:
    same = of([0, 0, 0, 0], [5], [5], [5], [6])  # three quarters are one text
    different = of([0, 0, 0, 0], [5], [5], [6], [7])
    solved = of([1, 1, 1, 1], [5], [5], [5], [5])  # nothing is wrong with it
    live = of([0, 1, 0, 0], [5], [6], [5], [5])
    found = group_signs([same, different, solved, live])
    assert (found["groups/collapsed"], found["groups/cliff"]) == (0.25, 0.25)


def test_near_ties_are_judged_by_the_range_of_the_step() -> None:
    near, apart = group([0.95, 0.96]), group([0.0, 1.0])
    assert group_signs([near, apart])["groups/near_ties"] == 0.5
    assert group_signs([near])["groups/near_ties"] == 0.0, "alone, this is all the difference there is"


def test_one_against_all_is_one_reward_among_equal_ones() -> None:
    assert lone(group([0, 0, 1, 0])) == 2
    assert lone(group([1, 1, 1, 0])) == 3
    assert lone(group([0, 0, 1, 1])) is None
    assert lone(group([0, 1, 2])) is None
    found = group_signs([group([0, 0, 0, 1]), group([0, 0, 1, 1]), group([1, 1])])
    assert found["groups/one_against_all"] == 0.5, "of the groups that train"


def test_the_same_tokens_paid_differently_are_noise() -> None:
    noisy = of([1, 0, 1, 0], [5, 6], [5, 6], [7], [7])
    assert group_signs([noisy])["reward/inconsistent"] == 1.0
    steady = of([1, 1, 0, 0], [5, 6], [5, 6], [7], [7])
    assert group_signs([steady, noisy])["reward/inconsistent"] == 0.5
    assert group_signs([of([1, 0], [5], [6])])["reward/inconsistent"] == 0.0, "nothing is a copy"


def test_the_same_step_paid_differently_is_noise() -> None:
    # The first step [5] is shared by all three and paid 1, 1, -1; the second ones differ.
    steps = tuple(StepRewards([v, 1.0], [0, 1]) for v in (1.0, 1.0, -1.0))
    components = {"judge": component([1.0, 1.0, 0.0], steps=steps)}
    shared = replace(of([1, 1, 0], [5, 6], [5, 7], [5, 8]), components=components)
    assert group_signs([shared])["steps/inconsistent"] == 1.0
    assert "steps/inconsistent" not in group_signs([group([0, 1])])


def test_lengths_of_what_ended_and_answers_in_what_did_not() -> None:
    long, done = completion("x", 9, "length"), completion("y", 9, "length")
    scores = (Score(0.0), Score(0.0, extracted="4"), Score(1.0, extracted="4"))
    values = np.array([0.0, 0.0, 1.0])
    components = {"a": Component(values, 1.0, scores)}
    one = Group(Problem("p", "p"), np.array([1]), (long, done, completion("z", 4)), values, components)
    found = group_signs([one])
    assert (found["length/truncated_done"], found["length/ended_q90"]) == (0.5, 4.0)
    assert "length/ended_q90" not in group_signs([replace(one, completions=(long, done, long))])


def test_the_std_moves_gradient_from_even_groups_to_uneven_ones() -> None:
    # One success of 16 and eight of 16, z-scored: |A| sums to 2 sqrt(p q) 16 = 7.75 and 16;
    # without the std to 2 p q 16 = 1.875 and 8. Fractions .326 and .190: .136 lies elsewhere.
    hard, even = group([1, *[0] * 15]), group([1, 0] * 8)
    z = [np.full(3, (r - g.rewards.mean()) / g.rewards.std()) for g in (hard, even) for r in g.rewards]
    assert gradient_signs([hard, even], z)["gradient_share/overweight"] == pytest.approx(0.1363, abs=1e-3)
    plain = [np.full(3, r - g.rewards.mean()) for g in (hard, even) for r in g.rewards]
    assert gradient_signs([hard, even], plain)["gradient_share/overweight"] == pytest.approx(0.0)


def test_blame_on_what_a_good_sibling_begins_with_too() -> None:
    # The bad completion shares two of its four tokens with the good one.
    two = of([1, 0], [5, 6, 7], [5, 6, 8, 9])
    advantages = [np.full(3, 0.5), np.full(4, -0.5)]
    assert shared_prefixes(two, advantages) == {1: 2}
    assert gradient_signs([two], advantages)["gradient_share/shared_prefix"] == 0.5
    late = [np.full(3, 0.5), np.array([0.0, 0.0, -0.5, -0.5])]  # credit from where they part
    assert gradient_signs([two], late)["gradient_share/shared_prefix"] == 0.0
    assert gradient_signs([two], [np.zeros(3), np.zeros(4)]) == {}
