"""The user's machine beside those of docs/performance.md: `make bench-quick`, less than two minutes if idle.

One thread, and CPU seconds of both sides in turns, so that other programs change the result little.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
HEADING = "## One column per processor"
CELLS = {
    "rollout, equal": ("rollout", "equal", "generate"),
    "rollout, ragged": ("rollout", "ragged", "generate"),
    "update, equal": ("update", "equal", "trl"),
    "update, ragged": ("update", "ragged", "trl"),
}
"""Rows of the page's table: the cell, its lengths, and who stands beside covey."""
PROMPTS = "3"
"""Instead of 16, so that all of it ends within two minutes."""


def recorded() -> tuple[list[str], dict[str, list[str]]]:
    """The processors of the page's table, and the values of each row."""
    table = PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0]
    rows = [
        [part.strip() for part in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|") and not line.startswith("|--")
    ]
    return rows[0][1:], {row[0]: row[1:] for row in rows[1:]}


def ratio(sides: Sequence[Sequence[Any]]) -> str:
    """How many times covey's CPU seconds per token the peer takes, and covey's tokens per CPU second."""
    ours, theirs = (min(s["cpu"] / s["tokens"] for s in side) for side in sides)
    return f"{theirs / ours:.1f} ({1 / ours:,.0f}/s)"


def compare(measured: Callable[[str, str, str], Sequence[Sequence[Any]] | None], machine: str) -> None:
    """Measure the cells and print them beside the page's columns."""
    names, values = recorded()
    head = [f"{machine}, now", *names]
    began, lacking = time.perf_counter(), dict[str, None]()
    print("The peer's CPU seconds / covey's, one thread; in brackets covey's tokens per CPU second.\n")
    print(f"{'':18}" + " | ".join(f"{name:>24.24}" for name in head))
    for row, cell in CELLS.items():
        samples = measured(*cell)
        here = ratio(samples) if samples is not None else f"{cell[2]} is not installed"
        lacking |= {cell[2]: None} if samples is None else {}
        line = [here, *values.get(row, ["?"] * len(names))]
        print(f"{row:18}" + " | ".join(f"{value:>24.24}" for value in line), flush=True)
    for peer in lacking:
        print(f"\n{peer} is not installed: pip install 'covey[bench]'")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.perf_counter() - began
    print(f"\ntook {seconds:.0f} seconds, {used.ru_utime + used.ru_stime:.0f} of a CPU")
