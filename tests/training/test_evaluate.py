"""Held-out accuracy and its intervals."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import ScriptedSampler, prompted

from covey.errors import CheckpointError
from covey.insight.conclusion import conclude_run
from covey.rewards.loading import load_rewards
from covey.rewards.scorer import completion_of
from covey.runs.estimates import (
    Basis,
    Evaluation,
    gain,
    gains,
    mean_interval,
    on_shared_problems,
    unbiased_pass_at_k,
    wilson,
)
from covey.sampling.base import SamplingParams
from covey.sampling.prompts import EncodedProblem
from covey.training.evaluation import basis_of, evaluate, majority
from covey.types import Completion, Problem, Transcript
from covey_verify.extract import TAGS, Thoughts


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    samples = [i < correct for i in range(n)]
    subsets = list(itertools.combinations(samples, k))
    expected = sum(any(s) for s in subsets) / len(subsets)
    assert unbiased_pass_at_k(np.array([correct]), n, k)[0] == pytest.approx(expected)


def test_wilson_by_hand() -> None:
    # n = 10, p = .5, z^2 = 3.8415: centre .5, half = 1.96 sqrt(.025 + .0096) / 1.38415 = .2634.
    found = wilson(5, 10)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 20).low == 0
    assert wilson(20, 20).high == 1
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)


def test_intervals_over_problems_not_samples() -> None:
    assert mean_interval(np.array([1.0, 0.0]), is_fraction=False).high == pytest.approx(
        0.5 + 1.96 * 0.5, abs=1e-4
    )
    # 100 problems and two pseudo-problems at either end: 1.96 sqrt(4 .25 / 103 / 104) = .0189.
    assert mean_interval(np.full(100, 0.5)).low == pytest.approx(0.5 - 0.0189, abs=1e-4)


def test_a_model_that_solves_nothing_may_solve_a_few() -> None:
    """Of small rates the normal interval holds the truth 4 times in 5."""
    rng, rate, problems, samples, held = np.random.default_rng(0), 0.02, 64, 4, 0
    for _ in range(1000):
        solved = rng.binomial(samples, rng.beta(rate, 1 - rate, problems))
        found = mean_interval(unbiased_pass_at_k(solved, samples, 1))
        held += found.low <= rate <= found.high
    assert held > 940
    assert mean_interval(np.zeros(64)).high == pytest.approx(0.0695, abs=1e-3)


def evaluation(greedy: list[int], correct: list[int] | None = None) -> Evaluation:
    g, right = np.array(greedy, bool), np.array(correct or greedy) * 2
    return Evaluation(g, right, g, right / 4, samples=4, verdict="answer")


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


def test_the_held_out_reward_is_the_weighted_sum_of_training() -> None:
    # Right is worth 1, each of the three letters of a wrong answer .1: a mean of 1 or .3; half were judged.
    def letters(completion: str) -> float | None:
        return None if completion == "??" else 0.1 * len(completion.strip("0123456789"))

    sampler = ScriptedSampler(lambda p, _: {1: "0", 2: "abc"}.get(int(p[0]), "??"))
    rewards = load_rewards(["math_answer", {letters: {"weight": 2.0, "verdict": False}}], None)
    only = load_rewards([letters], None)
    found = evaluate(prompted(2), sampler, rewards, SamplingParams(), 4, 0, lambda *_: None)
    np.testing.assert_allclose(found.reward, [0.0, 0.6])  # "0" is in no box
    assert found.record()["reward"] == pytest.approx(0.3)
    assert found.verdict == found.record()["verdict"] == "math_answer"
    unknown = evaluate(prompted(3), sampler, only, SamplingParams(), 4, 0, lambda *_: None)
    assert np.isnan(unknown.reward).tolist() == [False, False, True]
    record = json.loads(json.dumps(unknown.record(), allow_nan=False))
    assert record["outcome"]["reward"][2] is None
    np.testing.assert_array_equal(Evaluation.from_record(record).reward, unknown.reward)
    assert str(unknown.summary()["reward"]).startswith("0.15 [")


def test_greedy_is_greedy_and_problems_have_their_own_luck() -> None:
    sampler = ScriptedSampler(lambda p, _: str(p[0] - 1) if sampler.greedy else "x")
    rewards = load_rewards([{"exact_answer": {"rule": "whole"}}], None)
    found = evaluate(prompted(3), sampler, rewards, SamplingParams(), 4, 0, lambda *_: None)
    assert found.greedy.tolist() == [True, True, True]
    assert found.correct.tolist() == [0, 0, 0]
    assert found.reward.tolist() == [0, 0, 0], "what is trained is what is sampled"
    assert len(set(sampler.streams)) == 3 * 4


def test_majority_takes_the_most_frequent_answer_not_the_first() -> None:
    # The greedy answer is asked for last, and this sampler begins at the end.
    votes = iter(["0", "9", "0", "0", "1"])
    sampler = ScriptedSampler(lambda *_: next(votes))
    rewards = load_rewards([{"exact_answer": {"rule": "whole"}}], None)
    found = evaluate(prompted(1), sampler, rewards, SamplingParams(), 4, 0, lambda *_: None)
    assert found.majority.tolist() == [True]
    assert found.correct.tolist() == [2]


def test_a_majority_for_a_wrong_answer_is_wrong_though_some_sample_is_right() -> None:
    votes = iter(["0", "9", "0", "9", "1"])
    sampler = ScriptedSampler(lambda *_: next(votes))
    rewards = load_rewards([{"exact_answer": {"rule": "whole"}}], None)
    found = evaluate(prompted(1), sampler, rewards, SamplingParams(), 4, 0, lambda *_: None)
    assert found.correct.tolist() == [1]
    assert found.majority.tolist() == [False]


def test_an_evaluation_survives_its_record() -> None:
    before = evaluation([1, 0, 1])
    after = Evaluation.from_record(before.record())
    for name in ("greedy", "correct", "majority", "reward"):
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
def test_the_conclusion_follows_the_evidence(before: list[int], after: list[int], word: str) -> None:
    conclusion = conclude_run(evaluation(before), evaluation(after), seconds=65)
    assert conclusion.word == word
    assert conclusion.sentence.startswith(word)
    assert "reward" not in conclusion.sentence  # it is the accuracy again
    assert f"{len(before)} held-out problems in 1 min 5 s" in conclusion.sentence


def measured(greedy: list[int], correct: list[int], reward: list[float]) -> Evaluation:
    g = np.array(greedy, bool)
    return Evaluation(g, np.array(correct), g, np.array(reward, float), samples=4, verdict="answer")


SOME = [1, 0, 0, 0] * 4
FLAT = [0.25] * 16
MANY: list[int] = [1, 0, 0, 0] * 500


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        # Greedy stays at 25 %, samples fall from 28 % to 6 %, or rise.
        ((SOME, [2, 1, 1, 1] * 4, FLAT), (SOME, [1, 0, 0, 0] * 4, FLAT), "got worse: 25 % -> "),
        ((SOME, [1, 0, 0, 0] * 4, FLAT), (SOME, [3, 2, 2, 2] * 4, FLAT), "learned: 25 % -> "),
        # One rises, the other falls.
        (
            ([0] * 16, [4] * 16, FLAT),
            ([1] * 16, [0] * 16, FLAT),
            "cannot tell: 0 % -> 100 % [81, 100] greedy, 100 % -> 0 % [0, 23] sampled, reward 0.25 -> 0.25",
        ),
        # No answer is ever above one half: the reward tells.
        (([0] * 16, [0] * 16, [0.1] * 16), ([0] * 16, [0] * 16, [0.4] * 16), "learned: 0 % -> 0 %"),
        (([0] * 16, [0] * 16, [0.4] * 16), ([0] * 16, [0] * 16, [0.1] * 16), "got worse: 0 % -> 0 %"),
        # Accuracy is known to be the same, and what rises is something else.
        ((MANY, MANY, [0.1] * 2000), (MANY, MANY, [0.4] * 2000), "did not learn: 25 % -> 25 %"),
        # Accuracy may not hide that the reward fell, nor that it fell while the reward rose.
        ((MANY, MANY, [0.4] * 2000), (MANY, MANY, [0.1] * 2000), "got worse: 25 % -> 25 %"),
        (
            ([1] * 16, [4] * 16, [0.1] * 16),
            ([0] * 16, [0] * 16, [0.9] * 16),
            "got worse: 100 % -> 0 % [0, 19] greedy, 100 % -> 0 % [0, 23] sampled, reward 0.1 -> 0.9",
        ),
    ],
)
def test_the_conclusion_hears_samples_and_reward(before: tuple, after: tuple, says: str) -> None:
    assert conclude_run(measured(*before), measured(*after), seconds=1).sentence.startswith(says)


def test_evaluations_are_compared_on_the_problems_they_share() -> None:
    """A resume may ask for other `eval.problems`; they are the first of the same list."""
    before, after = measured(SOME, SOME, FLAT), measured([1] * 20, [4] * 20, [1] * 20)
    found = conclude_run(before, after, seconds=1).sentence
    assert found.startswith("learned: 25 % -> 100 %")
    assert "on 16 held-out problems" in found
    assert conclude_run(after, before, seconds=1).sentence.startswith("got worse: 100 % -> 25 %")
    assert gains(before, after)["greedy"].value == 0.75
    other = replace(after, verdict="another")
    assert conclude_run(before, other, seconds=1).sentence.startswith(
        "cannot tell: correct meant answer at first"
    )


@pytest.mark.parametrize(
    "damaged",
    [
        {"greedy": [1, 0]},
        {"correct": 3},
        {"correct": [5, 0, 0]},
        {"correct": [-1, 0, 0]},
        {"reward": [[0.0], [0.0], [0.0]]},
        {"reward": [10**400, 0, 0]},
    ],
)
def test_a_damaged_evaluation_is_named(damaged: dict[str, object]) -> None:
    record: dict[str, object] = {"step": 3, **measured([1, 0, 0], [4, 0, 0], [0, 0, 0]).record()}
    outcome = record["outcome"]
    assert isinstance(outcome, dict)
    with pytest.raises(CheckpointError, match="the evaluation of step 3 is damaged"):
        Evaluation.from_record({**record, "outcome": {**outcome, **damaged}})


def test_no_interval_leaves_what_is_possible() -> None:
    """Two problems, of which one is gained: +50 points, and never more than +100."""
    changes = gains(evaluation([0, 0]), evaluation([1, 0]))
    for name in ("greedy", "sampled"):
        assert -1 <= changes[name].low < changes[name].value < changes[name].high <= 1
    assert changes["greedy"].high == 1
    sentence = conclude_run(evaluation([0, 0]), evaluation([1, 0]), seconds=1).sentence
    assert "+50 points" in sentence
    assert all(-100 <= int(end) <= 100 for end in re.findall(r"[+-]\d+", sentence))
    assert conclude_run(evaluation([0]), evaluation([1]), seconds=1).word == "cannot tell"


def on(problems: str, verdict: str = "v", rewards: str = "r", right: str = "") -> Evaluation:
    """An evaluation of problems that are a letter each; those in ``right`` are correct."""
    found = np.array([p in right for p in problems])
    basis = Basis(verdict, rewards, tuple(problems))
    return Evaluation(found, 4 * found, found, found + 1.0, samples=4, verdict="answer", basis=basis)


def test_problems_are_paired_by_what_they_are_and_not_by_their_place() -> None:
    before, after = on("abcdef", right="abc"), on("gfedcba", right="abc")
    pair = on_shared_problems(before, after)
    assert [e.greedy.tolist() for e in pair] == [[True] * 3 + [False] * 3] * 2
    assert gains(before, after)["greedy"].value == 0
    assert [len(e.greedy) for e in on_shared_problems(on("aab"), on("abb"))] == [2, 2], "one of each twin"
    assert conclude_run(on("ab"), on("cd"), 1.0).sentence == (
        "cannot tell: the held-out problems at first and at the end have none in common"
    )
    assert math.isnan(gains(on("ab"), on("cd"))["sampled"].value)


def test_another_function_of_the_same_name_says_nothing_of_the_policy() -> None:
    many = "abcdefghijklmnopqrstuvwxyz"
    conclusion = conclude_run(on(many), on(many, verdict="w", rewards="s", right=many), 1.0)
    assert conclusion.sentence.startswith(
        "cannot tell: answer, which says what is correct, is not the same at"
    )
    other_weights = conclude_run(on(many), on(many, rewards="s", right=many), 1.0)
    assert other_weights.word == "learned", "the weights say nothing of what is correct"
    assert "reward" not in other_weights.sentence
    assert conclude_run(on(many), on(many, rewards="s"), 1.0).word != "learned"


def test_what_was_measured_is_in_the_record() -> None:
    measured = on("abc", right="a")
    assert Evaluation.from_record(measured.record()).basis == measured.basis
    record = measured.record()
    record["basis"] = {**asdict(measured.basis), "problems": ["a"]}
    with pytest.raises(CheckpointError, match="damaged"):
        Evaluation.from_record(record)


def test_a_basis_follows_sources_settings_and_rows_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "helped", types.ModuleType("helped"))
    sys.modules["helped"].least = 1

    def basis(text: str, where: str, answer: str = "4", **settings: object) -> Basis:
        folder = tmp_path / where
        folder.mkdir(exist_ok=True)
        mine = "from helped import least\ndef right(completion, more=0):\n    return 1.0\n"
        (folder / "mine.py").write_text(mine)
        (folder / "helped.py").write_text(text)
        rewards = load_rewards([{"mine.py:right": settings}], folder)
        problem = EncodedProblem(Problem("p:1", "2+2=", {"answer": answer}), np.array([1]))
        return basis_of([problem], rewards)

    first = basis("least = 1", "a")
    assert basis("least = 1", "b") == first, "wherever it lies"
    assert basis("least = 2", "c").verdict != first.verdict, "also what it imports"
    assert basis("least = 1", "d", more=1).verdict != first.verdict
    heavier = basis("least = 1", "e", weight=2.0)
    assert (heavier.verdict, heavier.problems) == (first.verdict, first.problems)
    assert heavier.rewards != first.rewards
    assert basis("least = 1", "f", answer="5").problems != first.problems


OWN_MARKS = Thoughts("[THINK]", "[/THINK]")


@pytest.mark.parametrize(
    ("thoughts", "verdict", "drawn"),
    [
        # One answer under three thoughts, a wrong one twice in the same words; the fifth is the greedy one.
        (TAGS, "plain", ["<think>{}</think>\n\n0", "<think>so</think>9"]),
        (TAGS._replace(begun=True), "plain", ["{}</think> 0 ", "so</think>9"]),
        (OWN_MARKS, "plain", ["[THINK]{}[/THINK]0", "[THINK]so[/THINK]9"]),
        (
            OWN_MARKS._replace(begun=True),
            {"exact_answer": {"rule": "whole"}},
            ["9 {}[/THINK]0", "so[/THINK]9"],
        ),
        (
            TAGS._replace(begun=True),
            {"exact_answer": {"rule": "last_number"}},
            ["{}</think>0", "9 so it is 9"],
        ),
    ],
)
def test_a_majority_is_of_answers_without_the_thoughts_before_them(
    thoughts: Thoughts, verdict: object, drawn: list[str]
) -> None:
    def plain(completion: str) -> float:
        return float(completion.strip().endswith("0"))

    right, wrong = drawn
    votes = iter(["", wrong, right.format("a"), wrong, right.format("b"), right.format("c")])
    sampler = ScriptedSampler(lambda *_: next(votes))
    asked = [replace(p, problem=replace(p.problem, thoughts=thoughts)) for p in prompted(1)]
    rewards = load_rewards([plain if verdict == "plain" else verdict], None)
    found = evaluate(asked, sampler, rewards, SamplingParams(), 5, 0, lambda *_: None)
    assert found.correct.tolist() == [3]
    assert found.majority.tolist() == [True]


def test_thoughts_that_never_end_are_no_vote() -> None:
    votes = iter(["", *["so it may be 7"] * 3, *["so</think>0"] * 2])
    thought = [
        replace(p, problem=replace(p.problem, thoughts=TAGS._replace(begun=True))) for p in prompted(1)
    ]
    sampler = ScriptedSampler(lambda *_: next(votes))
    rewards = load_rewards([{"exact_answer": {"rule": "last_number"}}], None)
    found = evaluate(thought, sampler, rewards, SamplingParams(), 5, 0, lambda *_: None)
    assert found.majority.tolist() == [True]


def test_a_majority_is_of_last_turns_where_a_tool_has_answered() -> None:
    def told(call: str, answer: str) -> Completion:
        turns = (
            {"role": "assistant", "content": call},
            {"role": "tool", "content": "?"},
            {"role": "assistant", "content": answer},
        )
        return replace(completion_of(call + answer), transcript=Transcript(turns))

    def last(completion: str) -> float:
        return float(completion.endswith("0"))

    drawn = [told("x", "9"), told("x", "9"), *(told(call, "0") for call in "abc")]
    group = load_rewards([last], None).score_group(prompted(1)[0].problem, np.zeros(1, np.int64), drawn)
    assert majority(group, load_rewards([last], None))
