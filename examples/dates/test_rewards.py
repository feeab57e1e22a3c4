"""Tests of the reward; `pytest` runs them. Add what your model writes: `covey preview run.yaml` shows it."""

import pytest

from rewards import iso_date


@pytest.mark.parametrize(
    ("completion", "pays"),
    [
        ("2023-05-21", 1),
        (" 2023-05-21\n", 1),
        ("2023-05-22", 0.2),  # two of three parts
        ("May 21, 2023", 0),
        ("2023-05-21-07-30", 0.18),  # three of five parts
        ("The date is 2023-05-21.", 0.1),  # a sentence is not the date: only the month stands alone
        ("", 0),
    ],
)
def test_only_the_date_is_paid_in_full(completion, pays):
    assert iso_date(completion, "2023-05-21") == pytest.approx(pays)
