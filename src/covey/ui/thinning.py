"""Long curves in few points: a stretch of steps is its lowest and its highest value, so no spike is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]
MOST = 200
"""Stretches of a curve; each is two points, and a screen has no room for more."""
DIGITS = 6
"""Significant digits of a number in a curve."""


@dataclass
class Stretch:
    """Steps that follow one another."""

    first: int
    last: int
    size: int = 0
    """Records."""
    extremes: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> its lowest value, the step of that, its highest value, the step of that."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the record of the next step."""
        step, extremes = int(record["step"]), self.extremes
        self.last, self.size = step, self.size + 1
        for name, value in record.items():
            if not isinstance(value, int | float) or name == "step":
                continue
            known = extremes.get(name)
            if known is None:
                extremes[name] = [value, step, value, step]
            elif value < known[0]:
                known[:2] = [value, step]
            elif value > known[2]:
                known[2:] = [value, step]

    def join(self, other: Stretch) -> None:
        """Take a later stretch in."""
        self.last, self.size = other.last, self.size + other.size
        for name, (low, low_at, high, high_at) in other.extremes.items():
            known = self.extremes.setdefault(name, [low, low_at, high, high_at])
            if low < known[0]:
                known[:2] = [low, low_at]
            if high > known[2]:
                known[2:] = [high, high_at]

    def records(self) -> list[Record]:
        """One record of one step; else two, each metric's extremes in the order in which they came."""
        if self.size == 1:
            return [{"step": self.first, **{name: e[0] for name, e in self.extremes.items()}}]
        early: Record = {"step": self.first}
        late: Record = {"step": self.last}
        for name, (low, low_at, high, high_at) in self.extremes.items():
            early[name], late[name] = (low, high) if low_at <= high_at else (high, low)
        return [early, late]


class Curve:
    """A stream of records that grows, in at most ``MOST`` stretches; each record is looked at once."""

    def __init__(self) -> None:
        self.ends: list[Record] = []
        """The first record and the last one, which are shown as they are."""
        self.stretches: list[Stretch] = []
        """Of the records between them."""
        self.width = 1
        """Records of a full stretch."""

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take the next records."""
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
        """Make room for one more stretch."""
        if len(self.stretches) < MOST:
            return
        for early, late in zip(self.stretches[::2], self.stretches[1::2], strict=True):
            early.join(late)
        self.stretches = self.stretches[::2]
        self.width *= 2

    def records(self) -> list[Record]:
        """The curve, two records a stretch at most."""
        between = [record for stretch in self.stretches for record in stretch.records()]
        shown = [*self.ends[:1], *between, *self.ends[1:]]
        return [{name: _shorter(value) for name, value in record.items()} for record in shown]


def _shorter(value: object) -> object:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
