"""KL estimators by hand, where they act and what they derive to."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from covey.objective.penalties import absolute, at_level, bounded_value, full, k1, k2, k3, with_gradient


def t(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    # d = log pi - log ref = log 2 and -log 2.
    [
        (k1, (LOG2, -LOG2), (1, 1)),
        (k2, (LOG2**2 / 2, LOG2**2 / 2), (LOG2, -LOG2)),
        # e^-d + d - 1: 1/2 + log 2 - 1 and 2 - log 2 - 1; slope 1 - e^-d: 1/2 and -1.
        (k3, (LOG2 - 0.5, 1 - LOG2), (0.5, -1)),
        (absolute, (LOG2, LOG2), (1, -1)),
        (full, (LOG2, -LOG2), (1, 1)),
    ],
)
def test_estimators(estimator, value, slope) -> None:
    d = t(LOG2, -LOG2, grad=True)
    got = estimator(d)
    assert got[0].tolist() == pytest.approx(value)
    assert torch.autograd.grad(got.sum(), d)[0][0].tolist() == pytest.approx(slope)
    assert gradcheck(estimator, t(0.3, -1.7, 2.0, grad=True))


@given(st.floats(-50, 200))
def test_k3_is_never_negative_and_never_overflows(d: float) -> None:
    value = k3(torch.tensor(d, dtype=torch.float32))
    assert value >= 0 and value.isfinite()


def test_k3_still_pulls_when_the_policy_is_far_above_the_reference() -> None:
    # The sum over a long response easily exceeds 20 nats: the slope there is 1 - e^-d = 1, not 0.
    d = t(25.0, 300.0, grad=True)
    assert torch.autograd.grad(k3(d).sum(), d)[0][0].tolist() == pytest.approx([1, 1])


def test_at_level_sums_the_completion_onto_its_tokens() -> None:
    d = torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    assert at_level(d, mask, "token") is d
    assert at_level(d, mask, "completion").tolist() == [[3, 3, 0]]


def test_gradient_modes_keep_the_value_and_change_the_slope() -> None:
    # k3 at d = log 2 is log 2 - 1/2. Slopes: its own 1/2; k2's log 2; that of rho k3 at rho = e^d:
    # rho' k3 + rho k3' = 2 (log 2 - 1/2) + 2 * 1/2.
    d = t(LOG2, grad=True)
    value = LOG2 - 0.5
    expected = {
        "formula": (value, 0.5),
        "straight_through": (value, LOG2),
        "ratio": (2 * value, 2 * value + 1),
    }
    for mode, (of_value, of_slope) in expected.items():
        got = with_gradient(k3(d), d, d.exp(), mode)
        assert got.item() == pytest.approx(of_value)
        assert torch.autograd.grad(got.sum(), d)[0].item() == pytest.approx(of_slope)


def test_a_bound_is_of_both_sides() -> None:
    found = bounded_value(torch.tensor([-12.0, 3.0, 12.0]), 10.0)
    assert found.tolist() == [-10.0, 3.0, 10.0]


def test_a_bound_is_of_the_straight_through_value_too() -> None:
    """Its gradient stays that of k2, d."""
    log_ratio = torch.tensor([-12.0, 3.0, 12.0], requires_grad=True)
    found = with_gradient(log_ratio * 1.0, log_ratio, torch.ones(3), "straight_through", 10.0)
    assert found.tolist() == [-10.0, 3.0, 10.0]
    assert torch.autograd.grad(found.sum(), log_ratio)[0].tolist() == [-12.0, 3.0, 12.0]
