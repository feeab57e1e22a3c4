"""Length and repetition rewards: values from their formulas, contradictions refused."""

from __future__ import annotations

import math

import pytest

from covey_verify.errors import ConfigError
from covey_verify.texts.length import cosine_length, repetition, soft_overlong


def tokens(*lengths: int) -> list[list[int]]:
    return [list(range(n)) for n in lengths]


def test_soft_overlong_falls_over_the_buffer_to_minus_one() -> None:
    # limit 20, buffer 8: free up to 12; at 14, (12 - 14) / 8 = -1/4; at 20, -1; never below.
    assert soft_overlong(tokens(12, 13, 14, 20, 99), limit=20, buffer=8) == [0, -0.125, -0.25, -1, -1]
    assert soft_overlong(tokens(0, 5, 10), limit=10, buffer=10) == [0, -0.5, -1]


@pytest.mark.parametrize("settings", [{"limit": 10, "buffer": 0}, {"limit": 10, "buffer": 11}])
def test_soft_overlong_needs_a_buffer_within_the_limit(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="buffer"):
        soft_overlong([[1]], **settings)


def test_cosine_length_interpolates_between_its_ends() -> None:
    # A quarter of the way cos(pi/4) = sqrt(1/2), so the short end weighs (1 + sqrt(1/2)) / 2.
    weight = (1 + math.sqrt(0.5)) / 2
    found = cosine_length(tokens(0, 25, 100, 400), limit=100, short=-10.0, long=0.0)
    assert found == [-10.0, pytest.approx(-10 * weight), 0.0, 0.0]


def test_cosine_length_can_punish_the_limit() -> None:
    found = cosine_length(tokens(9, 10, 15), limit=10, exceeded=-10.0)
    assert found[0] > 0.5 and found[1:] == [-10.0, -10.0]


def test_repetition_is_minus_the_share_of_repeated_ngrams() -> None:
    # 1 2 1 2 1: bigrams 12 21 12 21, two of four are new; trigrams 121 212 121, two of three are new.
    assert repetition([[1, 2, 1, 2, 1]], n=2) == [-0.5]
    assert repetition([[1, 2, 1, 2, 1]], n=3) == [pytest.approx(-1 / 3)]
    assert repetition([[7, 7]], n=3) == [0.0]


def test_lengths_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="limit 0"):
        cosine_length(tokens(1), limit=0)
    with pytest.raises(ConfigError, match="n 0"):
        repetition(tokens(1), n=0)
