"""Length and repetition rewards: values from their formulas, contradictions refused."""

from __future__ import annotations

import math

import pytest

from covey.rewards.length import cosine_length, repetition_penalty, soft_overlong
from covey.types import ConfigError


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


def test_cosine_length_interpolates_by_verdict() -> None:
    # A quarter of the way cos(pi/4) = sqrt(1/2), so the short end weighs (1 + sqrt(1/2)) / 2.
    weight = (1 + math.sqrt(0.5)) / 2
    found = cosine_length(
        ["\\boxed{5}", "\\boxed{6}", "\\boxed{5}", "\\boxed{5}"],
        tokens(25, 25, 100, 400),
        ["5", "5", "5", "no number"],
        limit=100,
    )
    assert found[0] == pytest.approx(0.5 + 0.5 * weight)
    assert found[1] == pytest.approx(-0.5 - 0.5 * weight)
    assert found[2:] == [0.5, None]


def test_cosine_length_stays_at_the_long_end_or_punishes_the_limit() -> None:
    answers = ["\\boxed{1}"] * 3
    stays = cosine_length(answers, tokens(9, 10, 15), ["1"] * 3, limit=10)
    punished = cosine_length(answers, tokens(9, 10, 15), ["1"] * 3, limit=10, exceeded=-10.0)
    assert stays[1:] == [0.5, 0.5] and punished[1:] == [-10.0, -10.0]
    assert stays[0] == punished[0] > 0.5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"limit": 0}, "at least 1 token"),
        ({"limit": 9, "wrong_long": 0.5}, "being wrong would pay"),
        ({"limit": 9, "verdict": "exact"}, "none of"),
    ],
)
def test_cosine_length_refuses_contradictions(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cosine_length(["x"], tokens(1), ["1"], **settings)


def test_repetition_penalty_is_the_share_of_repeated_ngrams() -> None:
    # 1 2 1 2 1: bigrams 12 21 12 21, two of four are new; trigrams 121 212 121, two of three are new.
    ids = [[1, 2, 1, 2, 1]]
    assert repetition_penalty(ids, ngram=2) == [-0.5]
    assert repetition_penalty(ids, ngram=3, most=0.3) == [pytest.approx(-0.1)]
    assert repetition_penalty([[7, 7]], ngram=3) == [0.0]


@pytest.mark.parametrize("settings", [{"ngram": 0}, {"most": 0.0}, {"most": -1.0}])
def test_repetition_penalty_refuses_contradictions(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="repetition_penalty"):
        repetition_penalty([[1]], **settings)
