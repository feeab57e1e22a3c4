"""Rollout weights by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from covey.objective.corrections import (
    _at_level,
    decoupled,
    geometric_mask,
    masked,
    off_policy_mask,
    truncated,
)

LOG = math.log
MASK = torch.tensor([[1, 1], [1, 0]]).bool()


def gaps() -> Tensor:
    """trainer / sampler: 4 and 1/2 in the first completion, 3 in the second."""
    return torch.tensor([[LOG(4), LOG(0.5)], [LOG(3), 0.0]], dtype=torch.float64)


def close(a: Tensor, rows: list[list[float]]) -> None:
    torch.testing.assert_close(a, torch.tensor(rows, dtype=torch.float64))


def test_truncated_by_token_and_by_sequence() -> None:
    close(truncated(gaps(), cap=2.0), [[2, 0.5], [2, 1]])
    # Products 4 * 1/2 = 2 and 3, capped at 2.5.
    close(truncated(gaps(), cap=2.5, level="sequence"), [[2, 2], [2.5, 2.5]])


def test_masked_by_token_and_by_sequence() -> None:
    close(masked(gaps(), low=0.6, high=3.5), [[0, 0], [3, 1]])
    close(masked(gaps(), low=0.6, high=2.5, level="sequence"), [[2, 2], [0, 0]])
    # The bounds themselves are inside.
    edge = torch.tensor([[0.0]], dtype=torch.float64)
    close(masked(edge, low=1.0, high=2.0), [[1]])
    close(masked(edge, low=0.5, high=1.0), [[1]])


def test_geometric_mask_bounds_trainer_over_sampler() -> None:
    # Geometric means sqrt(2) and 3: below 2 only the first is kept, above 2 only the second.
    close(geometric_mask(gaps(), MASK, low=0.5, high=2.0), [[1, 1], [0, 0]])
    close(geometric_mask(gaps(), MASK, low=2.0, high=5.0), [[0, 0], [1, 1]])


def test_decoupled_has_no_cap() -> None:
    close(decoupled(gaps()), [[4, 0.5], [3, 1]])


def test_sequence_weights_stay_finite_on_long_completions() -> None:
    long = torch.full((1, 100), 1.0)
    assert _at_level(long, "sequence").tolist() == [[20.0] * 100]
    assert truncated(long, cap=1e12, level="sequence").isfinite().all()


@pytest.mark.parametrize(
    ("advantage", "delta", "kept"),
    [
        # Drift: mean of -(mismatch + log_ratio) = -(log 4 - log 2 + 2 log(1/4)) / 2 = log(8) / 2 = 1.04.
        (-1.0, 1.0, 0.0),
        (-1.0, 1.1, 1.0),
        (1.0, 1.0, 1.0),
        (0.0, 1.0, 1.0),
    ],
)
def test_off_policy_mask_drops_negatives_that_have_become_unlikely(
    advantage: float, delta: float, kept: float
) -> None:
    log_ratio = torch.tensor([[LOG(0.25), LOG(0.25)], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[advantage, advantage], [-1.0, 0.0]], dtype=torch.float64)
    weight = off_policy_mask(gaps(), log_ratio, advantages, MASK, delta=delta)
    # The second completion has become likelier: -(log 3) < delta.
    close(weight, [[kept, kept], [1, 1]])
    assert not weight.requires_grad
