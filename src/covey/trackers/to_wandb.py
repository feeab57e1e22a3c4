"""Weights & Biases, offline unless WANDB_MODE says otherwise; `wandb sync` sends it later."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import wandb


class WeightsAndBiases:
    """A run, the same one after a resume."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step; those of a step it has seen before it drops itself."""
        wandb.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        wandb.finish()


def begin_wandb(run: Path, settings: Mapping[str, object], first: int) -> WeightsAndBiases:  # noqa: ARG001 - it knows
    """The identity follows from the folder, so that a resumed run goes on where it was."""
    place = run.resolve()
    wandb.init(
        project=os.environ.get("WANDB_PROJECT", "covey"),
        name=f"{place.parent.name}/{place.name}",
        id=hashlib.sha256(str(place).encode()).hexdigest()[:16],
        dir=str(run),
        mode=os.environ.get("WANDB_MODE", "offline"),
        resume="allow",
        config=dict(settings),
        settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
    )
    return WeightsAndBiases()
