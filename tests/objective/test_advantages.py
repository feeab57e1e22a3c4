"""Advantages by hand. Derivations stand beside the numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from covey.objective.advantages import (
    batch_centered,
    batch_std,
    centered,
    component_leave_one_out,
    component_zscore,
    divided,
    greedy_baseline,
    group_centered,
    group_zscore,
    leave_one_out,
    leave_one_out_zscore,
    length_penalized,
    length_weighted,
    mean_normalized,
    pass_at_k,
    per_completion,
    reward,
    running_baseline,
    running_means,
    sample_zscore,
    standard_deviation,
    token_zscore,
    valid_group_scale,
)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(a: Tensor, *values: float) -> None:
    torch.testing.assert_close(a, t(*values), rtol=1e-12, atol=1e-12)


# --- one group ------------------------------------------------------------------------------------


def test_reward_is_its_own_advantage() -> None:
    given_rewards = t(1, -2)
    got = reward(given_rewards)
    close(got, 1, -2)
    got[0] = 9
    assert given_rewards[0] == 1


def test_centered_rewards() -> None:
    # mean(1, 0, 0, 3) = 1.
    close(centered(t(1, 0, 0, 3)), 0, -1, -1, 2)
    close(group_centered(t(1, 0, 0, 3)), 0, -1, -1, 2)


@pytest.mark.parametrize(
    ("ddof", "expected"),
    # Squared distances from 1: 0 + 1 + 1 + 4 = 6, over 4 or over 3.
    [(0, math.sqrt(1.5)), (1, math.sqrt(2.0))],
)
def test_standard_deviation_is_population_or_sample(ddof: int, expected: float) -> None:
    close(standard_deviation(t(1, 0, 0, 3), ddof), expected)
    close(standard_deviation(t(5), ddof), 0)


def test_nothing_divided_by_nothing_is_nothing() -> None:
    close(divided(t(0, 6), t(0, 3)), 0, 2)


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("ddof", [0, 1])
def test_group_zscore_for_every_reading_of_std_and_eps(ddof: int, eps: float) -> None:
    # (1, 0, 1, 0): distances +-1/2; population std 1/2, sample std sqrt(4/4/3) = 1/sqrt(3); eps is added.
    std = 0.5 if ddof == 0 else 1 / math.sqrt(3)
    a = 0.5 / (std + eps)
    close(group_zscore(t(1, 0, 1, 0), ddof=ddof, eps=eps), a, -a, a, -a)


@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-100, 100))
def test_zscores_do_not_know_the_units_of_the_reward(scale: float, shift: float) -> None:
    rewards = t(0.1, 0.7, 0.4, 1.0)
    scaled = group_zscore(scale * rewards + shift, eps=0.0)
    torch.testing.assert_close(scaled, group_zscore(rewards, eps=0.0), rtol=1e-8, atol=1e-8)
    if abs(scale - 1) > 1e-3:
        assert not torch.allclose(group_centered(scale * rewards), group_centered(rewards))


def test_leave_one_out() -> None:
    # (1, 0, 0, 3): 1 - 3/3 = 0; 0 - 4/3; 0 - 4/3; 3 - 1/3.
    close(leave_one_out(t(1, 0, 0, 3)), 0, -4 / 3, -4 / 3, 8 / 3)
    close(leave_one_out(t(7)), 0)


def test_leave_one_out_zscore() -> None:
    # One success among four. For it: siblings 0 0 0, mean 0, std 0, so undivided +1.
    # For a failure: siblings 1 0 0, mean 1/3, sample std sqrt((4/9 + 1/9 + 1/9) / 2) = 1/sqrt(3).
    close(leave_one_out_zscore(t(1, 0, 0, 0), eps=0.0), 1, *[-1 / math.sqrt(3)] * 3)
    a = -1 / 3 / (1 / math.sqrt(3) + 0.1)
    close(leave_one_out_zscore(t(1, 0, 0, 0), eps=0.1), 1, a, a, a)
    # Two completions have one sibling each: no spread, so the difference itself.
    close(leave_one_out_zscore(t(1, 4)), -3, 3)
    close(leave_one_out_zscore(t(4)), 0)


def test_length_weighted_baseline() -> None:
    # Lengths 1 and 3, rewards 1 and 0: baseline 1 * 1 / 4, so 3/4 and -1/4.
    close(length_weighted(t(1, 0), t(1, 3)), 0.75, -0.25)
    # Equal lengths: the mean.
    close(length_weighted(t(1, 0, 0, 3), t(2, 2, 2, 2)), 0, -1, -1, 2)


def test_mean_normalized() -> None:
    # One success among four: mean 1/4, so (3/4) / (1/4) = 3 and -1.
    close(mean_normalized(t(1, 0, 0, 0), eps=0.0), 3, -1, -1, -1)
    close(mean_normalized(t(1, 0, 0, 0), eps=0.25), 1.5, -0.5, -0.5, -0.5)
    close(mean_normalized(t(0, 0)), 0, 0)
    close(mean_normalized(t(-3, 1)), 0, 0)
    close(mean_normalized(t(-1, 1), eps=0.0), 0, 0)


def test_greedy_baseline() -> None:
    close(greedy_baseline(t(1, 0), 0.25), 0.75, -0.25)
    close(greedy_baseline(t(1, 0), math.nan), 0, 0)


def test_component_zscore_normalises_each_reward_first() -> None:
    # Correctness (1, 0) has sample std 1/sqrt(2): +-1/sqrt(2). Style (0, 10) as well, reversed.
    # With weights 1 and 1/2: (1 - 1/2) / sqrt(2). The plain sum would let style win by 10 to 1.
    got = component_zscore(torch.stack([t(1, 0), t(0, 10)]), t(1, 0.5), eps=0.0)
    a = 0.5 / math.sqrt(2)
    close(got, a, -a)
    # Population std 1/2: +-1 each.
    close(component_zscore(torch.stack([t(1, 0), t(0, 10)]), t(1, 0.5), ddof=0, eps=0.0), 0.5, -0.5)


def test_a_component_that_does_not_apply_stays_outside_its_statistics() -> None:
    # Style is known for the last two only: -1, +1 in units of its own population std.
    components = torch.stack([t(1, 1, 0), t(math.nan, 2, 4)])
    correct = group_zscore(t(1, 1, 0), ddof=0, eps=0.0)
    got = component_zscore(components, t(1, 1), ddof=0, eps=0.0)
    torch.testing.assert_close(got, correct + t(0, -1, 1))


def test_component_leave_one_out() -> None:
    # Correctness (1, 0, 0): +1 - 0 undivided; 0 - 1/2 over std(1, 0) = 1/sqrt(2): -1/sqrt(2).
    # Style (0, 0, 2): siblings of the first 0 2: -1 over sqrt(2); same for the second; +2 undivided.
    got = component_leave_one_out(torch.stack([t(1, 0, 0), t(0, 0, 2)]), t(1, 0.5), eps=0.0)
    r = 1 / math.sqrt(2)
    close(got, 1 - 0.5 * r, -r - 0.5 * r, -r + 1)


def test_a_reward_that_applies_to_no_completion_adds_nothing() -> None:
    components, weights = torch.stack([t(math.nan, math.nan), t(0, 1)]), t(1, 1)
    for estimator in (component_zscore, component_leave_one_out):
        assert torch.equal(estimator(components, weights), estimator(components[1:], weights[1:]))


# --- the whole batch ------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
"""A long completion and a short one."""
A = torch.tensor([[1.0, 1.0, 1.0], [-1.0, 0.0, 0.0]], dtype=torch.float64)


def test_per_completion_is_exact_for_equal_values() -> None:
    # 1 and 6 of the first, the 8 in between being a tool's; 4 alone of the second.
    gaps = torch.tensor([[1, 0, 1], [0, 1, 0]]).bool()
    close(per_completion(torch.tensor([[1.0, 8.0, 6.0], [9.0, 4.0, 9.0]], dtype=torch.float64), gaps), 3.5, 4)
    values = torch.full((2, 3), 0.7, dtype=torch.float64)
    assert per_completion(values, MASK).tolist() == [0.7, 0.7]


def test_batch_centered_over_completions() -> None:
    # Completions have 1 and -1: mean 0, though tokens have mean 1/2.
    torch.testing.assert_close(batch_centered(A, MASK), A)
    torch.testing.assert_close(batch_centered(A + 3, MASK)[0], A[0])


def test_batch_std_of_rewards_or_of_advantages() -> None:
    # Rewards 0 and 4: sample std sqrt(8). Advantages 1 and -1: sample std sqrt(2).
    rewards = t(0, 4)
    torch.testing.assert_close(batch_std(A, MASK, rewards, eps=0.0), A / math.sqrt(8))
    torch.testing.assert_close(batch_std(A, MASK, rewards, of="advantages", eps=0.0), A / math.sqrt(2))
    torch.testing.assert_close(batch_std(A, MASK, rewards, ddof=0, eps=0.5), A / 2.5)


@pytest.mark.parametrize("whiten", [batch_centered, sample_zscore, token_zscore])
def test_a_group_without_signal_keeps_its_zero_in_the_batch(whiten) -> None:
    """Centred groups have a mean of 0 but for rounding, whose sign some losses would follow."""
    groups = [group_centered(t(0.3, 0.7, 1.0, 0.3)), group_centered(t(0.7, 0.0, 0.3, 0.7)), t(0, 0, 0, 0)]
    whole = torch.cat([g.double() for g in groups])[:, None].expand(-1, 3)
    assert whole.mean() != 0
    assert not whiten(whole, torch.ones(12, 3, dtype=torch.bool))[8:].any()


def test_sample_zscore_weighs_completions_alike() -> None:
    # mean 0, sample std sqrt(2).
    torch.testing.assert_close(sample_zscore(A, MASK, eps=0.0), A / math.sqrt(2))
    torch.testing.assert_close(sample_zscore(A, MASK, ddof=0, eps=1.0), A / 2)


def test_token_zscore_weighs_long_completions_more() -> None:
    # Tokens 1 1 1 -1: mean 1/2, distances 1/2 1/2 1/2 -3/2, squares 3/4 + 9/4 = 3; sample variance 1.
    got = token_zscore(A, MASK, eps=0.0)
    torch.testing.assert_close(got, torch.tensor([[0.5, 0.5, 0.5], [-1.5, 0, 0]], dtype=torch.float64))
    # Population variance 3/4; eps stands inside the root.
    got = token_zscore(A, MASK, ddof=0, eps=0.25)
    torch.testing.assert_close(got, torch.tensor([[0.5, 0.5, 0.5], [-1.5, 0, 0]], dtype=torch.float64))


def test_valid_group_scale_makes_up_for_groups_without_signal() -> None:
    # Three groups of 2, 1 and 1 completions; the last says nothing: 4 / 3.
    advantages = torch.tensor([[1.0], [-1.0], [2.0], [0.0]], dtype=torch.float64)
    mask = torch.ones(4, 1).bool()
    group, rewards = torch.tensor([0, 0, 1, 2]), t(1, 0, 1, 1)
    torch.testing.assert_close(valid_group_scale(advantages, mask, group, rewards), advantages * 4 / 3)
    by_reward = valid_group_scale(advantages, mask, group, t(1, 0, 0, 1), of="rewards")
    torch.testing.assert_close(by_reward, advantages * 4 / 2)
    none = torch.zeros(4, 1).double()
    torch.testing.assert_close(valid_group_scale(none, mask, group, rewards), none)


@pytest.mark.parametrize(
    ("function", "more"),
    [(batch_centered, ()), (sample_zscore, ()), (token_zscore, ()), (batch_std, (t(1, 1),))],
)
def test_batch_functions_leave_nothing_on_padding_or_without_spread(function, more) -> None:
    flat = torch.full((2, 3), 0.7, dtype=torch.float64).where(MASK, 0.0)
    got = function(flat, MASK, *more)
    assert not got[~MASK].any()
    assert function is batch_std or not got.any()


# --- the best of k --------------------------------------------------------------------------------


def test_pass_at_k_by_hand() -> None:
    # One success of four, k = 2: half of the six pairs have it: mean 1/2, std 1/2. With it in: 1, so
    # (1 - 1/2) / (1/2) = 1. Without: one of its three pairs, (1/3 - 1/2) / (1/2) = -1/3.
    close(pass_at_k(t(1, 0, 0, 0), k=2, eps=0.0), 1, -1 / 3, -1 / 3, -1 / 3)
    # Three of four: no pair without a success, so nothing to teach; one at a time it is the z-score.
    close(pass_at_k(t(1, 1, 1, 0), k=2, eps=0.0), 0, 0, 0, 0)
    close(pass_at_k(t(1, 1, 1, 0), k=1, eps=0.0), *group_zscore(t(1, 1, 1, 0), ddof=0, eps=0.0).tolist())


def test_pass_at_k_of_rewards_between_is_the_mean_over_all_sets() -> None:
    rewards = [0.3, 1.0, 0.3, 0.0, 0.7, 0.1]
    for k in range(1, 6):
        sets = list(itertools.combinations(range(6), k))
        best = np.array([max(rewards[i] for i in s) for s in sets])
        expected = [
            (best[[i in s for s in sets]].mean() - best.mean()) / (best.std() + 1e-6) for i in range(6)
        ]
        close(pass_at_k(t(*rewards), k=k), *expected)
    assert not pass_at_k(t(0.7, 0.7, 0.7), k=2, eps=0.0).any()


def test_a_completion_without_siblings() -> None:
    alone = t(0.7)
    for function in (group_centered, group_zscore, leave_one_out):
        assert function(alone).tolist() == [0.0]
    assert group_centered(alone, single="reward").tolist() == [0.7]
    assert leave_one_out(alone, single="reward").tolist() == [0.7]
    assert length_weighted(alone, t(5), single="reward").tolist() == [0.7]
    # verl: (.7 - 0) / (1 + eps).
    assert group_zscore(alone, eps=0.4, single="reward").item() == pytest.approx(0.5)
    # With siblings nothing changes.
    assert group_zscore(t(1, 0), eps=0.0, single="reward").tolist() == group_zscore(t(1, 0), eps=0.0).tolist()


def test_a_floor_under_the_variance() -> None:
    # Tokens -1, 1, 1, -1: variance 1 over four. A floor of 4 halves what eps alone would leave.
    values, mask = t(1, -1, -1, 1)[None], torch.ones(1, 4).bool()
    torch.testing.assert_close(token_zscore(values, mask, ddof=0, eps=0.0), values)
    torch.testing.assert_close(token_zscore(values, mask, ddof=0, eps=0.0, floor=4.0), values / 2)


def test_a_running_mean_is_that_of_before() -> None:
    # b: 0, then .5 * 0 + .5 * 1 = .5, an unjudged one leaves it, then .25 + .5 * 2 = 1.25.
    before, after = running_means(t(1, math.nan, 2), 0.0, decay=0.5)
    assert before.tolist() == [0.0, 0.5, 0.5]
    assert after == 1.25
    assert running_baseline(t(1, 3), t(0.25, 0.5)).tolist() == [0.75, 2.5]


def test_brevity_counts_by_the_pass_rate() -> None:
    # Rewards 1 and 0, mean 1/2; lengths 4 and 2 of at most 4: s = 1 - .4 / 2, 0 - .4 / 4; mean .35.
    got = length_penalized(t(1, 0), t(4, 2), weight=0.4)
    torch.testing.assert_close(got, t(0.45, -0.45))
    # A solved group teaches brevity, a hopeless one nothing.
    torch.testing.assert_close(length_penalized(t(1, 1), t(4, 2), weight=0.4), t(-0.1, 0.1))
    assert not length_penalized(t(0, 0), t(4, 2)).any()
