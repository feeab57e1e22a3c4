"""A small run in files, as a cluster's processes read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

REWARDS = """
import os, pathlib
def varied(completion):
    pathlib.Path(__file__).with_name("seen").joinpath(os.environ.get("RAY_RAYLET_PID", "none")).touch()
    return len(completion) + sum(map(ord, completion)) % 7
"""
RUN: dict[str, Any] = {
    "data": {"task": "last_digit", "train_size": 64, "test_size": 16},
    "rewards": ["rewards.py:varied"],
    "rollout": {"group_size": 4, "prompts_per_step": 4, "max_tokens": 12},
    "algorithm": "grpo",
    "train": {"steps": 8, "lr": 1e-3, "save_every": 2},
    "eval": {"problems": 8, "samples": 2},
    "threads": 1,
}


def write(folder: Path, **settings: Any) -> Path:
    (folder / "seen").mkdir(parents=True)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "run.yaml").write_text(yaml.safe_dump({**RUN, **settings}))
    return folder / "run.yaml"
