"""Metrics by hand: computed beside the loss, of the algorithm's own ratio."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from covey.objective import corrections, penalties, ratios
from covey.objective.algorithms import PRESETS
from covey.objective.axis_function import bind
from covey.objective.diagnostics import (
    correlations,
    gradient_coefficient,
    gradient_shares,
    group_metrics,
    step_spread,
    token_metrics,
    token_record,
    token_stats,
    verdict_agreement,
)
from covey.objective.loss import policy_loss
from covey.objective.penalties import KL
from covey.objective.texts import text_metrics
from covey.types import Group
from covey_verify.types import StepRewards
from tests.fakes import component, group
from tests.objective.inputs import algorithm, made_inputs, t


def seen(chosen, inputs) -> dict[str, float]:
    return token_metrics([token_stats(chosen, inputs, policy_loss(chosen, inputs))], chosen)


def test_clip_shares_count_trained_tokens() -> None:
    # Ratios 3/2 (A > 0, clipped), 1, 1/2 (A < 0, clipped): a third each; both are silent.
    metrics = seen(algorithm(), made_inputs())
    assert metrics["clip/high"] == pytest.approx(1 / 3)
    assert metrics["clip/low"] == pytest.approx(1 / 3)
    assert metrics["clip/zero_gradient"] == pytest.approx(2 / 3)
    assert metrics["ratio/mean"] == pytest.approx(1.0)
    assert metrics["ratio/q50"] == pytest.approx(1.0)
    assert metrics["ratio/effective_sample"] == pytest.approx(6 / 7)  # 1 over (9/4 + 1 + 1/4) / 3
    assert math.isnan(metrics["entropy"])


def test_clipping_is_seen_in_the_algorithms_own_ratio() -> None:
    # The sequence ratio of the first completion is sqrt(3/2) = 1.22 on both its tokens.
    metrics = seen(algorithm(ratio=bind(ratios.sequence)), made_inputs())
    assert metrics["clip/high"] == pytest.approx(2 / 3)
    assert metrics["ratio/q50"] == pytest.approx(math.sqrt(1.5))


def test_tokens_without_advantage_are_not_silenced() -> None:
    metrics = seen(algorithm(), made_inputs(advantages=t([0, 0], [-2, 0])))
    assert metrics["clip/zero_gradient"] == pytest.approx(1 / 3)


def test_mismatch_and_importance_correction() -> None:
    # Mismatches .5, 0 and 1; trainer / sampler 1.65, 1, 2.72; IcePop to [.5, 2] drops the last.
    inputs = made_inputs(sampler_logprobs=t([-1.5, -2], [-4, 9]))
    metrics = seen(algorithm(correction=(bind(corrections.masked, low=0.5, high=2.0),)), inputs)
    assert metrics["mismatch/mean"] == pytest.approx(0.5)
    assert metrics["mismatch/max"] == pytest.approx(1.0)
    assert metrics["correction/zero"] == pytest.approx(1 / 3)
    assert metrics["correction/mean"] == pytest.approx((math.exp(0.5) + 1) / 3)
    assert "correction/mean" not in seen(algorithm(), inputs)


def test_kl_and_loss_parts() -> None:
    inputs = made_inputs(ref_logprobs=t([-1, -2], [-3, 0]), entropy=t([1, 2], [6, 99]))
    chosen = algorithm(kl=KL(bind(penalties.k3), coef=0.5))
    metrics = seen(chosen, inputs)
    k1 = [math.log(1.5), 0, -math.log(2)]
    k3 = [math.exp(-d) + d - 1 for d in k1]
    assert metrics["kl/token_k1"] == pytest.approx(sum(k1) / 3)
    assert metrics["kl/token_k3"] == pytest.approx(sum(k3) / 3)
    assert metrics["kl/completion_k1"] == pytest.approx(sum(k1) / 2)
    assert metrics["entropy"] == pytest.approx(3.0)
    loss = policy_loss(chosen, inputs)
    assert metrics["loss"] == pytest.approx(loss.total.item())
    assert metrics["policy_loss"] == pytest.approx(loss.policy.item())
    assert metrics["kl_loss"] == pytest.approx(loss.kl.item())


def test_observations_of_a_step_are_joined() -> None:
    chosen, inputs = algorithm(), made_inputs()
    one = token_stats(chosen, inputs, policy_loss(chosen, inputs))
    two = token_metrics([one, one], chosen)
    assert two["loss"] == pytest.approx(2 * token_metrics([one], chosen)["loss"])
    assert two["clip/high"] == pytest.approx(1 / 3)
    assert token_metrics([], chosen) == {}


def test_what_updates_saw_is_written_down_at_its_token() -> None:
    chosen, inputs = algorithm(), made_inputs()
    loss = policy_loss(chosen, inputs)
    first = replace(token_stats(chosen, inputs, loss), origin=torch.tensor([2, 0]))
    again = replace(first, ratio=first.ratio + 1)
    lengths = inputs.mask.sum(-1).tolist()
    places = [lengths[1], 4, lengths[0]]  # the second completion of the rollout batch took part in no update
    record = token_record([first, again], places)
    ratios = np.split(record["ratios"], np.cumsum(places)[:-1])
    np.testing.assert_allclose(ratios[2], first.ratio[0, : places[2]] + 1)
    np.testing.assert_allclose(ratios[0], first.ratio[1, : places[0]] + 1)
    assert np.isnan(ratios[1]).all()
    # The gradient of the loss itself, twice: both updates pushed.
    logprobs = inputs.logprobs.detach().requires_grad_()
    policy_loss(replace(chosen, kl=None), replace(inputs, logprobs=logprobs)).total.backward()
    applied = np.split(record["applied"], np.cumsum(places)[:-1])
    np.testing.assert_allclose(applied[2], -2 * logprobs.grad[0, : places[2]], atol=1e-7)


def test_observing_leaves_the_gradient_alone() -> None:
    chosen, inputs = algorithm(), made_inputs()
    loss = policy_loss(chosen, inputs)
    loss.total.backward()
    token_stats(chosen, inputs, loss)
    assert not gradient_coefficient(chosen, inputs).requires_grad


def test_group_metrics_count_dead_groups_by_their_kind() -> None:
    groups = [group([1, 1]), group([0, 0, 0]), group([1, 0], [2, 6]), group([math.nan, 1])]
    metrics = group_metrics(groups)
    assert metrics["groups/count"] == 4
    assert metrics["groups/dead"] == 0.75
    assert metrics["groups/dead_correct"] == 0.25
    assert metrics["groups/dead_incorrect"] == 0.25
    assert metrics["groups/effective_completions"] == 2
    assert metrics["reward/mean"] == pytest.approx(4 / 8)
    assert metrics["reward/std"] == pytest.approx(0.5)
    assert metrics["reward/unscored"] == pytest.approx(1 / 9)
    assert metrics["reward/answer/mean"] == pytest.approx(4 / 8)
    assert metrics["accuracy"] == pytest.approx(4 / 9)
    assert metrics["length/correct"] == pytest.approx((3 + 3 + 2 + 3) / 4)
    assert metrics["length/incorrect"] == pytest.approx((3 * 3 + 6 + 3) / 5)
    assert metrics["length/mean"] == pytest.approx((3 * 7 + 2 + 6) / 9)
    assert metrics["length/truncated"] == 0


def test_a_mean_of_nothing_is_missing() -> None:
    """Not 0, which would be a length of incorrect completions that there are not, a reward nobody gave."""
    solved, failed = group_metrics([group([1, 1])]), group_metrics([group([math.nan, math.nan])])
    assert {k for k, v in solved.items() if math.isnan(v) and "stderr" not in k} == {
        "length/incorrect",
        "text/reflection/incorrect",
    }
    assert {k for k, v in failed.items() if math.isnan(v) and "stderr" not in k} == {
        *("length/correct", "text/reflection/correct"),
        *("reward/mean", "reward/std", "reward/answer/mean", "reward/answer/std"),
    }
    assert (failed["reward/unscored"], failed["accuracy"]) == (1, 0)


def test_rewards_are_correlated_where_both_judged_and_both_vary() -> None:
    x, nan = np.array([0, 1, 2, 3.0]), math.nan
    found = correlations({"x": x, "same": 2 * x + 1, "against": -x, "flat": np.ones(4)})
    assert found == pytest.approx(
        {
            "reward/correlation/same/x": 1,
            "reward/correlation/against/x": -1,
            "reward/correlation/against/same": -1,
        }
    )
    # Where both judged, (1, 0), (2, 1), (3, 0): cov 0. Where they never did, nothing.
    assert correlations({"x": x, "y": np.array([nan, 0, 1, 0])}) == {
        "reward/correlation/x/y": pytest.approx(0)
    }
    assert correlations({"x": np.array([0, 1, nan, nan]), "y": np.array([nan, nan, 0, 1.0])}) == {}


def test_what_mixes_scripts_has_a_standard_error_by_group() -> None:
    def written(text: str) -> Group:
        plain = group([0, 0])
        return replace(plain, completions=tuple(replace(c, text=text) for c in plain.completions))

    metrics = group_metrics([written("so we say 答案"), written("so we say"), written("答案"), written("")])
    assert metrics["text/mixed_scripts"] == 0.25
    assert metrics["text/mixed_scripts/stderr"] == pytest.approx(math.sqrt(0.25 * 0.75 / 3)), (
        "four, not eight"
    )


def test_a_reward_is_held_against_the_verdict_within_groups() -> None:
    nan = math.nan
    # Group a: correct 1, incorrect 0 and 1: one ranked right, one tie. Group b: the other way round.
    one, other = (group(v, name=n) for v, n in (([1, 0, 0], "a"), ([1, 0], "b")))
    judged = [
        replace(one, components={**one.components, "model": component([1, 0, 1])}),
        replace(other, components={**other.components, "model": component([-5, 5])}),
    ]
    assert verdict_agreement(judged, "model") == pytest.approx((1 + 0.5 + 0) / 3)
    assert verdict_agreement(judged[:1], "model") == pytest.approx(0.75)
    metrics = group_metrics(judged)
    assert metrics["reward/model/agreement"] == pytest.approx(0.5)
    assert "reward/answer/agreement" not in metrics
    unsure = replace(one, components={**one.components, "model": component([nan, 0, 1])})
    assert math.isnan(verdict_agreement([unsure], "model"))


def test_gradient_shares_by_pass_rate() -> None:
    # Pass rates 1/2 and 3/4: buckets [.5, .75) and [.75, 1]; masses 1 + 1 and 3 + 1 + 1 + 1.
    groups = [group([1, 0]), group([1, 1, 1, 0])]
    shares = gradient_shares(groups, np.array([1, 1, 1, 1, 1, 3.0]))
    assert shares["gradient_share/pass_rate_0.50_0.75"] == pytest.approx(0.25)
    assert shares["gradient_share/pass_rate_0.75_1.00"] == pytest.approx(0.75)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert gradient_shares(groups, np.zeros(6)) == {}


def test_text_metrics() -> None:
    texts = ["Wait, let me check.", "hello мир", "a b c d a b c d", "a b c d a b c d"]
    metrics = text_metrics(texts, np.array([True, False, False, False]))
    assert metrics["text/reflection"] == pytest.approx(2 / 4)
    assert metrics["text/reflection/correct"] == 2
    assert metrics["text/reflection/incorrect"] == 0
    assert metrics["text/reflection/doubt"] == metrics["text/reflection/check"] == pytest.approx(1 / 4)
    assert metrics["text/reflection/alternative"] == metrics["text/reflection/correction"] == 0
    assert metrics["text/mixed_scripts"] == pytest.approx(1 / 4)
    # Windows of four words: abcd bcda cdab dabc abcd, one of five repeated, in two texts of four.
    assert metrics["text/repetition"] == pytest.approx(0.2 * 2 / 4)
    assert metrics["text/duplicates"] == pytest.approx(1 / 4)


@pytest.mark.parametrize("name", [n for n, a in PRESETS.items() if not a.whole_groups])
def test_on_policy_every_preset_pushes_by_its_advantage(name: str) -> None:
    # On-policy it is the advantage, times the masks; a mean over tokens for ratios of sequences.
    chosen = replace(PRESETS[name], token_weights=(), kl=None)
    inputs = made_inputs(logprobs=t([-1, -2], [-3, 0]), selected=torch.tensor([[True, False], [True, False]]))
    inputs = replace(inputs, old_logprobs=inputs.logprobs)
    expected = t([1, 1], [-2, 0])
    if chosen.ratio.name == "completion" and chosen.surrogate.name != "vespo":
        expected = t([2, 2], [-2, 0])
    torch.testing.assert_close(gradient_coefficient(chosen, inputs), expected)


def test_how_evenly_steps_split() -> None:
    # Two steps of 2 and 6 tokens; one whole of 4; one that was not judged by step.
    steps = (StepRewards([1, 0], [1, 7]), StepRewards([1], [3]), StepRewards([], []))
    found = step_spread([replace(group([1, 0, 1]), components={"judge": component([1, 0, 1], steps=steps)})])
    assert found == {
        "steps/count": 1.5,
        "steps/tokens": 4.0,
        "steps/longest": pytest.approx((6 / 8 + 1) / 2),
        "steps/unsplit": 0.5,
    }
    assert step_spread([group([1, 0])]) == {}
