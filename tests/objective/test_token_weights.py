"""Selections of tokens, and token weights, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from covey.objective.token_weights import (
    covariance,
    discounted_sum,
    future_influence,
    random_covariant,
    selected_only,
    top_covariance,
    top_entropy,
    unlikely_only,
    unselected_only,
)

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
NAN = math.nan


def t(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_top_entropy_takes_the_share_of_trained_tokens() -> None:
    # 40 % of five tokens are two: 9 and 8; the 99 is padding.
    entropy = t([9, 1, 2], [8, 3, 99])
    assert top_entropy(entropy, MASK, fraction=0.4).tolist() == [[True, False, False], [True, False, False]]
    assert top_entropy(entropy, MASK, fraction=1.0).equal(MASK)
    assert not top_entropy(entropy, MASK, fraction=0.0).any()
    assert int(top_entropy(entropy, MASK, fraction=0.01).sum()) == 1
    assert not top_entropy(entropy, MASK & False, fraction=0.5).any()
    assert not top_entropy(t([NAN] * 3, [NAN] * 3).where(~MASK, entropy), MASK)[1, 2]


def test_covariance_over_all_trained_tokens() -> None:
    # A: 1 1 1 -1 -1, mean 1/5. log pi: -1 -2 -3 -1 -3, mean -2.
    advantages, logprobs = t([1, 1, 1], [-1, -1, 7]), t([-1, -2, -3], [-1, -3, NAN])
    got = covariance(logprobs, advantages, MASK)
    torch.testing.assert_close(got[MASK], t([0.8, 0.0, -0.8, -1.2, 1.2])[0])
    assert got.isfinite().all()


def test_equal_advantages_have_no_covariance_whatever_their_mean_rounds_to() -> None:
    """The mean of seven times .1 is not .1 in float32, and the sign of what is left would choose a token."""
    logprobs, advantages = -torch.rand(1, 7), torch.full((1, 7), 0.1)
    assert not covariance(logprobs, advantages, torch.ones(1, 7, dtype=torch.bool)).any()


def test_top_covariance() -> None:
    advantages, logprobs = t([1, 1, 1], [-1, -1, 0]), t([-1, -2, -3], [-1, -3, NAN])
    assert top_covariance(logprobs, advantages, MASK, fraction=0.4).tolist() == [
        [True, False, False],
        [False, True, False],
    ]


def test_random_covariant_draws_within_the_band_by_the_given_noise() -> None:
    # Covariances .8 0 -.8 / -1.2 1.2: within [-1, 1] are the first three; noise .5 .9 .7.
    advantages, logprobs = t([1, 1, 1], [-1, -1, 0]), t([-1, -2, -3], [-1, -3, NAN])
    noise = t([0.5, 0.9, 0.7], [0.99, 0.99, 0.99])
    settings = {"low": -1.0, "high": 1.0}
    one = random_covariant(logprobs, advantages, MASK, noise, fraction=0.2, **settings)
    assert one.tolist() == [[False, True, False], [False, False, False]]
    # 60 % of all five tokens are three: every one in the band, and no more if the fraction asks for more.
    for fraction in (0.6, 1.0):
        drawn = random_covariant(logprobs, advantages, MASK, noise, fraction=fraction, **settings)
        assert drawn.tolist() == [[True, True, True], [False, False, False]]


def test_selected_and_unselected() -> None:
    selected = torch.tensor([[True, False]])
    assert selected_only(selected).tolist() == [[1, 0]]
    assert unselected_only(selected).tolist() == [[0, 1]]


def test_unlikely_only() -> None:
    assert unlikely_only(t([0.95, 0.9, 0.5]).log(), below=0.9).tolist() == [[0, 0, 1]]


def test_discounted_sum() -> None:
    # From the end: 4, then 2 + half of it, then 1 + half of that.
    assert discounted_sum(t([1, 2, 4]), 0.5).tolist() == [[3, 4, 4]]


LOG = math.log


def influence(log_ratio: Tensor, advantages: Tensor, mask: Tensor, **settings: float) -> list[float]:
    return future_influence(log_ratio, advantages, mask, **settings)[0].tolist()


def test_future_influence_follows_what_comes_after() -> None:
    # Half-life 1: g = 1/2. Sums: log 1.1; then log 1.2 + log(1.1)/2, ...
    x, ones, mask = t([0.0, LOG(1.2), LOG(1.1)]), t([1, 1, 1]), torch.ones(1, 3).bool()
    tail = 1.2 * math.sqrt(1.1)
    wide = {"half_life": 1.0, "low": 0.1, "high": 9.0}
    assert influence(x, ones, mask, **wide) == pytest.approx([math.sqrt(tail), tail, 1.1])
    assert influence(x, ones, mask, half_life=1.0) == pytest.approx([math.sqrt(tail), 1.2, 1.1])
    # A sinking future weighs exp(sum) < 1: kept at 1 by the paper's bounds.
    assert influence(-x, ones, mask, half_life=1.0) == [1, 1, 1]
    assert influence(-x, ones, mask, **wide) == pytest.approx([1 / math.sqrt(tail), 1 / tail, 1 / 1.1])
    # Tokens that are not trained count for nothing.
    assert influence(x, ones, torch.tensor([[True, True, False]]), **wide)[1] == pytest.approx(1.2)


def test_future_influence_leaves_outliers_out_and_is_careful_with_negatives() -> None:
    mask, wide = torch.ones(1, 2).bool(), {"half_life": 1.0, "low": 0.1, "high": 99.0}
    # A ratio of 11 is an outlier (> 10): its token adds nothing.
    assert influence(t([LOG(2), LOG(11)]), t([1, 1]), mask, **wide) == pytest.approx([2, 1])
    assert influence(t([LOG(2), LOG(9)]), t([1, 1]), mask, **wide) == pytest.approx([6, 9])
    # Negative with a ratio of 9 > 4: at most 1. With a ratio of 3: not.
    assert influence(t([LOG(3), LOG(9)]), t([-1, -1]), mask, **wide) == pytest.approx([9, 1])
    assert influence(t([LOG(3), LOG(9)]), t([-1, 1]), mask, **wide) == pytest.approx([9, 9])


def test_token_weights_carry_no_gradient() -> None:
    x = t([0.1, 0.2]).requires_grad_()
    assert not future_influence(x, t([1, 1]), torch.ones(1, 2).bool()).requires_grad
