"""Slot compaction: when some completions end, the last ones move into their slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

SlotRow = TypeVar("SlotRow")


class Compaction(NamedTuple):
    """How slots are renumbered so that the running ones stay contiguous."""

    sources: list[int]
    targets: list[int]
    running: int
    """How many remain."""

    @classmethod
    def after(cls, evicted: Collection[int], running: int) -> Compaction:
        """Of ``running`` slots some are evicted; slots from the end move into the gaps.

        >>> Compaction.after([1, 3], running=5)
        Compaction(sources=[4], targets=[1], running=3)
        """
        remaining = running - len(evicted)
        sources = [slot for slot in range(remaining, running) if slot not in evicted]
        return cls(sources, [slot for slot in evicted if slot < remaining], remaining)

    def apply(self, rows: Sequence[SlotRow]) -> list[SlotRow]:
        """A list with one row per slot, compacted.

        >>> Compaction.after([1, 3], running=5).apply("abcde")
        ['a', 'e', 'c']
        """
        compacted = list(rows)
        for source, target in zip(self.sources, self.targets, strict=True):
            compacted[target] = rows[source]
        return compacted[: self.running]
