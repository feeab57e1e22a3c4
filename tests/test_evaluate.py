"""Held-out accuracy and its intervals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.evaluation import Evaluation, evaluate, gain, mean_interval, pass_at_k, wilson
from covey.insight.verdict import judge
from covey.rewards.base import load_rewards
from covey.sampling.base import SamplingParams
from tests.fakes import ScriptedSampler, prompted


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    samples = [i < correct for i in range(n)]
    subsets = list(itertools.combinations(samples, k))
    expected = sum(any(s) for s in subsets) / len(subsets)
    assert pass_at_k(np.array([correct]), n, k)[0] == pytest.approx(expected)


def test_wilson_by_hand() -> None:
    # n = 10, p = .5, z^2 = 3.8415: centre .5, half = 1.96 sqrt(.025 + .0096) / 1.38415 = .2634.
    found = wilson(5, 10)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 20).low == 0
    assert wilson(20, 20).high == 1
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)


def test_intervals_over_problems_not_samples() -> None:
    assert mean_interval(np.array([1.0, 0.0])).high == 1.0
    assert mean_interval(np.full(100, 0.5)).low == pytest.approx(0.5)


def evaluation(greedy: list[int], correct: list[int] | None = None) -> Evaluation:
    g = np.array(greedy, bool)
    return Evaluation(g, np.array(correct or greedy) * 2, g, samples=4)


def test_evaluation_counts_greedy_sampled_and_majority() -> None:
    # Greedy uses the first stream too, so the scripted answer depends on the prompt alone.
    sampler = ScriptedSampler(lambda p, _: str(p[0] - 1) if p[0] <= 3 else "x")
    rewards = load_rewards([{"exact_answer": {"rule": "whole"}}], None)
    found = evaluate(prompted(4), sampler, rewards, SamplingParams(), 4, 0, lambda *_: None)
    assert found.greedy.tolist() == [True, True, True, False]
    assert found.correct.tolist() == [4, 4, 4, 0]
    assert found.majority.tolist() == [True, True, True, False]
    summary = found.summary()
    assert summary["pass@1"].value == summary["pass@4"].value == summary["maj@4"].value == 0.75


def test_majority_takes_the_most_frequent_answer_not_the_first() -> None:
    votes = iter(["9", "0", "0", "1", "0"])
    sampler = ScriptedSampler(lambda *_: next(votes))
    rewards = load_rewards([{"exact_answer": {"rule": "whole"}}], None)
    found = evaluate(prompted(1), sampler, rewards, SamplingParams(), 4, 0, lambda *_: None)
    assert found.majority.tolist() == [True]
    assert found.correct.tolist() == [2]


def test_an_evaluation_survives_its_record() -> None:
    before = evaluation([1, 0, 1])
    after = Evaluation.from_record(before.record())
    for name in ("greedy", "correct", "majority"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


def test_gain_is_paired_and_never_certain_from_few_problems() -> None:
    assert gain(np.zeros(3), np.ones(3)).low < 0.5
    paired = gain(np.tile([0, 1], 100), np.tile([1, 1], 100))
    assert paired.value == 0.5
    assert 0.4 < paired.low < 0.5 < paired.high < 0.6


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ([0] * 200, [1] * 100 + [0] * 100, "learned"),
        ([1] * 200, [1] * 100 + [0] * 100, "got worse"),
        ([0, 1] * 500, [0, 1] * 500, "did not learn"),
        ([0, 1] * 10, [1, 0] * 10, "cannot tell"),
        ([0] * 6, [1] + [0] * 5, "cannot tell"),
    ],
)
def test_the_verdict_follows_the_evidence(before: list[int], after: list[int], word: str) -> None:
    verdict = judge(evaluation(before), evaluation(after), seconds=65)
    assert verdict.word == word
    assert verdict.sentence.startswith(word)
    assert f"{len(before)} held-out problems in 1 min 5 s" in verdict.sentence
