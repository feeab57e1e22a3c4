"""A copy of the lab in one file that needs no server: worked examples with stored answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path

from covey.insight.pages import lab
from covey.insight.pages.document import address, document
from covey.insight.pages.drawings import lab_contents, lab_texts
from covey.runs.atomic import make_folder, write_file
from covey.system.text import with_finite_numbers

DIGITS = 10
"""Significant digits of a number in the copy."""
REFUSAL = "This copy of the lab holds its worked examples. Run `covey lab` for every other value."
Query = Mapping[str, str]


def write_copy(folder: Path) -> Path:
    """Write `lab.html` into a folder and return its path."""
    make_folder(folder)
    write_file(folder / "lab.html", copy_page())
    return folder / "lab.html"


def copy_page() -> str:
    """Return the lab as one HTML file."""
    return document("covey lab", ("drawings", "tools", "lab", "copy"), stored_answers(), REFUSAL)


@cache
def stored_answers() -> Mapping[str, object]:
    """Return address -> answer for every state that the copy can show: some thousand, computed once."""
    answers: dict[str, object] = {"lab?": lab_contents()}
    for tool, query in stored_states():
        question = address(f"lab/{tool}", query)
        if question not in answers:
            answer = lab.answer_tool(tool, {name: [value] for name, value in query.items()})
            answers[question] = with_finite_numbers(answer, DIGITS)
    return answers


def stored_states() -> Iterator[tuple[str, Query]]:
    """Yield tool and query of every state: of guided pages, of clicks on these, and of the grids."""
    for guide in lab_texts()["guides"]:
        for state in guide["looks"]:
            yield guide["tool"], state["ask"]
            yield from ((guide["tool"], query) for query in _next_queries(guide["view"], state["ask"]))
    for tool, queries in lab_texts()["first"].items():
        yield from ((tool, query) for query in queries)
    for tool, grid in lab_texts()["grids"].items():
        yield from ((tool, dict(zip(grid, values, strict=True))) for values in product(*grid.values()))


def _next_queries(view: str, query: Query) -> Iterator[Query]:
    """Yield the queries that a reader can reach from a state by clicks: every combination of its values."""
    rewards = query.get("rewards", "")
    if view in ("cards", "prefixes"):
        for values in product("01", repeat=rewards.count(",") + 1):
            yield {**query, "rewards": ",".join(values)}
    elif view == "sliders" and rewards.count(",") == 3 and max(map(float, rewards.split(","))) <= 1:
        for values in product(("0", "0.5", "1"), repeat=4):
            yield {**query, "rewards": ",".join(values)}
    elif view == "steps":
        for signs in product(("1", "-1"), repeat=8):
            yield {**query, "rewards": ";".join([",".join(signs[:4]), ",".join(signs[4:])])}
