"""Offline losses by hand, and their gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from covey.objective.preference import (
    apo_down,
    apo_zero,
    apo_zero_unpaired,
    bco,
    bradley_terry,
    discopop,
    dpo,
    exo,
    hinge,
    ipo,
    kto,
    ln_dpo,
    log_sigmoid,
    mpo,
    nca,
    orpo,
    robust_dpo,
    simpo,
    sppo,
)

LOG = math.log


def v(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def slope(loss: Tensor, x: Tensor) -> list[float]:
    return torch.autograd.grad(loss.sum(), x, retain_graph=True)[0].tolist()


def test_log_sigmoid_does_not_overflow() -> None:
    assert log_sigmoid(v(0, -800, 800)).tolist() == pytest.approx([-LOG(2), -800, 0])
    assert log_sigmoid(torch.tensor([-200.0])).isfinite()


def test_dpo() -> None:
    # Chosen up by log 3 against the reference, rejected unchanged; beta 1: sigmoid(log 3) = 3/4.
    chosen, rejected = v(-1, grad=True), v(-2, grad=True)
    loss = dpo(chosen, rejected, v(-1 - LOG(3)), v(-2), beta=1.0)
    assert loss.tolist() == pytest.approx([-LOG(0.75)])
    assert slope(loss, chosen) == pytest.approx([-0.25])
    assert slope(loss, rejected) == pytest.approx([0.25])
    smoothed = dpo(chosen, rejected, v(-1 - LOG(3)), v(-2), beta=1.0, label_smoothing=0.1)
    assert smoothed.tolist() == pytest.approx([-0.9 * LOG(0.75) - 0.1 * LOG(0.25)])
    # beta scales the margin: 2 log 3 gives 9/10.
    assert dpo(chosen, rejected, v(-1 - LOG(3)), v(-2), beta=2.0).tolist() == pytest.approx([-LOG(0.9)])


def test_robust_dpo_has_no_bias_under_flipped_pairs() -> None:
    arguments, e = (v(-1, grad=True), v(-2), v(-1 - LOG(3)), v(-2)), 0.1
    loss = robust_dpo(*arguments, beta=1.0, label_smoothing=e)
    # Margin log 3: (-0.9 log 3/4 + 0.1 log 1/4) / 0.8.
    assert loss.tolist() == pytest.approx([(-0.9 * LOG(0.75) + 0.1 * LOG(0.25)) / 0.8])
    chosen, rejected, ref_chosen, ref_rejected = arguments
    turned = robust_dpo(rejected, chosen, ref_rejected, ref_chosen, beta=1.0, label_smoothing=e)
    expected = ((1 - e) * loss + e * turned).tolist()  # over pairs of which a fraction e is turned round
    assert expected == pytest.approx(dpo(*arguments, beta=1.0).tolist())


def test_hinge_stops_beyond_its_margin() -> None:
    chosen = v(-1, 4, grad=True)
    loss = hinge(chosen, v(-2, -2), v(-2, -2), v(-2, -2), beta=0.5)
    assert loss.tolist() == pytest.approx([0.5, 0.0])  # margins 1 and 6, times beta
    assert slope(loss, chosen) == pytest.approx([-0.5, 0.0])


def test_ipo_averaged_and_summed() -> None:
    # Log-ratios 6 over 3 tokens and -4 over 2; tau 1/2 aims at a margin of 1.
    chosen, rejected = v(-1, grad=True), v(-9, grad=True)
    arguments = (chosen, rejected, v(-7), v(-5), v(3), v(2))
    averaged = ipo(*arguments, tau=0.5)
    assert averaged.tolist() == pytest.approx([(2 + 2 - 1) ** 2])
    assert slope(averaged, chosen) == pytest.approx([2 * 3 / 3])
    summed = ipo(*arguments, tau=0.5, level="summed")
    assert summed.tolist() == pytest.approx([(6 + 4 - 1) ** 2])
    assert slope(summed, rejected) == pytest.approx([-2 * 9])


def test_kto() -> None:
    # Log-ratio log 3 above a reference point of 0: sigmoid 3/4 if desirable, 1/4 if not.
    x = v(LOG(3), LOG(3), grad=True)
    desirable = torch.tensor([True, False])
    loss = kto(x, desirable, v(-5.0, -5.0), beta=1.0, desirable_weight=2.0, undesirable_weight=1.0)
    assert loss.tolist() == pytest.approx([2 * 0.25, 0.75])
    assert slope(loss, x) == pytest.approx([-2 * 3 / 16, 3 / 16])
    # z0 = log 3 brings both to sigmoid(0); it carries no gradient.
    z0 = v(LOG(3), grad=True)
    loss = kto(x, desirable, z0, beta=1.0)
    assert loss.tolist() == pytest.approx([0.5, 0.5])
    assert torch.autograd.grad(loss.sum(), z0, allow_unused=True)[0] is None


def test_apo_zero_unpaired() -> None:
    # Log-ratio log 3: 1 - 3/4 if desirable, of weight 2, and 3/4 if not. Gradients +-3/4 * 1/4.
    x = v(LOG(3), LOG(3), grad=True)
    loss = apo_zero_unpaired(x, torch.tensor([True, False]), beta=1.0, desirable_weight=2.0)
    assert loss.tolist() == pytest.approx([2 * 0.25, 0.75])
    assert slope(loss, x) == pytest.approx([-2 * 3 / 16, 3 / 16])


def test_orpo() -> None:
    # Per-token probabilities 3/4 (one token) and 1/2 (two tokens): odds 3 and 1, log-odds ratio log 3.
    chosen, rejected = v(LOG(0.75), grad=True), v(2 * LOG(0.5), grad=True)
    loss = orpo(chosen, rejected, v(1), v(2), v(2.5), lam=0.5)
    assert loss.tolist() == pytest.approx([2.5 - 0.5 * LOG(0.75)])
    assert orpo(chosen, rejected, v(1), v(2), v(2.5), lam=0.0).tolist() == [2.5]
    assert orpo(v(0.0), v(-1), v(1), v(1), v(0)).isfinite().all()


def test_simpo() -> None:
    # Averages -1 and -2, beta 2: margin 2, minus gamma 2 - log 3: sigmoid(log 3) = 3/4.
    chosen, rejected = v(-3, grad=True), v(-4, grad=True)
    loss = simpo(chosen, rejected, v(3), v(2), beta=2.0, gamma=2 - LOG(3))
    assert loss.tolist() == pytest.approx([-LOG(0.75)])
    assert slope(loss, chosen) == pytest.approx([-0.25 * 2 / 3])
    assert slope(loss, rejected) == pytest.approx([0.25 * 2 / 2])


def test_losses_of_each_answer_by_itself() -> None:
    # Log-ratios log 3 and -log 3 with beta 1: sigmoids 3/4 and 1/4.
    chosen, rejected = v(-1, grad=True), v(-2, grad=True)
    arguments = (chosen, rejected, v(-1 - LOG(3)), v(-2 + LOG(3)))
    loss = nca(*arguments, beta=1.0)
    assert loss.tolist() == pytest.approx([-LOG(3 / 4) - LOG(1 / 4) / 2 - LOG(3 / 4) / 2])
    # -(1 - s) + s / 2 for the chosen answer's s = 3/4, half of 1/4 for the rejected one.
    assert slope(loss, chosen) == pytest.approx([-1 / 4 + 3 / 8])
    assert slope(loss, rejected) == pytest.approx([1 / 8])
    loss = bco(*arguments, beta=1.0)
    assert loss.tolist() == pytest.approx([-2 * LOG(3 / 4)])
    assert slope(loss, chosen) == pytest.approx([-1 / 4])
    assert slope(loss, rejected) == pytest.approx([1 / 4])
    # sig' = 3/16 at both.
    loss = apo_zero(*arguments, beta=1.0)
    assert loss.tolist() == pytest.approx([1 - 3 / 4 + 1 / 4])
    assert slope(loss, chosen) == pytest.approx([-3 / 16])
    assert slope(loss, rejected) == pytest.approx([3 / 16])
    # The margin is log 9: sigmoid 9/10, slope 9/100.
    loss = apo_down(*arguments, beta=1.0)
    assert loss.tolist() == pytest.approx([3 / 4 + 1 - 9 / 10])
    assert slope(loss, chosen) == pytest.approx([3 / 16 - 9 / 100])
    assert slope(loss, rejected) == pytest.approx([9 / 100])
    # With beta 1/2 the log-ratios aim at 1 and -1.
    loss = sppo(v(2.0), v(1.0), v(0.0), v(0.0), beta=0.5)
    assert loss.tolist() == pytest.approx([1 + 4])


def test_losses_of_the_margin() -> None:
    # Margin log 3 with beta 1: q = (3/4, 1/4), compared with (1 - e, e) for e = 1/4: no difference, no slope.
    chosen, rejected = v(-1, grad=True), v(-2)
    arguments = (chosen, rejected, v(-1 - LOG(3)), v(-2))
    loss = exo(*arguments, beta=1.0, label_smoothing=0.25)
    assert loss.tolist() == pytest.approx([0.0])
    assert slope(loss, chosen) == pytest.approx([0.0])
    loss = exo(*arguments, beta=1.0, label_smoothing=0.1)
    assert loss.tolist() == pytest.approx([3 / 4 * LOG(3 / 4 / 0.9) + 1 / 4 * LOG(1 / 4 / 0.1)])
    # tau 1 mixes with the same sigmoid, 3/4.
    loss = discopop(*arguments, beta=1.0, tau=1.0)
    assert loss.tolist() == pytest.approx([-1 / 4 * LOG(3 / 4) + 3 / 4 * 1 / 3])
    assert discopop(*arguments, beta=1.0, tau=1e-3).tolist() == pytest.approx([1 / 3])


def test_dpo_of_other_divergences() -> None:
    # Ratios 4 and 1: margins of -1/r, log(r / (1 + r)) and r^(a - 1) / (a - 1) for a = 1/2.
    chosen = v(2 * LOG(2), grad=True)
    arguments = (chosen, v(0.0), v(0.0), v(0.0))
    for divergence, far, slope_of_chosen in (
        ("forward_kl", 1 - 1 / 4, 1 / 4),
        ("jensen_shannon", LOG(4 / 5 * 2), 1 / 5),
        ("alpha", -2 * (1 / 2 - 1), 1 / 2),
    ):
        loss = dpo(*arguments, beta=1.0, divergence=divergence)
        assert loss.tolist() == pytest.approx([math.log1p(math.exp(-far))])
        # -sig(-far) d far / d log r
        assert slope(loss, chosen) == pytest.approx([-slope_of_chosen / (1 + math.exp(far))])
    near = dpo(*arguments, beta=1.0, divergence="alpha", alpha=1 - 1e-9)
    assert near.tolist() == pytest.approx(dpo(*arguments, beta=1.0).tolist())
    unlikely = dpo(v(-300.0), *arguments[1:], divergence="forward_kl")
    assert unlikely.isfinite().all()


def test_length_normalized_dpo() -> None:
    # Log-ratios of 3 tokens and 2: averages log 3 and 0, sigmoid 3/4.
    chosen, rejected = v(3 * LOG(3), grad=True), v(1.0, grad=True)
    loss = ln_dpo(chosen, rejected, v(0.0), v(1.0), v(3), v(2), beta=1.0)
    assert loss.tolist() == pytest.approx([-LOG(3 / 4)])
    assert slope(loss, chosen) == pytest.approx([-1 / 4 / 3])
    assert slope(loss, rejected) == pytest.approx([1 / 4 / 2])


def test_mixed_preferences() -> None:
    # Log-ratios log 3 and 0 with beta 1: DPO -log 3/4, BCO -log 3/4 - log 1/2; the likelihood is given.
    chosen = v(LOG(3), grad=True)
    arguments = (chosen, v(0.0), v(0.0), v(0.0), v(5.0))
    loss = mpo(*arguments, beta=1.0, preference_weight=2.0, quality_weight=3.0, generation_weight=0.5)
    assert loss.tolist() == pytest.approx([-2 * LOG(3 / 4) - 3 * LOG(3 / 8) + 2.5])
    assert slope(loss, chosen) == pytest.approx([-(2 + 3) / 4])


def test_reward_model() -> None:
    up, down = v(LOG(3), grad=True), v(0.0)
    loss = bradley_terry(up, down)
    assert loss.tolist() == pytest.approx([-LOG(0.75)])
    assert slope(loss, up) == pytest.approx([-0.25])
    centred = bradley_terry(v(LOG(3) + 1), v(1.0), center=0.1)
    assert centred.tolist() == pytest.approx([-LOG(0.75) + 0.1 * (LOG(3) + 2) ** 2])


def against(loss: Callable[..., Tensor], chosen: Tensor, rejected: Tensor) -> Tensor:
    return loss(chosen, rejected, v(-1.2, -2.0), v(-2.1, -1.5), beta=0.5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: dpo(a, b, v(-1.2, -2.0), v(-2.1, -1.5), beta=0.5, label_smoothing=0.2),
        lambda a, b: ipo(a, b, v(-1.2, -2.0), v(-2.1, -1.5), v(3, 2), v(2, 5)),
        lambda a, b: kto(a - b, torch.tensor([True, False]), v(0.1, 0.1)),
        lambda a, b: orpo(a, b, v(3, 2), v(2, 5), -a / v(3, 2)),
        lambda a, b: simpo(a, b, v(3, 2), v(2, 5)),
        bradley_terry,
        lambda a, b: robust_dpo(a, b, v(-1.2, -2.0), v(-2.1, -1.5), beta=0.5),
        lambda a, b: hinge(a, b, v(-1.2, -2.0), v(-2.1, -1.5), beta=0.5),
        *(partial(against, loss) for loss in (exo, nca, bco, sppo, apo_zero, apo_down, discopop)),
        lambda a, b: apo_zero_unpaired(a - b, torch.tensor([True, False]), undesirable_weight=0.5),
        lambda a, b: ln_dpo(a, b, v(-1.2, -2.0), v(-2.1, -1.5), v(3, 2), v(2, 5)),
        lambda a, b: mpo(a, b, v(-1.2, -2.0), v(-2.1, -1.5), -a / 2),
        *(partial(against, partial(dpo, divergence=d)) for d in ("forward_kl", "jensen_shannon", "alpha")),
    ],
    ids=[
        *("dpo", "ipo", "kto", "orpo", "simpo", "bradley_terry", "robust_dpo", "hinge"),
        *("exo", "nca", "bco", "sppo", "apo_zero", "apo_down", "discopop", "apo_zero_unpaired"),
        *("ln_dpo", "mpo", "forward_kl", "jensen_shannon", "alpha"),
    ],
)
def test_gradients_by_finite_differences(loss) -> None:
    assert gradcheck(loss, (v(-1.0, -2.5, grad=True), v(-2.0, -1.4, grad=True)))
