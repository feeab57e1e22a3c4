"""Whole runs of half a second for tests: start them, stop them at a check, compare what they wrote."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes import rows_of
from tests.training.paid.rewards import varied

from covey.config.load import load_config
from covey.errors import Stopped
from covey.insight.result import Result
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.options import DEFAULTS, RunOptions
from covey.training.pipeline import run_pipeline

PAID = Path(__file__).parent / "paid/rewards.py"
"""The file of rewards that are loaded by name."""
FAST: dict[str, Any] = {
    "data": {"task": "last_digit", "train_size": 64, "test_size": 16},
    "rewards": (varied,),
    "rollout": {"group_size": 4, "prompts_per_step": 4, "max_tokens": 12},
    "train": {"steps": 4, "lr": 1e-3, "save_every": 2},
    "eval": {"problems": 8, "samples": 2},
    "threads": 1,
}


def start(
    output: Path, stop: StopSignal | None = None, options: RunOptions = DEFAULTS, **settings: Any
) -> list[Result]:
    """A run of about half a second."""
    merged = {
        k: {**FAST[k], **settings.pop(k, {})} if isinstance(FAST[k], dict) else settings.pop(k, FAST[k])
        for k in FAST
    }
    resolved = load_config(values={**merged, **settings, "output": output})
    return run_pipeline(resolved, RunConsole(quiet=True), stop or StopSignal(), options)


def fingerprint(folder: Path) -> dict[str, str]:
    """Hashes of all that must follow from the config alone."""
    names = ["metrics.jsonl", "evals.jsonl", *(f"rollouts/{p.name}" for p in (folder / "rollouts").iterdir())]
    names += ["final/model.safetensors"]
    return {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in sorted(names)}


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Of each step, without the seals of the log."""
    return rows_of(folder / "metrics.jsonl")


class StopAt(StopSignal):
    """Counts how often it is checked, and asks for a stop at the n-th time."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.checks = at, 0

    def check(self) -> None:
        self.checks += 1
        if self.checks == self.at:
            self.request("stopped by the test")
        super().check()


def interrupted(output: Path, checks: int, **settings: Any) -> None:
    """Start a run that is stopped at its n-th check."""
    with pytest.raises(Stopped, match="saved after step"):
        start(output, StopAt(checks), **settings)


def check_resumes_alike(folder: Path, **settings: Any) -> None:
    """A run that is stopped after two thirds, and resumed, ends like one that was not."""
    counter = StopAt()
    start(folder / "whole", counter, **settings)
    interrupted(folder / "parts", counter.checks * 2 // 3, **settings)
    start(folder / "parts", **settings)
    assert fingerprint(folder / "whole") == fingerprint(folder / "parts")


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Weights of runs of a few steps, each of up to 1e-3, whose sums were taken in another order."""
    for name, weight in one.items():
        difference = (weight - other[name]).abs()
        assert difference.mean() < 1e-6
        assert difference.max() < 1e-4  # Adam makes whole steps of gradients that are nearly 0
