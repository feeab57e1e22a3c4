"""Write a copy of the lab in one file that needs no server: worked examples with stored answers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import product
from pathlib import Path

from covey.insight.pages import lab
from covey.insight.pages.drawings import lab_contents, lab_texts
from covey.runs.atomic import make_folder, write_file

MODULES = ("dom", "plot", "drawings", "tools", "lab", "site")
STARTED_BY = 'start((parts) => lab(parts[0] === "lab" ? parts.slice(1) : []));'
DIGITS = 10
"""Significant digits of a number in the copy."""
Query = Mapping[str, str]


def write_copy(folder: Path) -> Path:
    """Write `lab.html` into a folder and return its path."""
    make_folder(folder)
    write_file(folder / "lab.html", copy_page())
    return folder / "lab.html"


def copy_page() -> str:
    """Return the lab as one HTML file; its content security policy forbids every request."""
    static = files("covey") / "insight" / "pages" / "static"
    style = (static / "style.css").read_text(encoding="utf-8")
    scripts = [(static / f"{name}.js").read_text(encoding="utf-8") for name in MODULES]
    script = "\n".join([*(_without_modules(text) for text in scripts), STARTED_BY])
    # "<" is escaped, so that no answer can end the script element it is in.
    answers = json.dumps(stored_answers(), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; img-src data:; script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>covey lab</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header id="bar"></header>
<main id="main" tabindex="-1"></main>
<script type="application/json" id="answers">{answers}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _without_modules(text: str) -> str:
    """Return a module's text without imports and exports, for one scope with the other modules.

    Their top-level names are all different.
    """
    text = re.sub(r"^import [^;]*;\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^export ", "", text, flags=re.MULTILINE)


def stored_answers() -> dict[str, object]:
    """Return address -> answer for every state that the copy can show."""
    found: dict[str, object] = {"lab?": lab_contents()}
    for tool, query in stored_states():
        address = f"lab/{tool}?" + "&".join(sorted(f"{name}={value}" for name, value in query.items()))
        if address not in found:
            found[address] = _rounded(lab.answer_tool(tool, {name: [value] for name, value in query.items()}))
    return found


def stored_states() -> Iterator[tuple[str, Query]]:
    """Yield tool and query of every state: of guided pages, of clicks on these, and of the grids."""
    for guide in lab_texts()["guides"]:
        for look in guide["looks"]:
            yield guide["tool"], look["ask"]
            yield from ((guide["tool"], query) for query in _turned(guide["view"], look["ask"]))
    for tool, queries in lab_texts()["first"].items():
        yield from ((tool, query) for query in queries)
    for tool, grid in lab_texts()["grids"].items():
        yield from ((tool, dict(zip(grid, values, strict=True))) for values in product(*grid.values()))


def _turned(view: str, query: Query) -> Iterator[Query]:
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


def _rounded(value: object) -> object:
    """Return JSON with fewer digits, and null for numbers that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value
