"""Credit finer than the completion, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from covey.objective.credit import (
    discounted_return,
    optimal_token_baseline,
    prefix_tree,
    prefix_values,
    process_leave_one_out,
    process_zscore,
    segment_difference,
)
from covey.objective.value import gae, value_loss
from covey_verify.types import StepRewards


def t(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def v(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def by_steps(steps: list[StepRewards], mask: Tensor, **settings: Any) -> Tensor:
    """The advantages of one function's step rewards alone, of weight 1."""
    return process_zscore(torch.zeros(1, len(steps)).double(), v(1), mask, [steps], **settings)


# --- process rewards ------------------------------------------------------------------------------

STEPS = [StepRewards([1, 0], [1, 3]), StepRewards([0, 1, 1], [0, 1, 2])]
"""Steps of two tokens each in the first completion, of one each in the second; then one token more."""
WIDE = torch.ones(2, 5).bool()
# All five rewards together: mean 3/5, population variance 6/25, std .4899: z(1) = .8165, z(0) = -1.2247.
UP, DOWN = 0.4 / math.sqrt(6 / 25), -0.6 / math.sqrt(6 / 25)


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        ("own_step", [[UP, UP, DOWN, DOWN, 0], [DOWN, UP, UP, 0, 0]]),
        ("sum_to_go", [[UP + DOWN, UP + DOWN, DOWN, DOWN, 0], [DOWN + 2 * UP, 2 * UP, UP, 0, 0]]),
        # The worst step is the second of the first completion and the first of the second.
        ("min_form", [[DOWN, DOWN, DOWN, DOWN, 0], [DOWN, 0, 0, 0, 0]]),
    ],
)
def test_process_rewards_are_normalised_together_and_credited(credit: str, expected) -> None:
    got = by_steps(STEPS, WIDE, credit=credit, ddof=0, eps=0.0)
    torch.testing.assert_close(got, t(*expected))


def test_process_rewards_know_sample_std_and_eps() -> None:
    std = math.sqrt(6 / 5 / 4)  # squared distances sum to 6/5, over 5 - 1
    got = by_steps(STEPS, WIDE, credit="own_step", ddof=1, eps=0.1)
    assert got[0, 0].item() == pytest.approx(0.4 / (std + 0.1))


def test_process_rewards_without_spread_or_steps_say_nothing() -> None:
    flat = [StepRewards([0.7], [1]), StepRewards([0.7, 0.7], [0, 2])]
    assert not by_steps(flat, WIDE, eps=0.0).any()
    none = [StepRewards([], []), StepRewards([], [])]
    assert not by_steps(none, WIDE).any()
    one = by_steps([StepRewards([], []), StepRewards([1, 0], [0, 1])], WIDE, ddof=0, eps=0.0)
    torch.testing.assert_close(one, t([0, 0, 0, 0, 0], [0, -1, 0, 0, 0]))


def test_min_form_reaches_to_the_last_of_equally_bad_steps() -> None:
    steps = [StepRewards([0, 1, 0, 1], [0, 1, 2, 3])]
    got = by_steps(steps, torch.ones(1, 4).bool(), credit="min_form", ddof=0, eps=0.0)
    torch.testing.assert_close(got, t([-1, -1, -1, 0]))


def test_outcomes_and_several_process_rewards_add_up_by_weight() -> None:
    """Each function is scored on its own; what ties within one says nothing, whatever the others pay."""
    outcome, unknown, tied = v(1, 0), v(math.nan, 3), v(7, 7)
    everywhere = [StepRewards([2], [4]), StepRewards([4], [4])]  # mean 3, population std 1: -1 and 1
    got = process_zscore(
        torch.stack([v(0, 0), outcome, unknown, tied, v(9, 9)]),
        v(1, 10, 5, 5, 0.5),
        WIDE,
        [STEPS, [], [], [], everywhere],
        credit="own_step",
        ddof=0,
        eps=0.0,
    )
    own = by_steps(STEPS, WIDE, credit="own_step", ddof=0, eps=0.0)
    torch.testing.assert_close(got, own + t([10 - 0.5], [-10 + 0.5]))


