"""Track a run in a TensorBoard event file in its folder. `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter


class TensorBoard:
    """A tracker that writes scalars by step."""

    def __init__(self, writer: SummaryWriter) -> None:
        self.writer = writer

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        self.writer.close()


def begin_tensorboard(run: Path, settings: Mapping[str, object], first: int) -> TensorBoard:  # noqa: ARG001 - no place for settings
    """Begin the event file; numbers of an interrupted attempt from step ``first`` on are purged."""
    return TensorBoard(SummaryWriter(str(run / "tensorboard"), purge_step=first or None))
