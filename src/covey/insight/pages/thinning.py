"""Thinning of long curves to the lowest and highest value of each stretch of steps, so no spike is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.system.text import with_finite_numbers

Record = dict[str, Any]
MAX_POINTS = 200
"""Largest number of stretches of a curve. Each is two points, and a screen has no room for more."""
DIGITS = 6
"""Significant digits of a number in a curve."""


@dataclass
class Stretch:
    """A range of consecutive steps."""

    first: int
    last: int
    size: int = 0
    """Number of records."""
    extremes: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> [lowest value, its step, highest value, its step]."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the record of the next step."""
        step = int(record["step"])
        extremes = self.extremes
        self.last = step
        self.size = self.size + 1
        for name, value in record.items():
            if not isinstance(value, int | float) or name == "step":
                continue
            extreme = extremes.get(name)
            if extreme is None:
                extremes[name] = [value, step, value, step]
            elif value < extreme[0]:
                extreme[:2] = [value, step]
            elif value > extreme[2]:
                extreme[2:] = [value, step]

    def join(self, later: Stretch) -> None:
        """Merge a later stretch into this one."""
        self.last = later.last
        self.size = self.size + later.size
        for name, (low, low_at, high, high_at) in later.extremes.items():
            extreme = self.extremes.setdefault(name, [low, low_at, high, high_at])
            if low < extreme[0]:
                extreme[:2] = [low, low_at]
            if high > extreme[2]:
                extreme[2:] = [high, high_at]

    def records(self) -> list[Record]:
        """Return one record for one step, else two, with each metric's extremes in order of time."""
        if self.size == 1:
            return [{"step": self.first, **{name: e[0] for name, e in self.extremes.items()}}]
        early: Record = {"step": self.first}
        late: Record = {"step": self.last}
        for name, (low, low_at, high, high_at) in self.extremes.items():
            early[name], late[name] = (low, high) if low_at <= high_at else (high, low)
        return [early, late]


class ThinnedCurve:
    """A growing stream of records in at most ``MAX_POINTS`` stretches; each record is read once."""

    def __init__(self) -> None:
        self.ends: list[Record] = []
        """The first and the last record, which are shown as they are."""
        self.stretches: list[Stretch] = []
        """Stretches of the records between them."""
        self.width = 1
        """Number of records of a full stretch."""

    def add(self, records: Iterable[Mapping[str, object]]) -> None:
        """Add the next records."""
        for record in records:
            if len(self.ends) == 2:
                self._thin(self.ends.pop())
            self.ends.append(dict(record))

    def _thin(self, record: Record) -> None:
        if not self.stretches or self.stretches[-1].size >= self.width:
            self._widen()
            self.stretches.append(Stretch(int(record["step"]), int(record["step"])))
        self.stretches[-1].add(record)

    def _widen(self) -> None:
        """Make room for one more stretch: merge them in pairs, so that each is twice as wide."""
        if len(self.stretches) < MAX_POINTS:
            return
        for early, late in zip(self.stretches[::2], self.stretches[1::2], strict=True):
            early.join(late)
        self.stretches = self.stretches[::2]
        self.width *= 2

    def records(self) -> list[Record]:
        """Return the curve, with at most two records per stretch."""
        between = [record for stretch in self.stretches for record in stretch.records()]
        records = [*self.ends[:1], *between, *self.ends[1:]]
        return [
            {name: with_finite_numbers(value, DIGITS) for name, value in record.items()} for record in records
        ]
