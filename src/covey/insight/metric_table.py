"""The table of metrics: docs/metrics.md by rows, which explain the names in a run's records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import covey

ROW = re.compile(r"^\| `(?P<name>[\w/.@]+)` \| (?P<meaning>.*?) \| (?P<healthy>.*?) ?\|$", re.MULTILINE)
PLACEHOLDERS = {
    "NAME": r"[\w.]+",
    "STATUS": r"[a-z_]+",
    "PART": r"\w+",
    "PHASE": r"\w+",
    "A_B": r"[\d.]+_[\d.]+",
    "_N": r"_\d",
    "@K": r"@\d+",
}
"""Placeholders in names of metrics, with the patterns that they match."""
HELD_OUT = "held_out/"
"""Prefix of the metrics of preferences and reward models that were measured on held-out data."""
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class MetricRow(NamedTuple):
    """A row of the table: one metric, or a family of them such as `reward/NAME/mean`."""

    name: str
    meaning: str
    healthy: str
    pattern: re.Pattern[str]
    """Matches the names of the family."""
    placeholders: int
    """Number of placeholders in the name."""


def metrics_page() -> str:
    """Return docs/metrics.md; an installed package has a copy of it."""
    package = Path(covey.__file__).parent
    copy = package / "metrics.md"
    return (copy if copy.exists() else package.parents[1] / "docs" / "metrics.md").read_text("utf-8")


@cache
def metric_rows() -> tuple[MetricRow, ...]:
    """Return all rows of the table."""
    return tuple(_row(**match.groupdict()) for match in ROW.finditer(metrics_page()))


def _row(name: str, meaning: str, healthy: str) -> MetricRow:
    pattern = re.escape(name)
    count = 0
    for placeholder, allowed in PLACEHOLDERS.items():
        count += pattern.count(placeholder)
        pattern = pattern.replace(placeholder, allowed)
    return MetricRow(name, meaning, healthy, re.compile(pattern), count)


def hints(names: Iterable[str]) -> dict[str, str]:
    """Return what a metric means and what is healthy, by name, for the names that the table has.

    >>> hints(["clip/low", "step"])
    {'clip/low': 'fraction of tokens with A < 0 and a ratio below the lower bound. Healthy: 0 in the first \
update, then below .05'}
    """
    texts = {name: _hint(name) for name in sorted(names)}
    return {name: text for name, text in texts.items() if text}


@lru_cache(maxsize=4096)
def _hint(name: str) -> str:
    metric = name.removeprefix(HELD_OUT)
    rows = [row for row in metric_rows() if row.pattern.fullmatch(metric)]
    fewest = min((row.placeholders for row in rows), default=0)
    # The family with the fewest placeholders says most: `reward/NAME/mean` rather than `reward/NAME/PART`.
    # Families with equally many are all given.
    texts = (f"{row.meaning}. Healthy: {row.healthy}" for row in rows if row.placeholders == fewest)
    prefix = "Over the held-out pairs or answers: " if rows and metric != name else ""
    return prefix + LINK.sub(r"\1", "; or ".join(texts)).replace("`", "")
