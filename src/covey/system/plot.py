"""Drawings in characters for a terminal: curves of braille dots, bars of one character, tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

BRAILLE_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character, by column, then by row from the top."""
BARS = "▁▂▃▄▅▆▇█"
GAP = 2
"""Columns between two curves."""


@dataclass(frozen=True)
class Curve:
    """A curve over the steps of a run, with its name and style."""

    name: str
    points: Sequence[tuple[float, float]]
    """(step, value), steps increasing. Values that are not finite are left out."""
    style: str = ""
    bounds: tuple[float, float] | None = None
    """Range of the vertical axis; None: ``span`` of the values."""

    @property
    def values(self) -> list[float]:
        """The values that are drawn."""
        return [value for _, value in self.points if math.isfinite(value)]

    @property
    def range(self) -> tuple[float, float]:
        """The lower and the upper end of the vertical axis."""
        return self.bounds or span(self.values)

    @property
    def heading(self) -> Text:
        """The name, and the first and newest value."""
        ends = [f"{value:.3g}" for value in (*self.values[:1], *self.values[1:][-1:])]
        return Text.assemble((self.name, "bold"), "  ", (" -> ".join(ends), self.style))


def draw_curves(curves: Sequence[Curve], width: int, height: int, last: float) -> list[Text]:
    """Draw curves over steps 0 to ``last`` side by side, as a heading and ``height`` lines.

    All lines together are at most ``width`` characters wide.
    """
    share = width // len(curves)
    blocks = [_frame_curve(curve, share - GAP, height, last) for curve in curves]
    lines = []
    for parts in zip(*blocks, strict=True):
        line = Text()
        for n, part in enumerate(parts):
            # Each curve begins at its own column, whatever the lengths of the headings before it.
            line.append(" " * (share * n - line.cell_len))
            line.append_text(part)
        lines.append(line)
    return lines


def _frame_curve(curve: Curve, width: int, height: int, last: float) -> list[Text]:
    """Return a curve's heading, and its lines with the ends of the range on their left."""
    low, high = curve.range
    ticks = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"]
    margin = max(map(len, ticks))
    rows = braille(curve, max(1, width - margin - 2), height, last)
    heading = curve.heading
    heading.truncate(width, overflow="ellipsis")
    lines = [
        Text.assemble((f"{tick:>{margin}} ┤", "dim"), (row, curve.style))
        for tick, row in zip(ticks, rows, strict=True)
    ]
    return [heading, *lines]


def braille(curve: Curve, width: int, height: int, last: float) -> list[str]:
    """Draw a curve over steps 0 to ``last`` as ``height`` lines of ``width`` characters.

    >>> braille(Curve("", [(0, 0.0), (3, 1.0)], bounds=(0, 1)), width=2, height=1, last=3)
    ['⡠⠊']
    """
    cells = [[0] * width for _ in range(height)]
    before = None
    for column, row in _trace(_dot_rows(curve, 2 * width, 4 * height, last)):
        # Where the line is steep, the dots between two columns are filled, so that it has no gap.
        above = row if before is None else before
        for dot in range(min(row, above + 1), max(row, above - 1) + 1):
            cells[dot // 4][column // 2] |= BRAILLE_DOTS[column % 2][dot % 4]
        before = row
    return ["".join(chr(0x2800 + bits) for bits in row) for row in cells]


def _dot_rows(curve: Curve, across: int, down: int, last: float) -> list[tuple[int, float]]:
    """Return (column, row) of a curve on a canvas of dots; several points of a column have their mean.

    Row 0 is the top, the upper end of the range.
    """
    low, high = curve.range
    columns: dict[int, list[float]] = {}
    for step, value in curve.points:
        if math.isfinite(value):
            column = min(across - 1, round(step / max(last, 1) * (across - 1)))
            columns.setdefault(column, []).append(value)
    scale = (down - 1) / ((high - low) or 1.0)
    tops = {column: scale * (high - sum(values) / len(values)) for column, values in columns.items()}
    return [(column, min(down - 1, max(0, top))) for column, top in sorted(tops.items())]


def _trace(points: Sequence[tuple[int, float]]) -> Iterator[tuple[int, int]]:
    """Yield the dots of a polyline, one per column: between two points it is interpolated."""
    for (start, from_row), (end, to_row) in pairwise(points):
        for column in range(start, end):
            yield column, round(from_row + (to_row - from_row) * (column - start) / (end - start))
    for column, row in points[-1:]:
        yield column, round(row)


def span(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the values, extended to 0 or 1 if these are near."""
    if not values:
        return 0.0, 1.0
    low = min(values)
    high = max(values)
    # Fractions start at 0 more often than other quantities do.
    low = 0.0 if 0 <= low < (0.5 if high <= 1 else 0.3 * high) else low
    high = 1.0 if 0.7 <= high <= 1 else high
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def bar(value: float, low: float, high: float) -> str:
    """Return a character as high as a value lies between ``low`` and ``high``.

    >>> "".join(bar(value, 0, 1) for value in (0.0, 0.5, 1.0))
    '▁▅█'
    """
    part = (value - low) / (high - low) if high > low else 0.0
    return BARS[min(len(BARS) - 1, int(len(BARS) * part))]


def align_columns(rows: Sequence[Sequence[str]], numbers: int = 0) -> list[str]:
    """Return rows of the same length as aligned lines; the first ``numbers`` columns align at the right.

    >>> align_columns([("stage", "steps"), ("1-sft", "40")])
    ['stage  steps', '1-sft  40']
    """
    columns = []
    for column, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if column < numbers else cell.ljust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
