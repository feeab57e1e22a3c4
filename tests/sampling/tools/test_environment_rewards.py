"""Rewards that read what has become of an environment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from covey.rewards.environments import environment_reward
from covey.rewards.loading import load_rewards
from covey.rewards.reward_checks import rehearse
from covey.sampling.tools.use import initial_state
from covey_verify.errors import ConfigError, RewardError
from covey_verify.sandbox.wire import Attributes, decode_value, encode_value
from covey_verify.types import Score
from tests.sampling.tools.environments import FILE, ROW, completion, given, toolbox


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(FILE)
    return tmp_path


def one(completion: str, environment: Attributes) -> float:
    return environment.total + len(completion)


def several(completions: list[str], environments: list[Attributes], **_: object) -> list[float]:
    return [own.total for own in environments]


def test_rewards_read_attributes() -> None:
    assert one(**given(one, {"total": 3})) == 4  # type: ignore[arg-type]
    assert several(**given(several, {"total": 3}, {"total": 4})) == [3, 4]  # type: ignore[arg-type]
    assert given(one, None)["environment"] is None
    assert given(one, None, columns={"environment": "linux"})["environment"] == "linux"
    assert given(one, {})["environment"] == Attributes(), "one without attributes has not died"
    state = Attributes(total=3, cells=[1, {"a": None}])
    assert decode_value(encode_value([state])) == [state]


@pytest.mark.parametrize("isolate", ["worker", "process", "inline"])
def test_a_reward_reads_environments_in_a_worker_a_process_and_inline(tmp_path: Path, isolate: str) -> None:
    (tmp_path / "r.py").write_text(
        "from covey import reward\n"
        f"@reward(isolate={isolate!r})\n"
        "def total(completions, environments, **_):\n    return [e.total for e in environments]\n"
    )
    rewards = load_rewards(["r.py:total"], tmp_path)
    scored = rewards.score_group(ROW, np.zeros(1, np.int64), [completion({"total": n}) for n in (2, 3)])
    assert scored.rewards.tolist() == [2, 3]


@pytest.mark.parametrize("isolate", ["worker", "inline"])
def test_an_environment_that_is_gone_costs_its_own_completion_alone(tmp_path: Path, isolate: str) -> None:
    (tmp_path / "r.py").write_text(
        f"from covey import reward\n@reward(isolate={isolate!r}, weight=1.0)\n"
        "def group(completions, environments, **_):\n"
        "    most = max(e.total for e in environments)\n"
        "    return [float(e.total == most) for e in environments]\n"
        f"@reward(isolate={isolate!r}, weight=0.0)\n"
        "def single(completion, environment):\n    return environment.total\n"
        f"@reward(isolate={isolate!r}, weight=0.0)\n"
        "def knows(completions, environments=None):\n"
        "    return [0.5 if e is None else 1 for e in environments]\n"
    )
    rewards = load_rewards([{"r.py:group": {"verdict": True}}, "r.py:single", "r.py:knows"], tmp_path)
    states = [{"total": 2}, None, {"total": 3}]
    scored = rewards.score_group(ROW, np.zeros(1, np.int64), [completion(s) for s in states])
    assert scored.rewards.tolist() == [0, 0, 1]
    assert {n: [s.status for s in own.scores] for n, own in scored.components.items()} == {
        "group": ["ok", "crashed", "ok"], "single": ["ok", "crashed", "ok"], "knows": ["ok"] * 3,
    }  # fmt: skip
    assert scored.components["single"].values.tolist() == [2, 0, 3]
    assert scored.components["knows"].values.tolist() == [1, 0.5, 1]
    lost = rewards.score_group(ROW, np.zeros(1, np.int64), [completion(None)] * 2)
    assert lost.rewards.tolist() == [0, 0]


def test_environment_reward_reads_the_environments_reward() -> None:
    assert environment_reward("", Attributes(reward=0.25)) == Score(0.25)
    assert environment_reward("", None) == Score(
        0.0, "crashed", detail="the environment hung or died, or its get_reward raised"
    )
    with pytest.raises(
        RewardError, match="neither a method get_reward nor an attribute reward; it has total"
    ):
        environment_reward("", Attributes(total=1))


def test_a_reward_that_asks_for_an_environment_needs_one(folder: Path) -> None:
    rewards = load_rewards(["environment_reward"], folder)
    with pytest.raises(
        ConfigError, match=r"asks for the completion's environment.*rollout.tools.environment"
    ):
        rehearse(ROW, rewards)
    assert rehearse(ROW, rewards, initial_state(toolbox(folder), ROW)).rewards.tolist() == [0.5, 0.5]
