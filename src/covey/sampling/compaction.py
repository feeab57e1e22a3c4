"""Slot compaction: when some completions end, the last ones move into their slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

SlotRow = TypeVar("SlotRow")


class Compaction(NamedTuple):
    """A plan of how slots are renumbered so that the running ones stay contiguous."""

    sources: list[int]
    targets: list[int]
    running: int
    """Number of slots that remain."""

    @classmethod
    def after(cls, evicted: Collection[int], running: int) -> Compaction:
        """Plan how slots from the end take the places of the evicted ones among ``running`` slots.

        >>> Compaction.after([1, 3], running=5)
        Compaction(sources=[4], targets=[1], running=3)
        """
        remaining = running - len(evicted)
        # As many survivors lie beyond the new end as evicted slots lie before it, so the two lists pair up.
        sources = [slot for slot in range(remaining, running) if slot not in evicted]
        return cls(sources, [slot for slot in evicted if slot < remaining], remaining)

    def apply(self, rows: Sequence[SlotRow]) -> list[SlotRow]:
        """Return a list with one row per slot, compacted.

        >>> Compaction.after([1, 3], running=5).apply("abcde")
        ['a', 'e', 'c']
        """
        compacted = list(rows)
        for source, target in zip(self.sources, self.targets, strict=True):
            compacted[target] = rows[source]
        return compacted[: self.running]
