"""How much one token weighs, by hand."""

from __future__ import annotations

import pytest
import torch

from covey.objective import reductions
from covey.objective.reductions import (
    Totals,
    constant_length,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
    token_sum,
)

# Two prompts: completions of 3 and 1 tokens, and of 4 tokens; the limit is 10.
LENGTHS = torch.tensor([3.0, 1.0, 4.0], dtype=torch.float64)
TOTALS = Totals(tokens=8, completions=3, prompts=2, max_tokens=10)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (token_mean(LENGTHS, TOTALS), [1 / 8, 1 / 8, 1 / 8]),
        (sequence_mean(LENGTHS, TOTALS), [1 / 9, 1 / 3, 1 / 12]),
        (sequence_sum(LENGTHS, TOTALS), [1 / 3, 1 / 3, 1 / 3]),
        (constant_length(LENGTHS, TOTALS), [1 / 30, 1 / 30, 1 / 30]),
        (constant_length(LENGTHS, TOTALS, length=50), [1 / 150, 1 / 150, 1 / 150]),
        (token_sum(LENGTHS), [1, 1, 1]),
        # Half a prompt's share over the 4 tokens of each prompt's group.
        (prompt_mean(torch.tensor([4.0, 4.0, 4.0]).double(), TOTALS), [1 / 8, 1 / 8, 1 / 8]),
        (prompt_mean(torch.tensor([5.0, 5.0, 3.0]).double(), TOTALS), [1 / 10, 1 / 10, 1 / 6]),
    ],
)
def test_weights(weights: torch.Tensor, expected: list[float]) -> None:
    assert weights.tolist() == pytest.approx(expected, rel=1e-14)
    assert weights.dtype == torch.float64


@pytest.mark.parametrize("reduce", [token_mean, sequence_mean])
def test_means_weigh_one_in_all(reduce) -> None:
    assert float((reduce(LENGTHS, TOTALS) * LENGTHS).sum()) == pytest.approx(1.0)


def test_a_step_without_tokens_divides_by_nothing() -> None:
    empty = Totals(tokens=0, completions=0, prompts=0, max_tokens=10)
    none = torch.zeros(2)
    for reduce in (token_mean, sequence_mean, sequence_sum, constant_length, prompt_mean):
        assert reduce(none, empty).isfinite().all()


def test_rows_and_floors_of_other_codes() -> None:
    # Three of four rows are trained, of 2, 1 and 5 tokens; an eps of 1 beside each length, or their sum.
    totals, lengths = Totals(8, 3, 2, 10, rows=4), torch.tensor([2.0, 1.0, 5.0])
    assert reductions.sequence_mean(lengths, totals, rows="all").tolist() == pytest.approx(
        [1 / 8, 1 / 4, 1 / 20]
    )
    eps = reductions.sequence_mean(lengths, totals, eps=1.0)
    assert eps.tolist() == pytest.approx([1 / 9, 1 / 6, 1 / 18])
    assert reductions.sequence_sum(lengths, totals, rows="all").tolist() == [1 / 4] * 3
    assert reductions.constant_length(lengths, totals, rows="all").tolist() == pytest.approx([1 / 40] * 3)
    assert reductions.token_mean(lengths, totals, eps=1.0).tolist() == pytest.approx([1 / 9] * 3)
