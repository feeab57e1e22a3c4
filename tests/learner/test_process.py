"""Process supervision: every reward moves the weights, by its steps or its value, its weight and its gate."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import rows_of
from tests.training.runs import metrics_of, start

from covey.errors import GuardStop
from covey_verify.errors import ConfigError
from covey_verify.types import Score


def outcome(completion: str) -> float:
    return float(len(completion) % 2)


def style(completion: str) -> float:
    return (sum(map(ord, completion)) % 7) / 7


def halves(completion: str, token_ends: list[int]) -> Score:
    """Two steps of about equal length."""
    middle, end = (len(token_ends) + 1) // 2, len(token_ends)
    first, second = 1.0 - len(completion) % 3, 1.0 - (sum(map(ord, completion)) % 2) * 2
    return Score(min(first, second), steps=[(0, middle, first), (middle, end, second)][: min(end, 2)])


def quarter(completion: str, token_ends: list[int]) -> Score:
    """One step at the beginning, judged by something else."""
    return Score(1.0, steps=[(0, (len(token_ends) + 3) // 4, float(sum(map(ord, completion)) % 5))])


def trained(folder: Path, *rewards: Any) -> tuple[str, dict[str, Any]]:
    """The final weights of a run as a hash, and its last metrics."""
    start(folder, algorithm="grpo_process", rewards=rewards, train={"steps": 2})
    weights = (folder / "final" / "model.safetensors").read_bytes()
    return hashlib.sha256(weights).hexdigest(), metrics_of(folder)[-1]


@pytest.mark.parametrize(("algorithm", "reward"), [("grpo_process", 3.0), ("grpo", 0.25)])
def test_held_out_problems_earn_what_training_calls_a_reward(
    tmp_path: Path, algorithm: str, reward: float
) -> None:
    def stepwise(completion: str) -> Score:
        differs = 1e-9 * style(completion)  # a group whose rewards all tie would train nothing
        return Score(0.25 + differs, steps=[(0, 1, 3.0 + differs)])

    start(tmp_path / "run", algorithm=algorithm, rewards=(stepwise,), train={"steps": 1})
    (metrics,) = metrics_of(tmp_path / "run")
    evaluations = rows_of(tmp_path / "run" / "evals.jsonl")
    found = [metrics["reward/mean"], *(record["reward"] for record in evaluations)]
    assert len(found) == 3
    assert found == pytest.approx([reward] * 3, abs=1e-6)


def test_configs_that_differ_in_one_reward_end_with_other_weights(tmp_path: Path) -> None:
    alone: dict[Any, Any] = {outcome: {"weight": 0, "verdict": True}}
    judged: dict[Any, Any] = {outcome: {"weight": 1, "verdict": True}}
    configs: dict[str, list[Any]] = {
        "steps alone": [halves, alone],
        "an outcome": [halves, judged],
        "a heavy outcome": [halves, {outcome: {"weight": 100, "verdict": True}}],
        "a third reward": [halves, judged, {style: {"weight": 5, "verdict": False}}],
        "light steps": [{halves: 0.01}, judged],
        "gated steps": [{halves: {"gated_by": "outcome:correct"}}, judged],
        "two kinds of steps": [halves, quarter, judged],
    }
    found = {name: trained(tmp_path / name, *rewards) for name, rewards in configs.items()}
    assert len({weights for weights, _ in found.values()}) == len(configs)


def test_the_order_of_process_rewards_changes_nothing(tmp_path: Path) -> None:
    judged: dict[Any, Any] = {outcome: {"weight": 1, "verdict": True}}
    one, other = (
        trained(tmp_path / str(i), *r)
        for i, r in enumerate(([halves, quarter, judged], [judged, quarter, halves]))
    )
    assert one[0] == other[0]


def test_a_built_in_task_brings_a_verifier_of_its_steps_and_the_log_has_them(tmp_path: Path) -> None:
    with pytest.raises(GuardStop, match="without changing a single weight"):  # the model knows nothing yet
        start(tmp_path / "run", algorithm="grpo_process", rewards=(), train={"steps": 1})
    text = (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert set(rows[0]["components"]) == {"math_answer", "answer_format", "partial_sums"}
    for row in rows:
        (steps,) = row["steps"].values()
        assert [steps[0][0], steps[-1][1]] == [0, row["tokens"]]
        outcomes = row["components"]["math_answer"] + 0.1 * row["components"]["answer_format"]
        assert row["reward"] == outcomes + sum(value for *_, value in steps)


def test_a_config_without_step_rewards_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    rewards = ("math_answer", "answer_format")
    with pytest.raises(ConfigError, match="no reward judges steps"):
        start(tmp_path / "run", algorithm="grpo_process", rewards=rewards, model=str(tmp_path / "none"))
