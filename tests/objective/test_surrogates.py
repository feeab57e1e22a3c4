"""Clip rules by hand: value, gradient, and exactly where the gradient ends."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from covey.objective import surrogates
from covey.objective.surrogates import (
    cispo,
    clip,
    divergence_mask_kl,
    divergence_mask_tv,
    dro,
    kl_on_selected,
    sapo,
    unclipped,
    vespo,
)


def t(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def slope(loss: Tensor, x: Tensor) -> list[float]:
    return torch.autograd.grad(loss.sum(), x, retain_graph=True)[0][0].tolist()


def test_unclipped() -> None:
    ratio = t(2, 3, grad=True)
    loss = unclipped(ratio, t(1, -1))
    assert loss.tolist() == [[-2, 3]]
    assert slope(loss, ratio) == [-1, 1]
    assert gradcheck(lambda r: unclipped(r, t(1, -1)), ratio)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # Within the bounds .8 and 1.28: -rho A.
        (1.0, 2.0, -2.0, -2.0),
        (1.2, -1.0, 1.2, 1.0),
        # Above, with A > 0: -1.28 A and no gradient. With A < 0: the pessimistic -rho A, which pulls back.
        (1.5, 2.0, -2.56, 0.0),
        (1.5, -2.0, 3.0, 2.0),
        # Below, with A < 0: -.8 A and no gradient. With A > 0: -rho A.
        (0.5, -2.0, 1.6, 0.0),
        (0.5, 2.0, -1.0, -2.0),
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_clip_by_cases(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    x = t(ratio, grad=True)
    value = clip(x, t(advantage), clip_low=0.2, clip_high=0.28)
    assert value.item() == pytest.approx(loss)
    assert slope(value, x) == [pytest.approx(gradient)]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # c = 3: for A < 0 the loss stops growing at rho = 3; A > 0 never gets there.
        (2.9, -2.0, 5.8, 2.0),
        (9.0, -2.0, 6.0, 0.0),
        (9.0, 2.0, -2.4, 0.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_dual_clip_by_cases(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    x = t(ratio, grad=True)
    value = clip(x, t(advantage), dual_clip=3.0)
    assert value.item() == pytest.approx(loss)
    assert slope(value, x) == [pytest.approx(gradient)]


def test_clip_gradient_by_finite_differences() -> None:
    ratio, advantage = t(0.5, 0.9, 1.1, 1.5, 3.7, grad=True), t(1, -1, 1, -1, -1)
    assert gradcheck(lambda r: clip(r, advantage, dual_clip=3.0), ratio)


def test_cispo_weighs_log_pi_by_a_detached_capped_ratio() -> None:
    # Weights min(rho, 2): 1/2, 1, 2; loss -w A log pi; the gradient is -w A, never 0.
    ratio, logprobs = t(0.5, 1, 9, grad=True), t(-1, -2, -3, grad=True)
    loss = cispo(ratio, t(1, -1, 1), logprobs, cap=2.0)
    assert loss.tolist() == [[0.5, -2.0, 6.0]]
    assert slope(loss, logprobs) == [-0.5, 1.0, -2.0]
    assert not cispo(ratio, t(1, 1, 1), logprobs.detach()).requires_grad
    floored = cispo(ratio.detach(), t(1, -1, 1), logprobs, cap=2.0, floor=0.8)
    assert slope(floored, logprobs) == [-0.8, 1.0, -2.0]


def test_sapo_gates_softly() -> None:
    # At rho = 1 the gate is (4 / tau) / 2 and its slope 1, whatever tau.
    x = t(1, 1, grad=True)
    loss = sapo(x, t(1, -1), tau_up=1.0, tau_down=2.0)
    assert loss.tolist() == [[-2.0, 1.0]]
    assert slope(loss, x) == [-1.0, 1.0]
    # tau (rho - 1) = log 3: sigmoid 3/4, slope 4 * 3/4 * 1/4 = 3/4 of the full one.
    x = t(1 + math.log(3), grad=True)
    loss = sapo(x, t(1), tau_up=1.0)
    assert loss.item() == pytest.approx(-3.0)
    assert slope(loss, x) == [pytest.approx(-0.75)]
    assert gradcheck(lambda r: sapo(r, t(1, -1)), t(0.7, 1.9, grad=True))


def test_vespo_weight_is_one_on_policy_and_fades_on_both_sides() -> None:
    # rho = 2, A > 0: 2^2 e^(3 (1 - 2)) = 4 / e^3. A < 0: 2^3 e^(2 (1 - 2)) = 8 / e^2.
    ratio, logprobs = t(1, 2, 2, grad=True), t(-1, -1, -1, grad=True)
    loss = vespo(ratio, t(1, 1, -1), logprobs)
    assert slope(loss, logprobs) == pytest.approx([-1, -4 / math.e**3, 8 / math.e**2])
    assert not vespo(ratio, t(1, 1, 1), logprobs.detach()).requires_grad
    far = vespo(t(math.exp(20), math.exp(-20)), t(1, -1), t(-1, -1))
    assert far.abs().max() < 1e-15


def test_tv_mask_ends_where_the_probability_has_moved_far_enough() -> None:
    # From .5: to .6 and .7 by +.1 and +.2, to .3 by -.2. Threshold .15.
    old = t(*[math.log(0.5)] * 5)
    logprobs = torch.tensor([[0.6, 0.7, 0.7, 0.3, 0.3]], dtype=torch.float64).log().requires_grad_()
    loss = divergence_mask_tv(logprobs, old, t(1, 1, -1, -1, 1), threshold=0.15)
    # Outward: A > 0 above, A < 0 below. Inward moves keep their weight rho.
    assert slope(loss, logprobs) == pytest.approx([-1.2, 0.0, 1.4, 0.0, -0.6])


def test_tv_mask_lets_rare_tokens_move_and_caps_their_weight() -> None:
    # From 1e-3 to 5e-2 the ratio is 50, the move .049: kept, with weight min(50, 20).
    logprobs = torch.tensor([[0.05]], dtype=torch.float64).log().requires_grad_()
    loss = divergence_mask_tv(logprobs, t(math.log(1e-3)), t(1), threshold=0.15, cap=20.0)
    assert slope(loss, logprobs) == pytest.approx([-20.0])
    assert loss.item() == pytest.approx(-20 * math.log(0.05))


@pytest.mark.parametrize("threshold", [0.08, 0.09])
def test_kl_mask_measures_the_binary_divergence(threshold: float) -> None:
    # KL(.5 || .7) = .5 log(.5 / .7) + .5 log(.5 / .3) = -.1682 + .2554 = .0872.
    logprobs = torch.tensor([[0.7, 0.7, 0.3, 0.3]], dtype=torch.float64).log().requires_grad_()
    loss = divergence_mask_kl(logprobs, t(*[math.log(0.5)] * 4), t(1, -1, -1, 1), threshold=threshold)
    outward = 0.0 if threshold < 0.0872 else 1.0
    assert slope(loss, logprobs) == pytest.approx([-1.4 * outward, 1.4, 0.6 * outward, -0.6])


def test_kl_mask_caps_the_weight_and_survives_certainty() -> None:
    logprobs = t(0.0, -1e-9, grad=True)
    loss = divergence_mask_kl(logprobs, t(-9.0, 0.0), t(-1, 1), cap=20.0)
    assert slope(loss, logprobs) == pytest.approx([20.0, -1.0])


def test_kl_on_marked_pulls_marked_tokens_back() -> None:
    # -rho A everywhere; on the selected second token also 2 |log rho|.
    x = torch.tensor([[math.log(2), math.log(2), -math.log(2)]], dtype=torch.float64).requires_grad_()
    selected = torch.tensor([[False, True, True]])
    loss = kl_on_selected(x.exp(), t(1, 1, 0), x, selected, coef=2.0)
    assert loss.tolist() == [[-2.0, pytest.approx(-2 + 2 * math.log(2)), pytest.approx(2 * math.log(2))]]
    assert slope(loss, x) == pytest.approx([-2.0, -2.0 + 2.0, -2.0])
    assert gradcheck(lambda v: kl_on_selected(v.exp(), t(1, 1, 0), v, selected), x)


def test_dro_pulls_back_by_how_far_it_has_gone() -> None:
    # beta 2: log rho = .5 costs .25; -A log pi = -2 * -1. Slope by log pi: beta log rho - A = 1 - 2.
    logprobs = t(-1, -1, grad=True)
    loss = dro(logprobs, t(2, 0), logprobs - t(-1.5, -1), beta=2.0)
    assert loss.tolist() == [[2.25, 0.0]]
    assert slope(loss, logprobs) == [-1.0, 0.0]


def test_group_classification_by_hand() -> None:
    """Two groups: one correct and two incorrect at scores 0, 0 and log 2; one correct alone; an idle row."""
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1]]).bool()
    log_ratio = (
        torch.tensor([[0, 0], [0, 0], [math.log(2), math.log(2)], [0, 0], [9, 9]]).double().requires_grad_()
    )
    advantages = torch.tensor([[2, 2], [-1, 0], [-1, -1], [1, 1], [0, 0]]).double()
    group = torch.tensor([0, 0, 0, 1, 1])
    got = surrogates.group_classification(log_ratio, advantages, mask, group, tau=1.0)
    # log(1 + 1) + log(1 + 1 + 2); log(1 + 1) + log 1.
    due = torch.tensor([math.log(8), math.log(8), math.log(8), math.log(2), math.log(2)]).double()
    torch.testing.assert_close(got, due[:, None].expand(5, 2))
    (slope,) = torch.autograd.grad(got[0, 0] + got[3, 0], log_ratio)
    # -1/2 and 1/4, 2/4 of the scores, each spread over its completion's trained tokens.
    expected = [[-0.25, -0.25], [0.25, 0.0], [0.25, 0.25], [-0.25, -0.25], [0.0, 0.0]]
    trained = slope * mask
    trained[1, 0] = slope[1, 0]
    torch.testing.assert_close(trained, torch.tensor(expected).double())