def test_dense_rewards_lose_the_mean_of_the_siblings() -> None:
    # Steps 1 0 | 0 1 1: means 1/2 and 2/3. The first: 1 - 2/3 and 0 - 2/3, summed to go: -1/3 and -2/3.
    # The second: -1/2, 1/2, 1/2 summed: 1/2, 1, 1/2. An outcome of weight 2: 1 and 0 minus each other.
    outcome = torch.stack([v(0, 0), v(1, 0)])
    got = process_leave_one_out(outcome, v(1, 2), WIDE, [STEPS, []])
    dense = t([-1 / 3, -1 / 3, -2 / 3, -2 / 3, 0], [1 / 2, 1, 1 / 2, 0, 0])
    torch.testing.assert_close(got, dense + t([2], [-2]))
    # Discounted by a half: 1/3 - 1/3 and -2/3.
    half = process_leave_one_out(outcome, v(1, 0), WIDE, [STEPS, []], gamma=0.5)
    torch.testing.assert_close(half[0], t([0, 0, -2 / 3, -2 / 3, 0])[0])
    flat = [StepRewards([0.7], [1]), StepRewards([0.7, 0.7], [0, 2]), StepRewards([0.7], [3])]
    wide = torch.ones(3, 5).bool()
    assert not process_leave_one_out(torch.zeros(1, 3).double(), v(1), wide, [flat]).any()


# --- prefix trees ---------------------------------------------------------------------------------

# Three completions: 7 1 | 7 2 | 8, the last one token long. Rewards 1 0 .5, mean 1/2.
TOKENS = torch.tensor([[7, 1], [7, 2], [8, -1]])
REWARDS = v(1, 0, 0.5)
TREE = torch.tensor([[1, 1], [1, 1], [1, 0]]).bool()


def test_prefix_values_are_the_means_of_those_who_share() -> None:
    # After 7 the first two are together: (1 + 0) / 2; after their second token everybody is alone.
    torch.testing.assert_close(
        prefix_values(REWARDS, TOKENS), t([0.5, 0.5, 1.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.5])
    )
    twins = torch.tensor([[3, 4], [3, 4]])
    torch.testing.assert_close(prefix_values(v(1, 0), twins), t([0.5] * 3, [0.5] * 3))


def test_a_longer_completion_leaves_the_shorter_one_at_its_end() -> None:
    tokens = torch.tensor([[7, 1, 5], [7, 1, -1]])
    torch.testing.assert_close(prefix_values(v(1, 0), tokens), t([0.5, 0.5, 0.5, 1], [0.5, 0.5, 0.5, 0]))


def test_prefix_tree_puts_credit_where_completions_part() -> None:
    torch.testing.assert_close(prefix_tree(REWARDS, TOKENS, TREE), t([0, 0.5], [0, -0.5], [0, 0]))
    # TEMPO adds the outcome's advantage 1/2, -1/2, 0 on every token.
    torch.testing.assert_close(
        prefix_tree(REWARDS, TOKENS, TREE, outcome=1.0), t([0.5, 1.0], [-0.5, -1.0], [0, 0])
    )


def test_the_credit_of_a_completion_sums_to_its_advantage() -> None:
    tokens = torch.tensor([[1, 1, 2, 3], [1, 1, 2, 4], [1, 2, 2, -1], [5, 6, -1, -1]])
    rewards = v(0.3, 1.0, -2.0, 0.7)
    total = prefix_tree(rewards, tokens, tokens >= 0).sum(-1)
    torch.testing.assert_close(total, rewards - rewards.mean())


def test_segment_difference() -> None:
    # The group's mean, 1/2, before; 5/8 after the first's first segment, 1 at its end. The other is whole.
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    got = segment_difference(v(1, 0), [StepRewards([0.625], [1]), StepRewards([], [])], mask)
    assert got.tolist() == [[0.125, 0.125, 0.375, 0.0], [-0.5, -0.5, -0.5, -0.5]]


def test_discounted_return() -> None:
    # 1 at the last token, gamma 1/2: 1/4, 1/2, 1; a masked gap does not count as a token.
    paid, mask = t([0, 0, 1, 0], [0, 0, 0, 1]), torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]]).bool()
    got = discounted_return(paid, mask, gamma=0.5)
    assert got.tolist() == [[0.25, 0.5, 1.0, 0.0], [0.25, 0.0, 0.5, 1.0]]
    assert discounted_return(paid, mask)[0].tolist() == [1.0, 1.0, 1.0, 0.0]


# --- the optimal token baseline -------------------------------------------------------------------


