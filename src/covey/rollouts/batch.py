"""What a step's sampling gives: its groups, and where the data is afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from covey.rewards.scorer import ScoringStats
from covey.tasks.difficulty import Memory
from covey.types import Group


@dataclass(frozen=True)
class Position:
    """Where the data is after a batch, and what was counted up to it. A checkpoint holds it as JSON."""

    cursor: int = 0
    """Problems taken from the data, epoch after epoch."""
    difficulty: Memory = field(default_factory=dict)
    """``Difficulty.state``, where sampling follows it."""
    unjudged: Sequence[tuple[int, int]] = ()
    """Failures and scores of the last steps."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """How often in a row a reward has refused a correct canary."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Running means of rewards, by role, for an estimator whose baseline they are."""


@dataclass(frozen=True)
class RolloutBatch:
    """The groups of one training step, and all that sampling them has changed."""

    groups: list[Group]
    """To be trained on."""
    filtered: list[Group]
    """Sampled and scored, but rejected by the algorithm's filter."""
    position: Position
    """Where the data is after this batch: what ``Rollouts.after`` continues from."""
    version: int
    """Optimizer steps that the sampling policy had seen."""
    scoring: ScoringStats
    """What the reward functions took and logged."""
    metrics: Mapping[str, float]
    """What was counted on the way."""
    tool_seconds: float | None = None
    """Seconds in which nothing was sampled because tools were awaited; None without tools."""
