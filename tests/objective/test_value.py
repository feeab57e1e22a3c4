"""What a critic learns and gives, beside the formulas of other codes, written out on the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.learner.advantage import with_advantages
from covey.learner.batching import Batch, collate
from covey.objective.advantages import token_zscore
from covey.objective.algorithms import PRESETS
from covey.objective.axis_function import bind
from covey.objective.diagnostics import value_metrics
from covey.objective.value import Critic, gae, value_loss, value_targets
from covey_verify.types import StepRewards
from tests.fakes import component, group

RNG = np.random.default_rng(5)
LENGTHS = torch.tensor([7, 3, 5, 1])
MASK = torch.arange(7) < LENGTHS[:, None]
REWARDS, VALUES, OLD, RETURNS = (torch.from_numpy(RNG.normal(size=MASK.shape)) for _ in range(4))


def backwards(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """PPO's loop as OpenAI's code and those after it (TRL, verl) have it, on padded rows: A and A + V."""
    rewards, values = rewards * MASK, values * MASK
    last, reverse = torch.zeros(len(rewards)).double(), []
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t < rewards.shape[1] - 1 else 0.0
        delta = rewards[:, t] + gamma * following - values[:, t]
        last = delta + gamma * lam * last
        reverse.append(last)
    advantages = torch.stack(reverse[::-1], dim=1)
    return advantages * MASK, (advantages + values) * MASK


def whitened(values: Tensor) -> Tensor:
    """Their masked_whiten: (x - mean) * rsqrt(var + 1e-8), Bessel's correction in the variance."""
    of = values[MASK]
    mean = of.sum() / len(of)
    variance = (of - mean).square().sum() / len(of) * len(of) / (len(of) - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * MASK


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (1.0, 1.0), (0.9, 0.5), (0.99, 0.0)])
def test_advantages_and_targets_are_those_of_other_codes(gamma: float, lam: float) -> None:
    advantages, targets = backwards(REWARDS, VALUES, gamma, lam)
    found = gae(REWARDS, VALUES, MASK, gamma=gamma, lam=lam)
    torch.testing.assert_close(found, advantages, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        value_targets(REWARDS, VALUES, MASK, gamma=gamma, lam=lam), targets, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(token_zscore(found, MASK), whitened(advantages), rtol=0, atol=1e-12)


def test_the_value_loss_is_that_of_other_codes() -> None:
    """.5 masked_mean(max((V - R)^2, (clip(V, V_old -+ eps) - R)^2))."""
    near = torch.minimum(torch.maximum(VALUES, OLD - 0.2), OLD + 0.2)
    each = torch.maximum((VALUES - RETURNS) ** 2, (near - RETURNS) ** 2)
    theirs = 0.5 * (each * MASK).sum() / MASK.sum()
    ours = value_loss(VALUES, OLD, RETURNS, clip_value=0.2)[MASK].mean()
    assert abs(float(ours - theirs)) < 1e-12


def test_with_lambda_one_targets_are_discounted_returns_whatever_the_values() -> None:
    # r = 1 2 4, gamma 1/2: 1 + 1 + 1, 2 + 2, 4.
    rewards, mask = torch.tensor([[1.0, 2, 4]]).double(), torch.ones(1, 3).bool()
    for values in (VALUES[:1, :3], torch.zeros(1, 3).double()):
        found = value_targets(rewards, values, mask, gamma=0.5, lam=1.0)
        torch.testing.assert_close(found, torch.tensor([[3.0, 4, 4]]).double())


# --- from groups to advantages --------------------------------------------------------------------

PLAIN = replace(PRESETS["ppo"], kl=None, whiten=None, advantage=bind(gae, lam=0.5), critic=Critic(lam=1.0))


def given(values: list[list[float]], algorithm=PLAIN, groups=None, **known: Tensor) -> Batch:
    groups = groups or [group([1.0, 0.0], [3, 2])]
    return with_advantages(replace(collate(groups), **known), groups, algorithm, values=torch.tensor(values))


VALUED = [[0.5, 0.6, 0.8], [0.5, 0.5, 0.0]]


def test_a_reward_arrives_at_the_last_token_and_spreads_by_lambda() -> None:
    batch = given(VALUED)
    # The first as by hand in test_gae_by_hand; the second: deltas 0 and -.5, so -.25 and -.5.
    expected = torch.tensor([[0.25, 0.3, 0.2], [-0.25, -0.5, 0.0]])
    torch.testing.assert_close(batch.advantages, expected)
    assert batch.value_targets is not None
    torch.testing.assert_close(batch.value_targets.targets, torch.tensor([[1.0, 1, 1], [0, 0, 0]]))
    assert torch.equal(batch.value_targets.returns, batch.value_targets.targets)


def test_equal_rewards_teach_where_the_values_expected_something_else() -> None:
    tied = [group([1.0, 1.0], [3, 2])]
    assert given(VALUED, groups=tied).advantages.any()
    single = [group([1.0], [3])]
    assert given(VALUED[:1], groups=single).advantages.any()


def test_a_kl_by_token_is_part_of_the_rewards_that_gae_sees() -> None:
    # beta 1/2, log-ratios 1 0 -1 and 0 2: r = -.5 0 1.5 and 0 -1; lambda 1: what is paid later minus V.
    kl = replace(PRESETS["ppo"].kl, coef=0.5)
    algorithm = replace(PLAIN, kl=kl, advantage=bind(gae, lam=1.0))
    old, ref = torch.tensor([[1.0, 0, -1], [0, 2, 0]]), torch.zeros(2, 3)
    batch = given(VALUED, algorithm, old_logprobs=old, ref_logprobs=ref)
    returns = torch.tensor([[1.0, 1.5, 1.5], [-1, -1, 0]])
    assert batch.value_targets is not None
    torch.testing.assert_close(batch.value_targets.returns, returns)
    torch.testing.assert_close(batch.advantages, (returns - torch.tensor(VALUED)) * batch.mask)


def test_rewards_by_step_are_paid_where_the_steps_end() -> None:
    steps = (StepRewards([2.0, -1.0], [0, 2]), StepRewards([], []))
    judged = group([1.5, 0.25], [3, 2])  # half of the steps' sum and an outcome of 1; an outcome of .25
    components = {**judged.components, "r": component([1.0, 0.0], 0.5, steps)}
    stepped = replace(judged, components=components, credit="token")
    batch = given(VALUED, groups=[stepped])
    assert batch.value_targets is not None
    torch.testing.assert_close(
        batch.value_targets.returns, torch.tensor([[1.5, 0.5, 0.5], [0.25, 0.25, 0.0]])
    )


def test_explained_variance_overall_and_by_quarter() -> None:
    returns = torch.tensor([[0.0, 0, 0, 0], [2, 2, 2, 2]])
    mask = torch.ones(2, 4).bool()
    # Errors 1 1 0 0: the distance is 1 at first and 0 later, and returns vary by 1.
    values = torch.tensor([[1.0, 0.5, 0.5, 0], [1, 1.5, 2.5, 2]])
    found = value_metrics(values, returns, mask)
    assert found["value/mean"] == pytest.approx(values.mean().item())
    by_quarter = [found[f"value/explained_variance/quarter_{q}"] for q in (1, 2, 3, 4)]
    assert by_quarter == pytest.approx([0.0, 0.75, 1.0, 1.0])  # the third is off by a constant only
    assert [found[f"value/error/quarter_{q}"] for q in (1, 2, 3, 4)] == pytest.approx([1, 0.5, 0.5, 0])
    # Errors R - V: -1 -.5 -.5 0 1 .5 -.5 0: mean -1/8, mean square 3/8, so variance 3/8 - 1/64.
    assert found["value/explained_variance"] == pytest.approx(1 - (3 / 8 - 1 / 64))
    assert "value/explained_variance" not in value_metrics(values, torch.ones(2, 4), mask)
    assert value_metrics(values, returns, mask & False) == {}