def test_optimal_token_baseline_weighs_by_the_energy_so_far() -> None:
    # 1 - 2 pi + sum pi^2 at pi = 1/2: 1/2 with collision 1/2 (two equal tokens), 1/4 with collision 1/4.
    old = torch.full((2, 2), math.log(0.5), dtype=torch.float64)
    collision = t([0.5, 0.25], [0.25, 0.5])
    got = optimal_token_baseline(v(1, 0), old, collision, torch.ones(2, 2).bool())
    # Energies 1/2 and 1/4: the baseline is 2/3. Then 1/4 and 1/2 more, 3/4 and 3/4 so far: 1/2.
    torch.testing.assert_close(got, t([1 / 3, 1 / 2], [-2 / 3, -1 / 2]))


def test_a_lone_tail_keeps_the_signal_of_the_group() -> None:
    old = torch.full((2, 2), math.log(0.5), dtype=torch.float64)
    collision = torch.full((2, 2), 0.5, dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    got = optimal_token_baseline(v(1, 0), old.where(mask, math.nan), collision, mask)
    torch.testing.assert_close(got, t([0.5, 0.5], [-0.5, 0.0]))


def test_certain_tokens_have_no_energy() -> None:
    # pi = 1 with a collision just below 1, as float32 leaves it: never a negative weight.
    old, collision = torch.zeros(2, 1), torch.tensor([[1 - 1e-7], [1.0]])
    got = optimal_token_baseline(torch.tensor([1.0, 0.0]), old, collision, torch.ones(2, 1).bool())
    assert got.abs().max() <= 1


# --- with a critic --------------------------------------------------------------------------------


def test_gae_by_hand() -> None:
    # r = 0 0 1, V = .5 .6 .8, gamma 1, lambda 1/2: deltas .1 .2 .2;
    # A_3 = .2, A_2 = .2 + .1, A_1 = .1 + .15.
    rewards, values, mask = t([0, 0, 1]), t([0.5, 0.6, 0.8]), torch.ones(1, 3).bool()
    torch.testing.assert_close(gae(rewards, values, mask, lam=0.5), t([0.25, 0.3, 0.2]))
    # gamma 1/2: deltas -.2 -.2 .2, decay 1/4: A_2 = -.15, A_1 = -.2375.
    got = gae(rewards, values, mask, lam=0.5, gamma=0.5)
    torch.testing.assert_close(got, t([-0.2375, -0.15, 0.2]))
    # lambda 1: the return minus the value. lambda 0: the one-step form.
    torch.testing.assert_close(gae(rewards, values, mask, lam=1.0), 1 - values)
    torch.testing.assert_close(gae(rewards, values, mask, lam=0.0), t([0.1, 0.2, 0.2]))


def test_gae_bridges_masked_gaps() -> None:
    # A tool's output between the second and the third token changes nothing, whatever stands there.
    rewards, values = t([0, 0, math.nan, 9, 1]), t([0.5, 0.6, math.nan, 7, 0.8])
    mask = torch.tensor([[1, 1, 0, 0, 1]]).bool()
    torch.testing.assert_close(gae(rewards, values, mask, lam=0.5), t([0.25, 0.3, 0, 0, 0.2]))


def test_gae_length_adaptive_lambda() -> None:
    # alpha 1/2: four tokens have lambda 1 - 1/2 = 1/2; two have 1 - 1 = 0; one has none below 0.
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    last = t([0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0])
    got = gae(last, torch.zeros(3, 4).double(), mask, length_adaptive=0.5)
    torch.testing.assert_close(got, t([0.125, 0.25, 0.5, 1], [0, 1, 0, 0], [1, 0, 0, 0]))
    # In the precision of the rewards: 1 - 1 / (.9 * 4) to the last digits, not to float32's seven.
    got = gae(last[:1], torch.zeros(1, 4).double(), mask[:1], length_adaptive=0.9)
    assert abs(got[0, 2].item() - (1 - 1 / 3.6)) < 1e-15


def test_value_loss_is_clipped_pessimistically() -> None:
    # V = 2, R = 0, V_old = .5: (2^2) / 2 = 2. Clipped to .5 + .2 = .7: smaller, so 2 stays.
    # V = 2, R = 3, V_old = .5: 1/2 unclipped; .7 is worse: 2.3^2 / 2.
    values = t([2.0, 2.0]).requires_grad_()
    old, returns = t([0.5, 0.5]), t([0.0, 3.0])
    assert value_loss(values, old, returns).tolist() == [[2.0, 0.5]]
    clipped = value_loss(values, old, returns, clip_value=0.2)
    assert clipped[0].tolist() == pytest.approx([2.0, 2.3**2 / 2])
    assert torch.autograd.grad(clipped.sum(), values)[0].tolist() == [[2.0, 0.0]]
    assert gradcheck(lambda x: value_loss(x, old, returns), values)
