"""Worked examples of published explainers, with the numbers they print."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.objective import penalties, reductions
from covey.objective.advantages import group_centered, group_zscore, standard_deviation
from covey.objective.algorithms import PRESETS
from covey.objective.axis_function import bind
from covey.objective.credit import prefix_values, process_zscore
from covey.objective.data import LossInputs
from covey.objective.loss import policy_loss
from covey.objective.penalties import KL
from covey.objective.reductions import Totals
from covey_verify.mathematics.answers import math_answer
from covey_verify.types import StepRewards


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def printed(values: Tensor, digits: int = 2) -> list[float]:
    return [round(v, digits) for v in values.tolist()]


def test_apples_and_oranges() -> None:
    assert math_answer("so the total is \\boxed{$6.00}", str(6 * 0.50 + 4 * 0.75)).value == 1.0
    rewards = t(1, 0, 1, 0, 1, 1, 0, 1)
    assert rewards.mean() == 0.625
    assert printed(standard_deviation(rewards, 0), 3) == [0.484]
    up, down = 0.77, -1.29
    assert printed(group_zscore(rewards, ddof=0, eps=1e-8)) == [up, down, up, down, up, up, down, up]


def test_six_cards_with_four_right() -> None:
    assert math_answer("\\boxed{13}", str(3 + 5 * 2)).value == 1.0
    rewards = t(1, 1, 0, 1, 0, 1)
    assert round(float(rewards.mean()), 3) == 0.667
    assert printed(standard_deviation(rewards, 0), 3) == [0.471]


def test_tickets() -> None:
    assert 12 * 5 + 8 * (9 - 5) == 92
    rewards = t(*[math_answer(f"\\boxed{{{a}}}", "5").value or 0.0 for a in (5, 6, 5, 4)])
    assert rewards.tolist() == [1, 0, 1, 0]
    assert printed(standard_deviation(rewards, 1), 3) == [0.577]
    assert printed(standard_deviation(rewards, 0), 3) == [0.5]
    assert printed(group_zscore(rewards, ddof=1, eps=0.0), 3) == [0.866, -0.866, 0.866, -0.866]
    assert printed(group_zscore(rewards, ddof=0, eps=0.0), 3) == [1, -1, 1, -1]


def test_seven_is_good_among_fives_and_bad_among_eights() -> None:
    among_fives, among_eights = t(7, 4, 5, 4), t(7, 8, 8, 9)
    assert (float(among_fives.mean()), float(among_eights.mean())) == (5, 8)
    # (7 - 5) / sqrt(6 / 3) and (7 - 8) / sqrt(2 / 3): no weak negative, its group hardly differs.
    assert float(group_zscore(among_fives, eps=0.0)[0]) == pytest.approx(2 / math.sqrt(2))
    assert float(group_zscore(among_eights, eps=0.0)[0]) == pytest.approx(-1 / math.sqrt(2 / 3))


def test_rescaled_rewards_have_the_same_zscores() -> None:
    plain, scaled = t(0, 1, 1, 0), t(0, 100, 100, 0)
    torch.testing.assert_close(group_zscore(plain, eps=0.0), group_zscore(scaled, eps=0.0))
    torch.testing.assert_close(100 * group_centered(plain), group_centered(scaled))


def test_two_safe_and_two_unsafe_answers() -> None:
    rewards = t(1, 1, 0, 0)
    assert rewards.mean() == 0.5
    assert group_centered(rewards).tolist() == [0.5, 0.5, -0.5, -0.5]
    # All begin alike (token 1), then commit: the value of the prefix tells a safe one from an unsafe one.
    values = prefix_values(rewards, torch.tensor([[1, 2, 5], [1, 2, 6], [1, 3, 5], [1, 3, 6]]))
    assert values.tolist() == [[0.5, 0.5, 1, 1]] * 2 + [[0.5, 0.5, 0, 0]] * 2


def test_a_mistake_at_the_last_of_four_steps() -> None:
    steps = [StepRewards([1, 1, 1, -1], [0, 1, 2, 3]), StepRewards([1, 1, 1, 1], [0, 1, 2, 3])]
    every = t(1, 1, 1, -1, 1, 1, 1, 1)
    assert every.mean() == 0.75 and printed(standard_deviation(every, 0), 3) == [0.661]
    credit = {
        how: process_zscore(t([0, 0]), t(1), torch.ones(2, 4).bool(), [steps], credit=how, ddof=0, eps=0.0)
        for how in ("sum_to_go", "own_step", "min_form")
    }
    # As the paper sums, correct steps before the failure are punished; by own step they are not.
    assert printed(credit["sum_to_go"][0]) == [-1.51, -1.89, -2.27, -2.65]
    assert printed(credit["own_step"][0]) == [0.38, 0.38, 0.38, -2.65]
    assert printed(credit["min_form"][0]) == [-2.65] * 4


def test_four_sliders() -> None:
    assert group_zscore(t(0.4, 0.4, 0.4, 0.4), eps=1e-6).tolist() == [0, 0, 0, 0]
    assert printed(group_zscore(t(1, 0, 0, 0), eps=1e-6)) == [1.5, -0.5, -0.5, -0.5]


# --- their code samples, rewritten as references --------------------------------------------------

RNG = np.random.default_rng(11)
MASK = torch.arange(7) < torch.tensor([[7], [3], [5], [6], [1], [7], [4], [2]])
OLD, NEW, REF = (torch.from_numpy(RNG.normal(-1, 0.3, MASK.shape)) for _ in range(3))
REWARDS = t(1, 0, 0.5, 0, 1, 1, 0, 0.25)
TOTALS = Totals(tokens=int(MASK.sum()), completions=8, prompts=2, max_tokens=7)


def first_advantages(rewards: Tensor, size: int, eps: float = 1e-4, divide: bool = True) -> Tensor:
    table = rewards.reshape(-1, size)
    out = table - table.mean(1, keepdim=True)
    return (out / (table.std(1, keepdim=True) + eps) if divide else out).flatten()


def first_loss(new: Tensor, old: Tensor, ref: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    ratio, a = (new - old).exp(), a.unsqueeze(1)
    gain = torch.min(ratio * a, ratio.clip(0.8, 1.2) * a)
    kl = (ref - new).exp() - (ref - new) - 1
    return -(((gain - 0.04 * kl) * mask).sum(1) / mask.sum(1)).mean()


def by_group(function, **settings) -> Tensor:
    return torch.cat([function(r, **settings) for r in REWARDS.split(4)])


def our_inputs(of_completions: Tensor) -> LossInputs:
    a = of_completions[:, None].expand(MASK.shape)
    return LossInputs(NEW, MASK, a, OLD, TOTALS, torch.ones(8), ref_logprobs=REF)


def test_a_published_grpo_loss_with_k3_and_clip() -> None:
    torch.testing.assert_close(first_advantages(REWARDS, 4), by_group(group_zscore, ddof=1, eps=1e-4))
    torch.testing.assert_close(first_advantages(REWARDS, 4, divide=False), by_group(group_centered))
    a = first_advantages(REWARDS, 4)
    got = policy_loss(PRESETS["grpo"], our_inputs(a)).total
    torch.testing.assert_close(got, first_loss(NEW, OLD, REF, a, MASK), rtol=1e-13, atol=0)


def test_a_published_zscore_with_the_population_std() -> None:
    rewards = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    theirs = [(r - np.mean(rewards)) / (np.std(rewards) + 1e-8) for r in rewards]
    assert group_zscore(t(*rewards), ddof=0, eps=1e-8).tolist() == pytest.approx(theirs, rel=1e-13)


def test_a_published_grpo_loss_with_the_kl_as_a_term_of_its_own() -> None:
    # One group of K rollouts; the KL term with its own weight and the same aggregation.
    beta, rewards, rows = 0.02, REWARDS[:4], slice(0, 4)
    a = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    ratio = (NEW[rows] - OLD[rows]).exp()
    spread = a.unsqueeze(-1).expand_as(ratio)
    by_token = -torch.min(ratio * spread, ratio.clamp(0.8, 1.2) * spread) * MASK[rows]
    lengths = MASK[rows].sum(-1)
    k3 = (REF - NEW)[rows].exp() - 1 - (REF - NEW)[rows]
    loss = (by_token.sum(-1) / lengths).mean() + (beta * (k3 * MASK[rows]).sum(-1) / lengths).mean()

    torch.testing.assert_close(a, group_zscore(rewards, ddof=1, eps=1e-6))
    inputs = our_inputs(torch.cat([a, torch.zeros(4)]))
    own = replace(inputs, mask=MASK & (torch.arange(8) < 4)[:, None], totals=Totals(0, 4, 1, 7))
    ours = policy_loss(replace(PRESETS["grpo"], kl=KL(bind(penalties.k3), coef=beta)), own).total
    torch.testing.assert_close(ours, loss, rtol=1e-13, atol=0)


def test_a_published_formula_with_a_token_mean_and_k1() -> None:
    # Averaged over all tokens, the KL as the plain log-ratio.
    a, beta = by_group(group_zscore, eps=0.0), 0.1
    ratio = (NEW - OLD).exp()
    policy = -torch.min(ratio * a[:, None], ratio.clamp(0.8, 1.2) * a[:, None])
    loss = ((policy + beta * (NEW - REF)) * MASK).sum() / MASK.sum()
    chosen = replace(
        PRESETS["grpo"], kl=KL(bind(penalties.k1), coef=beta), reduce=bind(reductions.token_mean)
    )
    torch.testing.assert_close(policy_loss(chosen, our_inputs(a)).total, loss, rtol=1e-13, atol=0)
