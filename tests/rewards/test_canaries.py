"""Verifiers are watched while they judge: one that is taken over stops the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes import completion

from covey.objective.diagnostics import score_metrics
from covey.rewards.contract import Reward
from covey.rewards.loading import BUILT_IN, load_rewards
from covey.rewards.reward_checks import MAX_REFUSALS, ask_canaries, paid_elsewhere
from covey.rewards.scorer import Rewards, Scorer
from covey.types import Problem
from covey_verify.contract import canaries, reward
from covey_verify.errors import RewardError
from covey_verify.types import Score

PROBLEM = Problem("p", "2+2=", {"answer": "4"})


class Verifier:
    """Right until it is taken over, then it pays everything, or nothing."""

    def __init__(self) -> None:
        self.verdict: float | None = None
        self.function = reward(example=lambda row: row["answer"], counterexample=lambda row: "canary")(
            self._judge()
        )

    def _judge(self):
        def judge(completion, answer):
            return float(completion == answer) if self.verdict is None else self.verdict

        return judge


def test_a_verifier_that_pays_everything_is_found_at_once() -> None:
    verifier = Verifier()
    rewards = Rewards([Reward("judge", verifier.function)])
    assert ask_canaries(Scorer(rewards), PROBLEM, {}) == {"judge": 0}
    verifier.verdict = 1.0
    with pytest.raises(RewardError, match="known to be incorrect: 'canary'"):
        ask_canaries(Scorer(rewards), PROBLEM, {})


def contains(completion: str, answer: str) -> float:
    return float(answer in completion)


@pytest.mark.parametrize(("text", "elsewhere"), [("the answer is {}", 0.0), ("0 1 2 3 4 5", 1.0)])
def test_a_text_that_is_paid_for_every_problem_shows(text: str, elsewhere: float) -> None:
    rewards = Rewards([Reward("judge", contains)])
    problems = [Problem(f"p{n}", f"{n}=", {"answer": str(n)}) for n in range(4)]
    groups = [
        rewards.score_group(
            p, np.array([1]), [completion(text.format(p.columns["answer"])), completion("no")]
        )
        for p in problems
    ]
    assert paid_elsewhere(Scorer(rewards), groups) == {"reward/paid_elsewhere": elsewhere}
    assert paid_elsewhere(Scorer(rewards), groups[:1]) == {}, "there is no other problem"
    nothing = [rewards.score_group(p, np.array([1]), [completion("no")]) for p in problems]
    assert paid_elsewhere(Scorer(rewards), nothing) == {}, "nothing is correct"


def of_the_text(completion: str) -> float:
    return float("5" in completion)


def takes_all(completions: list[str], prompts: list[str], **columns: object) -> list[float]:
    return [of_the_text(text) for text in completions]


def reads_some(completions: list[str], **columns: list[str]) -> list[float]:
    return [float(a in text) for text, a in zip(completions, columns["answer"], strict=True)]


@pytest.mark.parametrize(
    ("function", "found"),
    [(of_the_text, {}), (takes_all, {}), (reads_some, {"reward/paid_elsewhere": 1.0})],
)
def test_a_verdict_that_looks_at_the_text_only_is_not_called_fooled(function: Any, found: object) -> None:
    rewards = Rewards([Reward("judge", function)])
    columns = {"completion": "a worked one, which no function is given"}
    problems = [Problem(f"p{n}", f"{n}=", {"answer": str(n), **columns}) for n in range(4)]
    groups = [rewards.score_group(p, np.array([1]), [completion("0 1 2 3 4 5")]) for p in problems]
    assert paid_elsewhere(Scorer(rewards), groups) == found


def test_one_that_pays_nothing_any_more_is_found_after_a_while() -> None:
    verifier = Verifier()
    rewards = Rewards([Reward("judge", verifier.function)])
    verifier.verdict = 0.0
    refused: dict[str, int] = {}
    for times in range(1, MAX_REFUSALS):
        refused = ask_canaries(Scorer(rewards), PROBLEM, refused)
        assert refused == {"judge": times}
    with pytest.raises(RewardError, match="known to be correct: '4'"):
        ask_canaries(Scorer(rewards), PROBLEM, refused)
    verifier.verdict = None
    assert ask_canaries(Scorer(rewards), PROBLEM, refused) == {"judge": 0}


ROWS = {
    "math_answer": {"answer": "4"},
    "exact_answer": {"answer": "Rome"},
    "code_tests": {
        "tests": [{"input": [2], "output": 4}],
        "entry_point": "f",
        "solution": "def f(x): return x * x",
    },
    "tool_calls": {"tool_calls": [{"name": "a", "arguments": {"b": 1}}]},
}


@pytest.mark.parametrize("name", ROWS)
def test_built_in_verifiers_have_canaries_and_pass(name: str) -> None:
    problem = Problem("p", "?", ROWS[name])
    rewards = load_rewards([name], Path())
    assert BUILT_IN[name] is rewards[0].function
    assert [kind for kind, _ in canaries(rewards[0], problem.columns)] == ["correct", "incorrect"]
    assert ask_canaries(Scorer(rewards), problem, {}) == {name: 0}


def test_programs_that_continue_have_canaries_of_their_own() -> None:
    row = {
        "setup": "def f(x):\n",
        "solution": "    return x * x\n",
        "entry_point": "f",
        "tests": [{"input": [3], "output": 9}],
    }
    rewards = load_rewards([{"code_tests": {"form": "continue"}}], Path())
    assert ask_canaries(Scorer(rewards), Problem("p", "?", row), {}) == {"code_tests": 0}


def test_statuses_parts_and_logged_numbers_become_metrics() -> None:
    def rich(completion, log_metric):
        log_metric("length", len(completion))
        if completion == "none":
            return Score(0.0, "no_answer")
        return Score(1.0, metrics={"effort": 0.5})

    rewards = Rewards([Reward("rich", rich)])
    scorer, groups = Scorer(rewards), []
    for texts in (("none", "some"), ("some", "some")):
        group = scorer.begin_group(PROBLEM, np.array([1]), 2)
        for sample, text in enumerate(texts):
            group.add(sample, completion(text))
        groups.append(group.result())
    metrics = score_metrics(groups, scorer.stats.logged)
    assert metrics == {"reward/rich/no_answer": 0.25, "reward/rich/effort": 0.5, "user/length": 4.0}
