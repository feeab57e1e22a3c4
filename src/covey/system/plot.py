"""Draw curves on a terminal with braille dots, two by four per character, with the range on the left."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

Curve = Sequence[tuple[float, float]]
"""(step, value), steps increasing."""
BRAILLE_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character, by column, then by row from the top."""


def braille(points: Curve, width: int, height: int, last: float, low: float, high: float) -> list[str]:
    """Draw a polyline over steps 0 to ``last`` and values ``low`` to ``high``, as ``height`` lines.

    >>> braille([(0, 0.0), (3, 1.0)], width=2, height=1, last=3, low=0, high=1)
    ['⡠⠊']
    """
    # Size of the canvas in dots.
    across = 2 * width
    down = 4 * height
    columns: dict[int, list[float]] = {}
    for step, value in points:
        if math.isfinite(value):
            columns.setdefault(min(across - 1, round(step / max(last, 1) * (across - 1))), []).append(value)
    # Mean value of each dot column, as a row counted from the top (so the highest value is at row 0).
    rows = {x: (down - 1) * (1 - (sum(v) / len(v) - low) / ((high - low) or 1.0)) for x, v in columns.items()}
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, float] | None = None
    at: int | None = None
    for x, y in sorted(rows.items()):
        x0, y0 = before or (x, y)
        # Interpolate over columns without a point of their own.
        for column in range(x0, x + 1):
            share = (column - x0) / (x - x0) if x > x0 else 1.0
            row = min(down - 1, max(0, round(y0 + (y - y0) * share)))
            # `at` is the row of the column before.
            above = row if at is None else at
            for dot in range(min(row, above + 1), max(row, above - 1) + 1):  # no gap where it is steep
                cells[dot // 4][column // 2] |= BRAILLE_DOTS[column % 2][dot % 4]
            at = row
        before = (x, y)
    return ["".join(chr(0x2800 + bits) for bits in row) for row in cells]


def framed(
    name: str,
    points: Curve,
    width: int,
    height: int,
    last: float,
    style: str = "",
    bounds: tuple[float, float] | None = None,
) -> list[Text]:
    """Return a curve with a heading (name, first and newest value), ``width`` characters wide.

    Without ``bounds`` the range is that of the values, extended to 0 or 1 if these are near.
    """
    values = [v for _, v in points if math.isfinite(v)]
    course = (
        f"{values[0]:.3g} -> {values[-1]:.3g}" if len(values) > 1 else f"{values[-1]:.3g}" if values else ""
    )
    low, high = bounds or span(values)
    ticks = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"][-height:]
    margin = max(map(len, ticks)) + 1
    rows = braille(points, max(1, width - margin - 1), height, last, low, high)
    lines = [
        Text.assemble((f"{t:>{margin - 1}} ┤", "dim"), (r, style)) for t, r in zip(ticks, rows, strict=True)
    ]
    head = Text.assemble((name, "bold"), "  ", (course, style))
    return [head, *lines]


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


def beside(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    """Join two blocks of lines; the left one is ``width`` characters wide."""
    return [Text.assemble(a, " " * max(1, width - a.cell_len), b) for a, b in zip(left, right, strict=True)]
