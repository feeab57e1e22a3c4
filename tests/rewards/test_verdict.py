"""Which reward says what is correct: declared or beyond doubt, never by its place in the list."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes import ScriptedSampler, completion, prompted

from covey.config.algorithm import build_algorithm
from covey.config.sampling import Rollout
from covey.objective.advantages import component_zscore
from covey.objective.algorithms import PRESETS
from covey.objective.diagnostics import group_metrics
from covey.rewards.groups import combine, with_credit
from covey.rewards.loading import load_rewards
from covey.rollouts.loop import Rollouts
from covey.sampling.base import SamplingParams
from covey.training.evaluation import evaluate
from covey.types import Problem
from covey_verify.contract import reward
from covey_verify.errors import ConfigError
from covey_verify.types import Score, StepRewards


def mine(completion: str) -> float:
    return float(len(completion) > 3)


def other(completion: str) -> float:
    return 0.3 * len(completion)


@reward(verdict=True)
def declared(completion: str) -> float:
    return 1.0


@reward(verdict=False)
def taste(completion: str) -> float:
    return 0.7 * len(completion)


ANSWER: dict[str, Any] = {"exact_answer": {"rule": "whole"}}


@pytest.mark.parametrize(
    ("specs", "verdict"),
    [
        (["math_answer"], "math_answer"),
        (["think_format"], "think_format"),
        ([mine], "mine"),
        (["think_format", "math_answer"], "math_answer"),
        (
            [{"judge": {"criteria": {"Good?": 1.0}, "url": "http://x", "model": "m"}}, "tool_calls"],
            "tool_calls",
        ),
        (["code_tests", "compiles", {"repetition": 0.1}], "code_tests"),
        (["step_labels", "calculations", "gym_answer"], "gym_answer"),
        ([mine, {"think_format": 0.1}], "mine"),
        (["think_format", declared], "declared"),
        (["math_answer", taste], "math_answer"),
        (["math_answer", {"think_format": {"verdict": True}}], "think_format"),
        (
            ["math_answer", {"math_answer": {"name": "tagged", "rule": "answer_tag", "verdict": True}}],
            "tagged",
        ),
        ([mine, {"math_answer": {"verdict": False}}], "mine"),
        ([{"math_answer": {"weight": 0, "verdict": True}}, mine], "math_answer"),
    ],
)
def test_the_verdict_is_declared_or_the_only_one_it_can_be(specs: list[Any], verdict: str) -> None:
    for order in itertools.permutations(specs):
        assert load_rewards(list(order), Path(), sandbox=None).verdict.name == verdict


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (
            [mine, "math_answer"],
            r"math_answer, mine: which of them.*\{math_answer: \{verdict: true\}\}.*false`",
        ),
        (["math_answer", declared, other], r"declared, math_answer, other: which.*\{declared: \{verd"),
        ([declared, mine, "smt"], r"declared, smt, mine: which.*\{declared: \{verdict: true"),
        ([mine, other], r"mine, other: which of them"),
        (["math_answer", {"math_answer": {"name": "tagged"}}], "math_answer, tagged: which of them"),
        (["think_format", {"repetition": 0.1}], "repetition, think_format: which of them"),
    ],
)
def test_what_cannot_be_known_is_asked_in_any_order(specs: list[Any], says: str) -> None:
    for order in (specs, specs[::-1]):
        rewards = load_rewards(order, Path())  # what only scores needs no verdict
        with pytest.raises(ConfigError, match=says):
            _ = rewards.verdict


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (
            [{"math_answer": {"verdict": True}}, {"think_format": {"verdict": True}}],
            "each says `verdict: true`",
        ),
        ([{"math_answer": {"verdict": "yes"}}], "must be true or false"),
    ],
)
def test_a_wrong_declaration_is_refused(specs: list[Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_rewards(specs, Path())


def test_the_order_of_rewards_changes_nothing_but_that_of_columns() -> None:
    """.1, .2 and .3 do not add up to the same bits in every order, unless they are rounded once."""

    def answer(prompt: np.ndarray, stream: int) -> str:
        return (str(prompt[0] - 1), "wrong", "no, wrong", "wrong")[stream % 4]

    specs = [ANSWER, {taste: 0.1}, {mine: {"weight": 0.2, "verdict": False}}, "short_in_group"]
    seen = []
    for order in itertools.permutations(specs):
        rewards = load_rewards(list(order), Path())
        rollout = Rollout(
            group_size=4, prompts_per_step=3, max_tokens=8, curriculum="frontier", max_resampling_rounds=2
        )
        algorithm = build_algorithm({"name": "grpo", "filter": "mixed"})
        source = Rollouts(prompted(9), ScriptedSampler(answer), rewards, rollout, algorithm, seed=0)
        batches = list(islice(source.batches(), 3))
        measured = evaluate(
            prompted(4), ScriptedSampler(answer), rewards, SamplingParams(), 4, 0, lambda *_: None
        )
        groups = [g for b in batches for g in (*b.groups, *b.filtered)]
        seen.append(
            (
                [g.problem.id for b in batches for g in b.groups],
                [g.rewards.tolist() for g in groups],
                [g.correct.tolist() for g in groups],
                group_metrics(groups),
                batches[-1].position,
                measured.record(),
            )
        )
    assert all(other == seen[0] for other in seen)
    assert 0 < seen[0][3]["accuracy"] < 0.5  # exact_answer's, whatever else is paid


def test_a_sum_is_the_same_bits_in_any_order_and_a_majority_votes_by_the_verdicts_rule() -> None:
    values = {"a": np.array([0.1]), "b": np.array([0.2]), "c": np.array([0.3])}
    sums = {
        float(combine(dict(order), dict.fromkeys(values, 1.0))[0])
        for order in itertools.permutations(values.items())
    }
    assert sums == {0.6}
    for specs in ([{"exact_answer": {"rule": "answer_tag"}}, taste], [taste, "exact_answer"]):
        votes = iter(["?", "9", "a <answer>0</answer>", "9", "b <answer>0</answer>"])
        sampler = ScriptedSampler(lambda *_, votes=votes: next(votes))
        rewards = load_rewards(specs, Path())
        found = evaluate(prompted(1), sampler, rewards, SamplingParams(), 4, 0, lambda *_: None)
        assert found.majority.tolist() == [True]


def test_step_rewards_of_all_functions_count_with_weight_and_gate() -> None:
    def lines(completion: str) -> Score:
        return Score(1.0, steps=[(0, 2, 1.0), (2, 3, -1.0)])

    def whole(completion: str) -> Score:
        return Score(1.0, steps=[(0, 3, 4.0)])

    gate: Any = {ANSWER_NAME: {"rule": "whole"}}
    specs = [{lines: 0.5}, {whole: {"gated_by": f"{ANSWER_NAME}:correct"}}, gate]
    problem = Problem("p", "2+2=", {"answer": "4"})
    for order in itertools.permutations(specs):
        rewards = load_rewards(list(order), Path())
        group = rewards.score_group(problem, np.array([1]), [completion("4"), completion("5")])
        assert {name: c.steps for name, c in group.components.items() if c.steps} == {
            "lines": (StepRewards([1.0, -1.0], [1, 2]),) * 2,
            "whole": (StepRewards([4.0], [2]), StepRewards([0.0], [2])),
        }
        # Half of 1 - 1, 4 where the gate is open, and the value of the answer.
        assert group.rewards.tolist() == [0.5 + 1.0 + 1.0, 0.5]
        assert with_credit(group, "step").rewards.tolist() == [4.0 + 1.0, 0.0]


def test_by_step_a_group_is_dead_only_where_no_step_differs() -> None:
    def lines(completion: str) -> Score:
        return Score(1.0, steps=[(0, 1, 1.0), (1, 3, -1.0 if completion == "4" else 1.0)])

    same = load_rewards([lines], Path()).score_group(
        Problem("p", "?"), np.array([1]), [completion("4"), completion("4")]
    )
    assert same.dead  # for an algorithm that credits completions
    assert not with_credit(same, "step").dead  # the steps of each differ from one another
    tied = load_rewards([lines], Path()).score_group(
        Problem("p", "?"), np.array([1]), [completion("5"), completion("6")]
    )
    assert with_credit(tied, "step").dead
    loads = load_rewards([{lines: 0.0}, {mine: {"verdict": True}}], Path())
    unpaid = loads.score_group(Problem("p", "?"), np.array([1]), [completion("4"), completion("4")])
    assert with_credit(unpaid, "step").dead  # what differs weighs nothing


def test_by_component_a_group_is_dead_only_where_each_reward_ties() -> None:
    """What is normalised reward by reward differs where two sums are the same: GDPO's very case."""

    def first(completion: str) -> float:
        return 1.0 if completion == "4" else 0.0

    def second(completion: str) -> float:
        return 0.0 if completion == "4" else 2.0

    loads = load_rewards([{first: {"weight": 2.0, "verdict": True}}, {second: 1.0}], Path())
    problem, both = Problem("p", "?"), [completion("4"), completion("5")]
    group = with_credit(loads.score_group(problem, np.array([1]), both), PRESETS["gdpo"].credit)
    assert group.rewards.tolist() == [2.0, 2.0]
    assert not group.dead
    assert (
        component_zscore(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([2.0, 1.0])).abs().min() > 0.7
    )
    assert with_credit(group, PRESETS["grpo"].credit).dead
    again = loads.score_group(problem, np.array([1]), [completion("4"), completion("4")])
    assert with_credit(again, PRESETS["gdpo"].credit).dead
    measured = load_rewards([{first: {"weight": 2.0, "verdict": True}}, {second: 0.0}], Path())
    apart = measured.score_group(problem, np.array([1]), [completion("5", 3), completion("5", 3)])
    second = replace(apart.components["second"], values=np.array([0.0, 2.0]))
    apart = replace(apart, components={**apart.components, "second": second})
    assert with_credit(apart, PRESETS["gdpo"].credit).dead, "what weighs nothing keeps no group alive"
    paid = replace(apart, components={**apart.components, "second": replace(second, weight=1.0)})
    assert not with_credit(paid, PRESETS["gdpo"].credit).dead


ANSWER_NAME = "exact_answer"


def test_a_group_of_several_rewards_does_not_guess() -> None:
    rewards = load_rewards([ANSWER, "think_format"], Path())
    group = rewards.score_group(Problem("p", "2+2=", {"answer": "4"}), np.array([1]), [completion("4")])
    assert [name for name, c in group.components.items() if c.verdict] == [ANSWER_NAME]
    unmarked = {name: replace(c, verdict=False) for name, c in group.components.items()}
    with pytest.raises(AssertionError, match="which of"):
        _ = replace(group, components=unmarked).correct
