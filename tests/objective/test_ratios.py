"""Importance ratios by hand, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from covey.objective.ratios import (
    LOG_RATIO_LIMIT,
    clamp_log_ratio,
    completion,
    geometric_clipped,
    on_policy,
    sequence,
    sequence_token,
    token,
)

MASK = torch.tensor([[1, 1], [1, 0]]).bool()
LOG = math.log


def log_ratio() -> Tensor:
    """Ratios 4 and 1 in the first completion, 1/2 in the second; padding 0, as ``LossInputs`` leaves it."""
    return torch.tensor([[LOG(4), 0.0], [LOG(0.5), 0.0]], dtype=torch.float64, requires_grad=True)


def close(a: Tensor, rows: list[list[float]]) -> None:
    torch.testing.assert_close(a, torch.tensor(rows, dtype=torch.float64))


def slope(values: Tensor, x: Tensor, row: int = 0, column: int = 0) -> list[list[float]]:
    return torch.autograd.grad(values[row, column], x, retain_graph=True)[0].tolist()


def test_bounded_keeps_what_is_within() -> None:
    close(
        clamp_log_ratio(torch.tensor([[-99.0, 3.0, 99.0]], dtype=torch.float64)),
        [[-LOG_RATIO_LIMIT, 3.0, LOG_RATIO_LIMIT]],
    )


def test_on_policy_is_one_and_moves_with_log_pi() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    ratio = on_policy(logprobs)
    close(ratio, [[1.0, 1.0]])
    assert slope(ratio, logprobs) == [[1.0, 0.0]]


def test_token_ratio() -> None:
    x = log_ratio()
    close(token(x), [[4.0, 1.0], [0.5, 1.0]])
    assert slope(token(x), x) == [[pytest.approx(4.0), 0.0], [0.0, 0.0]]
    assert gradcheck(token, x)


def test_sequence_ratio_is_the_geometric_mean_over_trained_tokens() -> None:
    # sqrt(4 * 1) = 2; the second completion has one token: 1/2. d s / d x_t = s / |y|.
    x = log_ratio()
    close(sequence(x, MASK), [[2.0, 2.0], [0.5, 0.5]])
    assert slope(sequence(x, MASK), x) == [[pytest.approx(1.0), pytest.approx(1.0)], [0.0, 0.0]]
    assert gradcheck(lambda v: sequence(v, MASK), x)


def test_sequence_token_has_the_same_value_and_each_tokens_own_gradient() -> None:
    x = log_ratio()
    close(sequence_token(x, MASK), [[2.0, 2.0], [0.5, 0.5]])
    assert slope(sequence_token(x, MASK), x) == [[pytest.approx(2.0), 0.0], [0.0, 0.0]]


def test_completion_ratio_is_the_product() -> None:
    x = torch.tensor([[LOG(4), LOG(3)]], dtype=torch.float64, requires_grad=True)
    close(completion(x), [[12.0, 12.0]])
    assert slope(completion(x), x) == [[pytest.approx(12.0), pytest.approx(12.0)]]
    assert gradcheck(completion, x)
    far = torch.full((1, 50), 1.0, dtype=torch.float64)
    close(completion(far)[:, :1].log(), [[LOG_RATIO_LIMIT]])


def test_geometric_clipped_clips_each_token_on_the_side_of_its_advantage() -> None:
    # Bound .4. For A > 0 log 4 counts as .4 and log(1/4) in full; for A < 0 the other way round.
    x = torch.tensor([[LOG(4), LOG(0.25)]] * 2, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 2).bool()
    sign = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    up, down = math.exp((0.4 - LOG(4)) / 2), math.exp((LOG(4) - 0.4) / 2)
    ratio = geometric_clipped(x, mask, sign, clip_log=0.4)
    close(ratio, [[up, up], [down, down]])
    assert slope(ratio, x)[0] == [0.0, pytest.approx(up / 2)]
    assert slope(ratio, x, row=1)[1] == [pytest.approx(down / 2), 0.0]
    assert gradcheck(lambda v: geometric_clipped(v, mask, sign), x)
