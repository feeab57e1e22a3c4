"""Small objects that TRL's trainers pass to scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class TrainOutput(NamedTuple):
    """The result of TRL's `train()`."""

    global_step: int
    """Number of optimizer steps of the run, including those before it was resumed."""
    training_loss: float
    """Mean loss over these steps; 0 if there were none."""
    metrics: Mapping[str, float | str]


class Accelerator:
    """The part of accelerate's Accelerator that scripts use."""

    is_main_process = True
    num_processes = 1

    def print(self, *words: object) -> None:
        """Print once, whatever the number of processes."""
        print(*words)
