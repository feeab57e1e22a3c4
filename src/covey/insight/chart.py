"""Charts as SVG: panels of lines with intervals and round ticks, for light and dark pages."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

LEFT = 58
"""Margin left of the axes of a panel, px: room for the numbers; the other margins follow."""
RIGHT = 22
TOP = 26
BOTTOM = 36
LETTER = 6.2
"""Approximate width of a letter of the legend, px."""
DOTS = 12
"""Number of points up to which a line shows each as a dot."""
LIGHT = ("#0b69a3", "#b7550a", "#2d7d46", "#ba2525", "#6b46a3")
DARK = ("#5fb0e5", "#f0a45b", "#6cc28a", "#f28b8b", "#b79be0")
"""Colours of the lines, on a light and on a dark page."""


def _fills(colours: Sequence[str]) -> str:
    return "".join(f".chart .c{n}{{fill:{c};stroke:{c}}}" for n, c in enumerate(colours))


STYLE = f"""
.chart .paper{{fill:#fff}} .chart text{{fill:#52606d}}
.chart .head{{fill:#1f2933;font-size:13px;font-weight:600}}
.chart .grid{{stroke:#e4e7eb}}
.chart .grey{{fill:#8a9aa9;stroke:#8a9aa9}}
{_fills(LIGHT)}
.chart .line{{fill:none;stroke-width:1.8;stroke-linejoin:round}} .chart .band{{opacity:.17;stroke:none}}
@media (prefers-color-scheme:dark){{
.chart .paper{{fill:#14181d}} .chart text{{fill:#a9b4c0}} .chart .head{{fill:#e8ecf0}}
.chart .grid{{stroke:#2b333c}}
{_fills(DARK)}
.chart .line{{fill:none}} .chart .band{{opacity:.25;stroke:none}}}}
"""


@dataclass(frozen=True)
class Line:
    """A line of values over x. Values that are not finite are left out."""

    name: str
    """Name in the legend; lines of one name share a colour. Empty: no entry."""
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """The ends of each value's interval, drawn as a band."""
    background: bool = False
    """Whether the line is drawn in grey behind the others."""

    def points(self, y: Sequence[float]) -> list[tuple[float, float]]:
        """Return the drawable points of ``y``: the line's values, or one end of their intervals."""
        points = []
        for x, value, end in zip(self.x, self.y, y, strict=True):
            if math.isfinite(value):
                # A value without an interval is its own end.
                points.append((x, end if math.isfinite(end) else value))
        return points


@dataclass(frozen=True)
class Panel:
    """One diagram."""

    title: str
    lines: Sequence[Line]
    x_label: str = "step"
    unit: str = ""
    """Written after the numbers of the vertical axis."""
    bounds: tuple[float, float] | None = None
    """Range of the vertical axis; None: from the smaller of 0 and the least value to the largest."""
    marks: Sequence[str] = ()
    """Labels at x = 0, 1, ... if x is not a number."""


def chart(
    panels: Sequence[Panel], label: str, *, across: int = 2, wide: int = 300, high: int = 200, title: str = ""
) -> str:
    """Return an SVG of panels in rows of ``across``, the axes of each ``wide`` by ``high`` px.

    ``title`` is written above them, ``label`` is for screen readers.
    """
    heads = textwrap.wrap(title, int(across * (LEFT + wide + RIGHT) / 8.2))  # px of a letter in a wide font
    parts = [_element("text", text, class_="head", x=16, y=22 + 17 * n) for n, text in enumerate(heads)]
    y = 17 * len(heads) + (10 if heads else 0)
    lines = [line for panel in panels for line in panel.lines]
    # With few names a name has the same colour in every panel; else colours repeat per panel.
    one_palette = len({line.name for line in lines if not line.background}) <= len(LIGHT)
    colours = [_colours(lines if one_palette else panel.lines) for panel in panels]
    for start in range(0, len(panels), across):
        row = panels[start : start + across]
        drawings, height = _row(row, colours[start : start + across], wide, high)
        for column, drawing in enumerate(drawings):
            x = LEFT + (LEFT + wide + RIGHT) * column
            parts.append(f'<g transform="translate({x},{y + TOP})">{drawing}</g>')
        y += TOP + height + BOTTOM
    width = (LEFT + wide + RIGHT) * min(across, max(len(panels), 1))
    return _picture(parts, label, width, y + 4)


def _picture(parts: Sequence[str], label: str, width: int, height: int) -> str:
    """Return an SVG of these elements on paper of this size, px."""
    paper = _element("rect", class_="paper", width=width, height=height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="chart" role="img"'
        f' aria-label="{escape(label)}" font-family="system-ui, sans-serif" font-size="11">\n'
        + "\n".join([f"<style>{STYLE}</style>", paper, *parts, "</svg>"])
    )


def _row(
    panels: Sequence[Panel], colours: Sequence[Mapping[str, str]], wide: int, high: int
) -> tuple[list[str], int]:
    """Return the drawing of each panel of a row, and their height between the margins."""
    legends = [_legend(panel, classes, wide) for panel, classes in zip(panels, colours, strict=True)]
    # The tallest legend of the row, so that the axes of its panels align.
    head = max((8 + foot for legend in legends for _, foot, *_ in legend), default=0)
    drawings = [
        "".join([*_draw_legend(panel, legend), *_axes(panel, classes, wide, high, head)])
        for panel, legend, classes in zip(panels, legends, colours, strict=True)
    ]
    return drawings, head + high


def _element(kind: str, text: str = "", **attributes: object) -> str:
    """Return an element. In the name of an attribute `_` becomes a hyphen, and is dropped at the end."""
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    pairs = (f' {names[name]}="{escape(str(value))}"' for name, value in attributes.items())
    return f"<{kind}{''.join(pairs)}>{escape(text)}</{kind}>"


def _colours(lines: Sequence[Line]) -> dict[str, str]:
    """Return the CSS class of each name."""
    front = dict.fromkeys(line.name for line in lines if not line.background)
    colours = {name: f"c{number % len(LIGHT)}" for number, name in enumerate(front)}
    return colours | {line.name: "grey" for line in lines if line.background}


def _draw_legend(panel: Panel, legend: Sequence[tuple[float, int, str, str]]) -> Iterator[str]:
    """Yield the title of a panel and its legend."""
    yield _element("text", panel.title, class_="head", x=0, y=-10)
    for x, y, name, colour in legend:
        yield _element("circle", class_=colour, cx=x + 4, cy=y - 4, r=3)
        yield _element("text", name, x=x + 12, y=y)


class _Frame(NamedTuple):
    """The plot of a panel: its scales, and its place in px from the upper left corner of its legend."""

    wide: int
    high: int
    head: int
    """Height of the legend above it."""
    last: float
    """x at the right end; the left end is 0."""
    rows: Sequence[float]
    """Ticks of y; the first is the lower end, the last the upper one."""

    @property
    def foot(self) -> int:
        """The lower end in px; y grows downwards in SVG."""
        return self.head + self.high

    def x(self, value: float) -> float:
        """Return the px of a value of x."""
        return round(self.wide * value / self.last, 1)

    def y(self, value: float) -> float:
        """Return the px of a value of y."""
        part = (self.rows[-1] - value) / (self.rows[-1] - self.rows[0])
        return round(self.head + self.high * part, 1)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        """Return points as an attribute of SVG."""
        return " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)


def _axes(panel: Panel, colours: Mapping[str, str], wide: int, high: int, head: int) -> Iterator[str]:
    """Yield the axes of a panel and its lines. ``head`` is the height of the legend above them."""
    across = [x for line in panel.lines for x in line.x]
    frame = _Frame(wide, high, head, max(across, default=1.0) or 1.0, round_ticks(*_bounds(panel), 6))
    for tick, text in zip(frame.rows, tick_texts(frame.rows), strict=True):
        y = frame.y(tick)
        yield _element("line", class_="grid", x1=0, x2=frame.wide, y1=y, y2=y)
        yield _element("text", text + panel.unit, x=-7, y=y + 4, text_anchor="end")
    for tick, text in _columns(panel, across, frame):
        x = frame.x(tick)
        yield _element("line", class_="grid", x1=x, x2=x, y1=frame.foot, y2=frame.foot + 4)
        yield _element("text", text, x=x, y=frame.foot + 16, text_anchor="middle")
    yield _element("text", panel.x_label, x=wide / 2, y=frame.foot + 30, text_anchor="middle")
    # Lines of the background are drawn first, so that the others cover them.
    for line in sorted(panel.lines, key=lambda line: not line.background):
        yield from _line(line, colours[line.name], frame)


def _bounds(panel: Panel) -> tuple[float, float]:
    """Return the range of y that a panel has to show."""
    if panel.bounds is not None:
        return panel.bounds
    values = [y for line in panel.lines for y in (*line.y, *line.low, *line.high) if math.isfinite(y)]
    return min([0.0, *values]), max(values, default=1.0)


def _columns(panel: Panel, across: Sequence[float], frame: _Frame) -> list[tuple[float, str]]:
    """Return the ticks of x with their texts; whole numbers only, if all values of x are."""
    if panel.marks:
        return [(float(n), mark) for n, mark in enumerate(panel.marks)]
    only_integers = all(float(x).is_integer() for x in across)
    ticks = round_ticks(0.0, frame.last, frame.wide // 40)
    ticks = [t for t in ticks if t <= frame.last and not (only_integers and t % 1)]
    return list(zip(ticks, tick_texts(ticks), strict=True))


def _line(line: Line, colour: str, frame: _Frame) -> Iterator[str]:
    """Yield a line, its band of uncertainty, and its points if they are few."""
    points = line.points(line.y)
    if line.low:  # a polygon along the low ends and back along the high ones
        ends = [*line.points(line.low), *line.points(line.high)[::-1]]
        yield _element("polygon", class_=f"{colour} band", points=frame.path(ends)) if ends else ""
    yield _element("polyline", class_=f"{colour} line", points=frame.path(points))
    if len(line.x) <= DOTS:
        for x, y in points:
            yield _element("circle", class_=colour, cx=frame.x(x), cy=frame.y(y), r=2.6)


def _legend(panel: Panel, colours: Mapping[str, str], wide: int) -> list[tuple[float, int, str, str]]:
    """Return (x, y, name, colour) for each name with points, on as many rows as needed."""
    entries = list[tuple[float, int, str, str]]()
    x = 0.0
    y = 6
    for name in dict.fromkeys(line.name for line in panel.lines if line.name and line.points(line.y)):
        width = 24 + LETTER * len(name)
        if x and x + width > wide + RIGHT:
            x = 0.0
            y += 14
        entries.append((round(x, 1), y, name, colours[name]))
        x += width
    return entries


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` ticks, 1, 2 or 5 times a power of ten apart, that span ``low`` to ``high``.

    >>> round_ticks(0, 220, 6), round_ticks(-0.13, 1.06, 6)
    ([0.0, 50.0, 100.0, 150.0, 200.0, 250.0], [-0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
    """
    largest = max(abs(low), abs(high))
    # A range of rounding errors alone would give ticks too close for floats.
    span = high - low if high - low > 1e-9 * largest else largest
    span = max(span, 1e-30) if largest else 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * count >= span * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    # Removes the rounding of i * step, as 0.30000000000000004.
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return the numbers of an axis as text, with as many decimals as their distance needs.

    >>> tick_texts([0, 0.05, 0.1]), tick_texts([0, 2000]), tick_texts([0, 1e-6])
    (['0.00', '0.05', '0.10'], ['0', '2,000'], ['0', '1e-06'])
    """
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    if step < 1e-4 or step >= 1e6:
        return [f"{t:g}" for t in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-6))
    return [f"{t:,.{decimals}f}" for t in ticks]
