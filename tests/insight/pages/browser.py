"""Numbers of a page in a browser."""

from __future__ import annotations

import json
import re

import pytest

from covey.insight.pages import lab


def numbers(page, selector: str) -> list[float]:
    page.wait_for_selector(selector)
    return [float(v) for v in page.eval_on_selector_all(selector, "all => all.map(e => e.dataset.value)")]


def walk(page, guide: dict) -> None:
    """Go through a guided page; every number of its sentences is the library's."""
    page.wait_for_selector(f"h1:text-is({json.dumps(guide['title'])})")
    for look in guide["looks"]:
        wanted = told(guide, look)
        page.wait_for_function("() => !document.querySelector('.say').textContent.includes('…')")
        if wanted:
            assert numbers(page, ".say .num") == pytest.approx(wanted, abs=1e-6), look["say"]
        page.click(".steps-of .primary")


def told(guide: dict, look: dict) -> list[float]:
    """The numbers of a sentence, as the library computes them."""
    answer = lab.answer_tool(guide["tool"], {k: [v] for k, v in look["ask"].items()})
    wanted = []
    for path in re.findall(r"\{([^{}:]+):[+%]?\d\}", look["say"]):
        value = answer
        for part in path.split("."):
            named = isinstance(value, list) and not part.isdecimal()
            value = (
                next(v for v in value if v["name"] == part)
                if named
                else value[int(part)]
                if isinstance(value, list)
                else value[part]
            )
        wanted.append(value)
    return wanted
