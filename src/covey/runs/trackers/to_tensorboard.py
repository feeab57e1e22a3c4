"""Tracking in a TensorBoard event file in its folder. `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter

from covey.runs.trackers import Tracker


def begin_tensorboard(run: Path, _settings: Mapping[str, object], first: int) -> Tracker:
    """Begin the event file; numbers of an interrupted attempt after step ``first`` are purged."""
    writer = SummaryWriter(str(run / "tensorboard"), purge_step=first + 1 if first else None)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(log, writer.close)
