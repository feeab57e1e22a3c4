"""The loss of a micro-batch: axes evaluated once, by name, with the totals of the step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from covey.objective import corrections, penalties, ratios, reductions, surrogates, token_weights
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axis_function import AxisFunction, bind
from covey.objective.data import LossInputs
from covey.objective.diagnostics import gradient_coefficient
from covey.objective.loss import penalty, policy_loss, token_terms
from covey.objective.penalties import KL, Entropy
from covey_verify.errors import CoveyError
from tests.objective.inputs import LOG, TOTALS, algorithm, made_inputs, t
from tests.objective.table import evaluated, inputs_of, leaves, made_batch, made_groups


def test_grpo_by_hand() -> None:
    # Tokens: -min(1.5, 1.2) = -1.2; -1; and A = -2, rho = 1/2: -min(-1, -1.6) = 1.6.
    # By sequence: (-1.2 - 1) / 2 / 4 + 1.6 / 1 / 4. Gradient: only the second token is unclipped: -1/8.
    inputs = made_inputs()
    loss = policy_loss(algorithm(), inputs)
    assert loss.total.item() == pytest.approx(-2.2 / 8 + 1.6 / 4)
    loss.total.backward()
    (slope,) = torch.autograd.grad(policy_loss(algorithm(), x := made_inputs()).total, x.logprobs)
    torch.testing.assert_close(slope, t([0, -1 / 8], [0, 0]))


def test_every_reduction_uses_the_totals_of_the_step() -> None:
    values = [-1.2, -1.0, 1.6]
    expected = {
        reductions.token_mean: sum(values) / 6,
        reductions.sequence_mean: (values[0] + values[1]) / 2 / 4 + values[2] / 4,
        reductions.sequence_sum: sum(values) / 4,
        reductions.constant_length: sum(values) / 40,
        reductions.prompt_mean: sum(values) / 3 / 2,
    }
    for reduce, value in expected.items():
        got = policy_loss(algorithm(reduce=bind(reduce)), made_inputs()).total
        assert got.item() == pytest.approx(value), reduce


def test_kl_and_entropy_share_the_reduction_and_are_reported_apart() -> None:
    # d = log pi - log ref = log 2 everywhere: k3 = log 2 - 1/2; entropy 3 everywhere. Token weight 1/6.
    inputs = made_inputs(entropy=t([3, 3], [3, 99]))
    inputs = replace(inputs, ref_logprobs=inputs.logprobs - LOG(2))
    chosen = algorithm(kl=KL(coef=0.5), entropy=Entropy(coef=0.1), reduce=bind(reductions.token_mean))
    loss = policy_loss(chosen, inputs)
    k3 = LOG(2) - 0.5
    assert loss.policy.item() == pytest.approx(-0.6 / 6)
    assert loss.kl.item() == pytest.approx(k3 / 2)
    assert loss.entropy.item() == pytest.approx(1.5)
    assert loss.total.item() == pytest.approx(-0.6 / 6 + 0.5 * k3 / 2 - 0.1 * 1.5)
    steered = policy_loss(chosen, inputs, kl_coef=2.0, entropy_coef=0.0).total
    assert steered.item() == pytest.approx(-0.6 / 6 + 2 * k3 / 2)


def test_factors_multiply_the_policy_term_alone_and_are_detached() -> None:
    inputs = made_inputs(sampler_logprobs=t([-1 - LOG(2), -2], [-3, 0]))
    inputs = replace(inputs, ref_logprobs=inputs.logprobs - LOG(2))
    chosen = algorithm(kl=KL(coef=1.0), correction=(bind(corrections.decoupled),))
    plain, weighted = (policy_loss(a, inputs) for a in (replace(chosen, correction=()), chosen))
    assert weighted.kl == plain.kl
    assert weighted.policy.item() == pytest.approx((-2.4 - 1) / 8 + 1.6 / 4)
    torch.testing.assert_close(weighted.tokens.value, t([-2.4, -1], [1.6, 0]))


def test_a_users_functions_need_not_know_about_padding_or_detaching() -> None:
    def flat(ratio):
        return ratio * 0 + 1.0

    def doubled(logprobs):
        return 2 * logprobs / logprobs.detach().where(logprobs != 0, 1.0)

    # 1 on three trained tokens of the step's six, whatever stands on the padding.
    inputs = made_inputs()
    chosen = algorithm(surrogate=bind(flat), reduce=bind(reductions.token_mean))
    assert policy_loss(chosen, inputs).total.item() == pytest.approx(3 / 6)
    # A factor of 2 that depends on log pi: the value doubles, the gradient doubles and no more.
    chosen = algorithm(token_weights=(bind(doubled),))
    plain, twice = (policy_loss(a, inputs).total for a in (algorithm(), chosen))
    assert twice.item() == pytest.approx(2 * plain.item())
    slopes = [torch.autograd.grad(loss, inputs.logprobs, retain_graph=True)[0] for loss in (plain, twice)]
    torch.testing.assert_close(slopes[1], 2 * slopes[0])


def test_a_penalty_in_the_reward_is_not_in_the_loss() -> None:
    inputs = made_inputs(ref_logprobs=t([-1, -2], [-3, 0]))
    chosen = algorithm(kl=KL(bind(penalties.k1), coef=9.0, place="reward"))
    assert policy_loss(chosen, inputs).total == policy_loss(algorithm(), inputs).total


def test_a_users_estimator_keeps_its_settings() -> None:
    def scaled(ref_log_ratio, *, factor=1.0):
        return ref_log_ratio * factor

    inputs = made_inputs(ref_logprobs=t([-1, -2], [-3, 0]))
    inputs = replace(inputs, ratio=ratios.token(inputs.log_ratio))
    got = penalty(KL(bind(scaled, factor=3.0)), inputs)
    torch.testing.assert_close(got, 3 * t([LOG(1.5), 0], [LOG(0.5), 0]))


def test_the_exact_kl_is_taken_as_it_is() -> None:
    inputs = made_inputs(full_kl=t([1, 2], [3, 99]))
    loss = policy_loss(algorithm(kl=KL(bind(penalties.full), coef=1.0)), inputs)
    assert loss.kl.item() == pytest.approx(1.5 / 4 + 3 / 4)


def test_terms_hold_what_functions_ask_for_by_name() -> None:
    inputs = made_inputs(sampler_logprobs=t([-1.5, -2], [-4, 9]), ref_logprobs=t([-1, -1], [-1, 9]))
    torch.testing.assert_close(inputs.log_ratio, t([LOG(1.5), 0], [LOG(0.5), 0]))
    torch.testing.assert_close(inputs.mismatch, t([0.5, 0], [1, 0]))
    torch.testing.assert_close(inputs.ref_log_ratio, t([LOG(1.5), -1], [-2 + LOG(0.5), 0]))
    assert inputs.lengths.tolist() == [2, 1]
    far = made_inputs(old_logprobs=t([-101, -2], [-3, 0]), sampler_logprobs=t([-1, 98], [-3, 0]))
    assert far.log_ratio[0, 0] == 20 and far.mismatch[0].tolist() == [-20, -20]


def test_choices_are_equal_if_they_compute_the_same() -> None:
    assert bind(surrogates.clip) == bind(surrogates.clip, clip_low=0.2)
    assert bind(surrogates.clip) != bind(surrogates.clip, clip_low=0.1)
    assert bind(surrogates.clip) != bind(surrogates.unclipped)
    assert bind(surrogates.clip) != "clip"
    assert len({bind(surrogates.clip), bind(surrogates.clip, clip_low=0.2)}) == 1
    with pytest.raises(TypeError, match="no setting"):
        AxisFunction(surrogates.clip, {"clip_lo": 0.1})


def test_a_choice_takes_its_data_by_name() -> None:
    data = SimpleNamespace(mask=1, share=2, values=3)
    choice = bind(lambda values, mask, *, share=0.5: (values, mask, share), share=7)
    assert choice(data) == (3, 1, 7)
    assert choice.needs == ("values", "mask")
    assert choice.all_settings == {"share": 7}


def test_a_users_function_that_reduces_by_itself_is_refused() -> None:
    """Torch would expand its mean to every token, and the loss would depend on the micro-batches."""

    def mean_loss(ratio: Tensor, advantages: Tensor) -> Tensor:
        return -(ratio * advantages).mean()

    def by_completion(advantages: Tensor) -> Tensor:
        return advantages.abs().mean(-1)

    with pytest.raises(
        CoveyError, match=r"algorithm.surrogate .*mean_loss returns the shape \(\) where \(2, 2"
    ):
        policy_loss(algorithm(surrogate=bind(mean_loss)), made_inputs())
    with pytest.raises(CoveyError, match=r"algorithm.token_weights .* \(2, 2\) or \(2, 1\) is expected"):
        policy_loss(algorithm(token_weights=(bind(by_completion),)), made_inputs())


# --- what an algorithm needs ----------------------------------------------------------------------


def test_a_bare_function_is_a_choice() -> None:
    mine = Algorithm(lambda rewards: rewards, token_weights=(bind(token_weights.unlikely_only),))
    assert mine.advantage.needs == ("rewards",)
    assert mine.needs_reference is False and mine.skips_idle


@pytest.mark.parametrize(
    ("name", "reference", "old", "skips"),
    [
        ("dapo", False, False, True),
        ("grpo", True, False, False),  # a KL in the loss pulls idle completions too
        ("rloo", True, True, True),  # in the reward it needs the sampled log-probs beforehand
        ("clip_cov", False, True, True),
        ("kl_cov", False, True, False),  # selected tokens are pulled whatever their advantage
        ("entropy_80_20", False, True, True),
    ],
)
def test_what_an_algorithm_needs(name: str, reference: bool, old: bool, skips: bool) -> None:
    chosen = PRESETS[name]
    assert (chosen.needs_reference, chosen.needs_old, chosen.skips_idle) == (reference, old, skips)


def test_an_entropy_bonus_and_an_unknown_surrogate_keep_idle_completions() -> None:
    assert not replace(PRESETS["dapo"], entropy=Entropy(0.1)).skips_idle
    assert not replace(PRESETS["dapo"], surrogate=bind(lambda ratio: ratio)).skips_idle


def test_needs_name_the_data_of_all_axes() -> None:
    assert {"rewards", "old_entropy", "selected", "log_ratio"} <= PRESETS["entropy_80_20"].needs
    assert "ref_logprobs" in PRESETS["grpo"].needs
    exact = algorithm(kl=KL(bind(penalties.full)))
    assert {"full_kl", "ref_logprobs"} <= exact.needs
    assert "entropy" in algorithm(entropy=Entropy(0.1)).needs


# --- how hard a token is pushed -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dapo", "cispo", "gspo", "dppo", "icepop"])
def test_push_is_the_gradient_before_the_reduction(name: str) -> None:
    from tests.objective.table import ALGORITHMS

    chosen = replace(ALGORITHMS[name], reduce=bind(reductions.sequence_sum))
    batch, policy = made_batch(chosen, made_groups()), leaves()
    inputs = inputs_of(batch, policy)
    _, slope = evaluated(chosen, batch)
    by_row = slope.logprobs[[int(i[-1]) - 1000 for i in batch.tokens], : batch.mask.shape[1]]
    torch.testing.assert_close(gradient_coefficient(chosen, inputs), -by_row * inputs.totals.completions)


def test_correct_answers_are_imitated_beside_the_policy_term() -> None:
    # The first completion, log-probs -1 + log 1.5 and -2, is correct; 5 correct tokens in the step.
    totals = replace(TOTALS, correct_tokens=5)
    given = {"totals": totals, "correct": torch.tensor([True, False])}
    plain = policy_loss(algorithm(), made_inputs(**given)).total
    with_nll = policy_loss(algorithm(nll=0.5), x := made_inputs(**given)).total
    assert (with_nll - plain).item() == pytest.approx(0.5 * (3 - LOG(1.5)) / 5)
    (slope,) = torch.autograd.grad(with_nll, x.logprobs)
    torch.testing.assert_close(slope, t([-0.1, -1 / 8 - 0.1], [0, 0]))
    assert not algorithm(nll=0.5).skips_idle


def test_corrections_multiply() -> None:
    old = made_inputs().old_logprobs
    inputs = made_inputs(sampler_logprobs=old - t([LOG(3), LOG(2)], [0, 0]))
    truncated, decoupled = bind(corrections.truncated, cap=2.5), bind(corrections.decoupled)
    both = token_terms(algorithm(correction=(truncated, decoupled)), inputs)
    # Weights 3 and 2: capped 2.5 * 3 and 2 * 2.
    torch.testing.assert_close(both.correction, t([7.5, 4], [1, 1]))
    torch.testing.assert_close(both.value, token_terms(algorithm(), inputs).value * t([7.5, 4], [1, 1]))


def test_the_pull_to_the_sampler_keeps_no_reference() -> None:
    kl = KL(bind(penalties.k2), coef=2e-3, to="sampler")
    chosen = algorithm(kl=kl)
    assert not chosen.needs_reference
    assert "ref_logprobs" not in chosen.needs
    old = made_inputs().old_logprobs
    inputs = made_inputs(sampler_logprobs=old)
    # (log ratio)^2 / 2 with ratios 3/2, 1 and 1/2.
    due = t([LOG(1.5) ** 2 / 2, 0], [LOG(0.5) ** 2 / 2, 0])
    torch.testing.assert_close(penalty(kl, replace(inputs, ratio=inputs.log_ratio.exp())), due)


def test_a_bounded_penalty_and_the_gradient_of_having_been_sampled() -> None:
    # d = log 2 and -3: k3 = 1/2 + log 2 - 1 = .193 and e^3 - 4 = 16.1, which is bounded at 10.
    now = t([-1, -4], grad=True)
    inputs = LossInputs(
        logprobs=now,
        mask=torch.ones(1, 2).bool(),
        advantages=torch.zeros(1, 2).double(),
        old_logprobs=t([-1, -4]),
        totals=TOTALS,
        group_tokens=torch.tensor([2]),
        ref_logprobs=t([-1 - LOG(2), -1]),
        ratio=torch.ones(1, 2).double(),
    )
    for gradient, first, second in (
        ("formula", 1 / 2, 0.0),  # 1 - e^-d
        ("score", LOG(2) - 1 / 2 + 1 / 2, 0.0),  # that and the value
        ("straight_through", LOG(2), -3.0),  # d, bounded or not
    ):
        value = penalty(KL(bind(penalties.k3), gradient=gradient, bound=10.0), inputs)
        torch.testing.assert_close(value, t([LOG(2) - 1 / 2, 10.0]))
        (slope,) = torch.autograd.grad(value.sum(), now, retain_graph=True)
        torch.testing.assert_close(slope, t([first, second]))
