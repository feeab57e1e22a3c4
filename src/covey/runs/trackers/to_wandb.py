"""Track a run in Weights & Biases, offline unless WANDB_MODE says otherwise; `wandb sync` uploads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import wandb

from covey.runs.trackers import identity_of, title_of


class WeightsAndBiases:
    """A tracker of a W&B run, which stays the same after a resume."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step; W&B itself drops those of a step it has seen before."""
        wandb.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        wandb.finish()


def begin_wandb(run: Path, settings: Mapping[str, object], first: int) -> WeightsAndBiases:  # noqa: ARG001 - it knows
    """Begin or continue a run; a resumed one has the same identity."""
    wandb.init(
        project=os.environ.get("WANDB_PROJECT", "covey"),
        name=title_of(run),
        id=identity_of(run),
        dir=str(run),
        mode=os.environ.get("WANDB_MODE", "offline"),
        resume="allow",
        config=dict(settings),
        settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
    )
    return WeightsAndBiases()
