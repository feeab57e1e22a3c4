"""reasoning-gym's tasks with its scorers in the sandbox, where the extra is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.fakes import completion

from covey.errors import ConfigError, SandboxUnavailable
from covey.rewards.base import load_rewards
from covey.rewards.gym import harmless
from covey.tasks.gym import gym_problems


@pytest.mark.parametrize(
    ("answer", "data"),
    [
        ("3*(x+1)", True),
        ("[[1, 2], [3]]", True),
        ("(5 + 3) * 2 - x", True),
        ("__import__('os')", False),
        ("().__class__", False),
        ("exit()", False),
        ("x(y:=1)", False),
        ("open('f')", False),
    ],
)
def test_only_data_reaches_the_scorers_that_execute(answer: str, data: bool) -> None:
    assert harmless(answer, "x") is data


@pytest.mark.parametrize("name", ["chain_sum", "countdown"])
def test_the_oracle_is_paid_and_nothing_near_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    try:
        rewards = load_rewards(["gym_answer"], Path())
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    problems = gym_problems(f"gym:{name}", "train", 3)
    assert [p.prompt for p in gym_problems(f"gym:{name}", "train", 3)] == [p.prompt for p in problems]
    witness = tmp_path / "witness"
    for problem in problems:
        oracle = str(problem.columns["answer"])
        answers = (oracle, "1" + oracle, f"open('{witness}', 'w')", "")
        texts = [completion(f"<answer>{a}</answer>") for a in answers]
        assert rewards.score_group(problem, np.array([1]), texts).rewards.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert not witness.exists()


def test_a_missing_extra_or_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.tasks.gym.importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"covey\[gym\]"):
        gym_problems("gym:chain_sum", "train", 3)
