"""Mistakes that other implementations make or document, each with a test that would notice."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.config.algorithm import build_algorithm
from covey.config.contradictions import contradictions
from covey.learner.advantage import with_advantages
from covey.learner.batching import collate
from covey.objective import advantages, corrections, penalties, reductions, surrogates, token_weights
from covey.objective.algorithms import PRESETS
from covey.objective.axis_function import bind
from covey.objective.data import LossInputs
from covey.objective.dialects import DIALECTS
from covey.objective.loss import policy_loss
from covey.objective.penalties import KL
from covey.objective.preference import ipo
from covey.objective.reductions import Totals
from tests.fakes import group
from tests.objective.inputs import algorithm, made_inputs, t

GRPO = replace(PRESETS["grpo"], kl=None)


def textbook_zscore(rewards: Tensor, eps: float) -> Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + eps)


@pytest.mark.parametrize("eps", [1e-4, 1e-6, 1e-8])
def test_rounding_of_equal_rewards_is_not_a_signal(eps: float) -> None:
    # The textbook makes an advantage of it: somewhere among these groups, growing as eps shrinks.
    groups = [torch.full((size,), value) for size in range(2, 20) for value in (0.1, 0.3, 0.7, 1.1)]
    assert max(float(textbook_zscore(g, eps).abs().max()) for g in groups) > 1e-4
    assert not any(advantages.group_zscore(g, eps=eps).any() for g in groups)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_multiplying_by_the_mask_does_not_remove_garbage(garbage: float) -> None:
    inputs = made_inputs(advantages=t([1, 1], [-2, garbage]), old_logprobs=t([-1, -2], [-3, garbage]))
    assert not (inputs.mask * torch.tensor([[1.0, 1.0], [1.0, garbage]])).isfinite().all()
    assert policy_loss(algorithm(), inputs).total == policy_loss(algorithm(), made_inputs()).total


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_exp_of_a_far_log_ratio_overflows(advantage: float) -> None:
    def textbook(logprobs: Tensor) -> Tensor:
        ratio = logprobs.exp()
        return -(ratio * advantage).minimum(ratio.clamp(0.8, 1.2) * advantage)

    logprobs = torch.tensor([[100.0]], requires_grad=True)
    loss = textbook(logprobs)
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    assert not (loss.isfinite().all() and slope.isfinite().all())

    totals = Totals(tokens=1, completions=1, prompts=1, max_tokens=1)
    one = torch.ones(1, 1)
    inputs = LossInputs(logprobs, one.bool(), advantage * one, 0 * one, totals, torch.ones(1))
    loss = policy_loss(GRPO, inputs).total
    (slope,) = torch.autograd.grad(loss, logprobs)
    assert loss.isfinite() and slope.isfinite().all()


def test_a_mean_over_local_tokens_depends_on_the_micro_batches() -> None:
    # Two micro-batches of 3 and 1 tokens with sums 3 and 2: means 1 and 2 average to 1.5, not 5/4.
    local = (3 / 3 + 2 / 1) / 2
    totals = Totals(tokens=4, completions=2, prompts=1, max_tokens=9)
    weight = reductions.token_mean(torch.tensor([3.0, 1.0]), totals)
    assert float((weight * torch.tensor([3.0, 2.0])).sum()) == 1.25 != local


def test_untrained_completions_are_not_counted() -> None:
    # One of two completions is cut and masked: the other keeps weight 1 instead of 1/2.
    cut = group([1.0, 0.0])
    completions = tuple(
        replace(c, finish=f) for c, f in zip(cut.completions, ("stop", "length"), strict=True)
    )
    batch = collate([replace(cut, completions=completions)], mask_truncated=True)
    totals = batch.totals(9)
    assert (totals.completions, totals.tokens, totals.prompts) == (1, 3, 1)
    assert reductions.sequence_mean(batch.mask.sum(-1).float(), totals)[0] == pytest.approx(1 / 3)


def test_the_cap_of_cispo_bounds_the_ratio_itself() -> None:
    # Elsewhere eps_high .2 may mean a cap of .2 on every weight, on-policy ones included.
    on_policy = torch.ones(1, 1)
    assert surrogates.cispo(on_policy, on_policy, on_policy) == -1
    assert contradictions(build_algorithm({"name": "cispo", "surrogate": {"cap": 0.2}}), 8, 1)


def test_a_clip_setting_has_its_effect_and_dual_clip_is_off_unless_asked_for() -> None:
    ratio, down = torch.tensor([[9.0]]), torch.tensor([[-1.0]])
    assert surrogates.clip(ratio, down) == 9
    narrow = build_algorithm({"name": "grpo", "surrogate": {"clip_low": 0.1, "clip_high": 0.1}}).surrogate
    assert narrow.function(ratio, -down, **narrow.settings).item() == pytest.approx(-1.1)


def test_ipo_summed_and_averaged_are_different_losses() -> None:
    one = torch.ones(1)
    arguments = (-1 * one, -9 * one, -7 * one, -5 * one, 3 * one, 2 * one)
    assert ipo(*arguments, level="summed") != ipo(*arguments, level="averaged")


def test_gdpo_over_tokens_turns_a_sign_that_gdpo_over_samples_keeps() -> None:
    # Centred 5/8, 1/8, -3/8, -3/8 with 4, 30, 1 and 1 tokens: their mean is 0 by completion, but by token
    # (20/8 + 30/8 - 6/8) / 36 = .153, and the second completion, better than average, is pushed down.
    groups = [group([1.0, 0.5, 0.0, 0.0], [4, 30, 1, 1])]
    samples, tokens = (
        with_advantages(collate(groups), groups, algorithm).advantages[:, 0].sign().tolist()
        for algorithm in (PRESETS["gdpo"], DIALECTS["verl-0.9.1"].algorithm("gdpo"))
    )
    assert samples == [1, 1, -1, -1]
    assert tokens == [1, -1, -1, -1]


def test_a_group_of_one_gets_nothing_and_not_its_raw_reward() -> None:
    alone = [group([5.0])]
    for name in ("grpo", "dr_grpo", "opo", "gdpo", "max_rl"):
        plain = replace(PRESETS[name], kl=None)
        assert not with_advantages(collate(alone), alone, plain).advantages.any(), name
    rloo = replace(PRESETS["rloo"], kl=None)
    assert not with_advantages(collate(alone), alone, rloo).advantages.any()


def test_groups_need_not_be_contiguous() -> None:
    groups = [group([1.0, 0.0], name="a"), group([5.0, 9.0], name="b")]
    batch = collate(groups)
    interleaved = batch.select([0, 2, 1, 3])
    got = with_advantages(interleaved, groups, PRESETS["dr_grpo"]).advantages[:, 0]
    assert got.tolist() == [0.5, -2.0, -0.5, 2.0]
    # A reshape to (prompts, G) would have compared 1 with 5 and 0 with 9.
    assert got.tolist() != (interleaved.rewards.view(2, 2) - 4).flatten().tolist()


def test_a_sequence_mask_drops_long_answers_and_a_geometric_one_does_not() -> None:
    mismatch = torch.full((2, 40), math.log(1.05))
    mask = torch.arange(40) < torch.tensor([[5], [40]])
    mismatch = mismatch.where(mask, 0.0)
    by_sequence = corrections.masked(mismatch, low=1 / 3, high=3.0, level="sequence")[:, 0] > 0
    by_mean = corrections.geometric_mask(mismatch, mask, low=0.9, high=1.1)[:, 0] > 0
    assert by_sequence.tolist() == [True, False]
    assert by_mean.tolist() == [True, True]


def test_deepseekmath_does_state_its_settings() -> None:
    assert "group 64" in PRESETS["grpo"].paper
    assert PRESETS["grpo"].kl == KL(bind(penalties.k3), coef=0.04)


def test_weighing_k3_by_the_ratio_changes_the_gradient_even_on_policy() -> None:
    reference = t([-1, -2], [-3, 0]) - 0.5
    slopes = []
    for mode in ("formula", "ratio"):
        inputs = made_inputs(old_logprobs=made_inputs().logprobs.detach(), ref_logprobs=reference)
        chosen = algorithm(kl=KL(coef=1.0, gradient=mode))
        slopes.append(torch.autograd.grad(policy_loss(chosen, inputs).total, inputs.logprobs)[0])
    assert not torch.allclose(*slopes)
    assert PRESETS["grpo"].kl is not None and PRESETS["grpo"].kl.gradient == "formula"


@pytest.mark.parametrize(("trainer_over_sampler", "kept"), [(0.8, 1.0), (1.3, 0.0)])
def test_filter_bounds_are_for_trainer_over_sampler(trainer_over_sampler: float, kept: float) -> None:
    mismatch = torch.tensor([[math.log(trainer_over_sampler)]])
    assert corrections.geometric_mask(mismatch, torch.ones(1, 1).bool(), low=0.5, high=1.2) == kept


def test_an_entropy_mask_leaves_the_denominator_alone() -> None:
    # One of three tokens is selected: its loss -1 weighs 1/6 of the step's six tokens, not 1/1.
    selected = torch.tensor([[False, True], [False, False]])
    chosen = algorithm(token_weights=(bind(token_weights.selected_only),), reduce=bind(reductions.token_mean))
    assert policy_loss(chosen, made_inputs(selected=selected)).total.item() == pytest.approx(-1 / 6)


def test_the_std_of_rewards_holds_the_spread_between_prompts_too() -> None:
    # Rewards 0 1 and 10 11: centred +-1/2, sample std sqrt(4/4/3) = .577; raw sample std 5.8.
    groups = [group([0.0, 1.0]), group([10.0, 11.0])]
    lite = PRESETS["lite_ppo"]
    of_rewards = with_advantages(collate(groups), groups, lite).advantages[0, 0]
    centred = replace(lite, whiten=bind(advantages.batch_std, of="advantages", eps=0.0))
    of_advantages = with_advantages(collate(groups), groups, centred).advantages[0, 0]
    assert float(of_advantages) == pytest.approx(-0.5 / math.sqrt(1 / 3))
    raw = float(np.std([0, 1, 10, 11], ddof=1))
    assert float(of_rewards) == pytest.approx(-0.5 / (raw + 1e-4))


def test_dr_grpo_is_both_of_its_changes() -> None:
    assert PRESETS["dr_grpo"].advantage == bind(advantages.group_centered)
    assert PRESETS["dr_grpo"].reduce == bind(reductions.constant_length)
    # Its point: a long wrong answer weighs as much by token as a short one.
    lengths, totals = torch.tensor([2.0, 200.0]), Totals(202, 2, 1, 1000)
    constant, mean = reductions.constant_length(lengths, totals), reductions.sequence_mean(lengths, totals)
    assert constant[0] == constant[1]
    assert mean[0] == pytest.approx(100 * float(mean[1]))


@pytest.mark.parametrize(("rate", "weight"), [(0.05, 4.59), (0.5, 2.0)])
def test_dividing_by_the_std_prefers_very_easy_and_very_hard_prompts(rate: float, weight: float) -> None:
    # 1 / sqrt(p (1 - p)), the population std of 0 and 1.
    rewards = (torch.arange(20) < 20 * rate).double()
    ratio = advantages.group_zscore(rewards, ddof=0, eps=0.0) / advantages.group_centered(rewards)
    assert ratio.tolist() == pytest.approx([weight] * 20, abs=5e-3)
