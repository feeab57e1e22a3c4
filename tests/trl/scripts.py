"""Rewards and configs of scripts that were written for TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covey.trl import (
    GRPOConfig,
    RLOOConfig,
)


def by_form(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def quick(config: Any, folder: Path, **names: Any) -> Any:
    """A config of a few fast steps."""
    given = {
        "output_dir": folder / "run",
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "disable_tqdm": True,
        **names,
    }
    if config in (GRPOConfig, RLOOConfig):
        given |= {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 4}
    return config(**given)


TEXTS = [{"text": f"{a}+{b}={a + b}"} for a in range(4) for b in range(4)]
