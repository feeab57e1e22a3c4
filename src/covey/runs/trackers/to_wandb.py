"""Tracking in Weights & Biases, offline unless WANDB_MODE says otherwise; `wandb sync` uploads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import wandb

from covey.runs.trackers import Tracker, run_identity, title_of


def begin_wandb(run: Path, settings: Mapping[str, object], _first: int) -> Tracker:
    """Begin or continue a run; a resumed one has the same identity."""
    wandb.init(
        project=os.environ.get("WANDB_PROJECT", "covey"),
        name=title_of(run),
        id=run_identity(run),
        dir=str(run),
        mode=os.environ.get("WANDB_MODE", "offline"),
        resume="allow",
        config=dict(settings),
        settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
    )
    return Tracker(_log, wandb.finish)


def _log(step: int, values: Mapping[str, float]) -> None:
    # W&B itself drops the numbers of a step that it has seen before.
    wandb.log(dict(values), step=step)
