"""TensorBoard: an event file in the run folder. `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter


class TensorBoard:
    """Scalars by step."""

    def __init__(self, writer: SummaryWriter) -> None:
        self.writer = writer

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        self.writer.close()


def begin_tensorboard(run: Path, settings: Mapping[str, object], first: int) -> TensorBoard:  # noqa: ARG001 - no place for settings
    """What an interrupted try has written from step ``first`` on is forgotten."""
    return TensorBoard(SummaryWriter(str(run / "tensorboard"), purge_step=first or None))
