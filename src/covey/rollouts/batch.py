"""Rollout batches: a step's groups, and the position in the data after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from covey.rewards.scorer import ScoringStats
from covey.tasks.difficulty import Memory
from covey.types import Group


@dataclass(frozen=True)
class Position:
    """The position in the data after a batch, with the counts up to it. A checkpoint holds it as JSON."""

    cursor: int = 0
    """Problems taken from the data, epoch after epoch."""
    difficulty: Memory = field(default_factory=dict)
    """``Difficulty.state``, if sampling depends on it."""
    unjudged: Sequence[tuple[int, int]] = ()
    """(failures, scores) of each of the last steps."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Number of correct canaries that each reward has refused in a row."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Running means of rewards by role, for an estimator with this baseline."""


BEGINNING = Position()
"""The position of a run that has sampled nothing."""


@dataclass(frozen=True)
class RolloutBatch:
    """The groups of one training step, and all that sampling them has changed."""

    groups: list[Group]
    """The groups to train on."""
    filtered: list[Group]
    """Groups that were sampled and scored, but rejected by the algorithm's filter."""
    position: Position
    """The position after this batch, where ``Rollouts`` continues."""
    version: int
    """Optimizer steps behind the sampling policy's weights."""
    scoring: ScoringStats
    """Time and logs of the reward functions."""
    metrics: Mapping[str, float]
    """Metrics of the sampling."""
    tool_seconds: float | None = None
    """Seconds in which nothing was sampled because tools were awaited; None without tools."""

    @property
    def all_groups(self) -> list[Group]:
        """The groups to train on, then the filtered ones."""
        return [*self.groups, *self.filtered]
