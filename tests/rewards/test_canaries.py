"""Verifiers are watched while they judge: one that is taken over stops the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.fakes import completion

from covey.errors import RewardError
from covey.rewards.base import BUILT_IN, load_rewards
from covey.rewards.canaries import PATIENCE, canaries, verdict_metrics, watch
from covey.rewards.contract import Reward, reward
from covey.rewards.scorer import Rewards
from covey.types import Problem, Score

PROBLEM = Problem("p", "2+2=", {"answer": "4"})


def group(rewards: Rewards, *texts: str, problem: Problem = PROBLEM):
    return rewards.judge(problem, np.array([1]), [completion(t) for t in texts])


class Verifier:
    """Right until it is taken over, then it pays everything, or nothing."""

    def __init__(self) -> None:
        self.verdict: float | None = None
        self.function = reward(example=lambda row: row["answer"], wrong=lambda row: "canary")(self._judge())

    def _judge(self):
        def judge(completion, answer):
            return float(completion == answer) if self.verdict is None else self.verdict

        return judge


def test_a_verifier_that_pays_everything_is_found_at_once() -> None:
    verifier = Verifier()
    rewards = Rewards([Reward("judge", verifier.function)])
    groups = [group(rewards, "4", "5")]
    watch(rewards, groups)
    verifier.verdict = 1.0
    with pytest.raises(RewardError, match="known to be wrong: 'canary'"):
        watch(rewards, groups)


def test_one_that_pays_nothing_any_more_is_found_after_a_while() -> None:
    verifier = Verifier()
    rewards = Rewards([Reward("judge", verifier.function)])
    groups = [group(rewards, "4")]
    verifier.verdict = 0.0
    for _ in range(PATIENCE - 1):
        watch(rewards, groups)
    with pytest.raises(RewardError, match="known to be right: '4'"):
        watch(rewards, groups)


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
    assert [kind for kind, _ in canaries(rewards[0], problem)] == ["right", "wrong"]
    watch(rewards, [group(rewards, "x", problem=problem)])


def test_programs_that_go_on_have_canaries_of_their_own() -> None:
    row = {
        "setup": "def f(x):\n",
        "solution": "    return x * x\n",
        "entry_point": "f",
        "tests": [{"input": [3], "output": 9}],
    }
    rewards = load_rewards([{"code_tests": {"form": "continue"}}], Path())
    watch(rewards, [group(rewards, "    return 1\n", problem=Problem("p", "?", row))])


def test_statuses_parts_and_logged_numbers_become_metrics() -> None:
    def rich(completion, log_metric):
        log_metric("length", len(completion))
        if completion == "none":
            return Score(0.0, "no_answer")
        return Score(1.0, parts={"effort": 0.5})

    rewards = Rewards([Reward("rich", rich)])
    groups = [group(rewards, "none", "some"), group(rewards, "some", "some")]
    metrics = verdict_metrics(groups, rewards.take_logged())
    assert metrics == {"reward/rich/no_answer": 0.25, "reward/rich/effort": 0.5, "user/length": 4.0}
    assert rewards.take_logged() == {}
