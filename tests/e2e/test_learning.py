"""A tiny model really learns: reward rises within a minute on one core."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import covey


def echo_reward(completion: str, answer: str) -> float:
    """The share of the completion's first characters that are the wanted letter."""
    return sum(c == answer for c in completion[:4]) / 4


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo"])
def test_reward_rises_from_random_weights(tmp_path: Path, algorithm: str) -> None:
    rows = [f'{{"prompt": "say {c}{i}:", "answer": "{c}"}}' for i in range(4) for c in "ab"]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    covey.train(
        quiet=True,
        model="tiny",
        output=tmp_path / "run",
        data={"train": tmp_path / "train.jsonl"},
        rewards=(echo_reward,),
        rollout={"group_size": 16, "prompts_per_step": 8, "max_tokens": 4},
        algorithm={"name": algorithm, "kl": None},
        train={"steps": 60, "lr": 2e-3, "betas": (0.9, 0.95)},
        threads=1,
    )
    rewards = [m["reward/mean"] for m in _read(tmp_path / "run" / "metrics.jsonl")]
    assert np.mean(rewards[:3]) < 0.1
    assert np.mean(rewards[-3:]) > 0.4, rewards


def _read(path: Path) -> list[dict]:
    import json

    return [json.loads(line) for line in path.read_text().splitlines()]
