"""Observers: callbacks for another program that follows a run, as TRL's do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class ObserverRequest(NamedTuple):
    """An observer's requests after a step."""

    stop: bool = False
    """End the stage here."""
    save: bool = False


class Observer:
    """Callbacks for a program that follows a run. The base class does nothing."""

    def run_begins(self, step: int) -> None:
        """Called before the first step, when all is loaded; ``step`` is above 0 if the run was resumed."""

    def step_begins(self, step: int) -> None:
        """Called before a step; ``step`` is the number of steps done."""

    def step_ends(self, step: int, metrics: Mapping[str, float]) -> ObserverRequest | None:
        """Called after ``step`` steps with the last one's metrics; None asks for nothing."""

    def checkpoint_written(self, folder: Path) -> None:
        """Called after a checkpoint was written."""
