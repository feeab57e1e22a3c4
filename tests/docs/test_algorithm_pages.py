"""The pages on the objective say what the code does: presets, functions, settings, metrics."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from pathlib import Path

import pytest
from tests.docs.logged_metrics import logged

import covey
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axes import AXES
from covey.objective.axis_function import AxisFunction

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "algorithms").glob("*.md"))
README = (DOCS / "algorithms/README.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
ROOMS = [p.stem for p in (Path(covey.__file__).parent / "objective").glob("*.py")] + ["length"]


def sections() -> dict[str, str]:
    """Preset -> the page that has its section."""
    found = {}
    for page in PAGES:
        for name in re.findall(r"^## `(\w+)`$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            found[name] = page.name
    return found


def short(choice: AxisFunction | None) -> str:
    if choice is None:
        return ""
    values = [f"{v:g}" if isinstance(v, float) else str(v) for v in choice.settings.values() if v is not None]
    return " ".join([choice.name, "/".join(values)]).strip()


def row(name: str, algorithm: Algorithm) -> str:
    """A preset as a line of the table in the README."""
    kl = algorithm.kl
    pull = f"{kl.estimator.name} {kl.coef:g} {kl.place}" if kl else ""
    pull += " completion" if kl and kl.level == "completion" else ""
    rest = [algorithm.select_tokens, *algorithm.token_weights, *algorithm.correction, algorithm.filter]
    more = [short(c) for c in rest if c] + (["old sampler"] if algorithm.old == "sampler" else [])
    more += [f"critic {algorithm.critic.trunk}"] if algorithm.critic else []
    axes = (algorithm.advantage, algorithm.whiten, algorithm.ratio, algorithm.surrogate)
    cells = [*map(short, axes), pull, short(algorithm.reduce), ", ".join(more)]
    return f"| [`{name}`]({sections()[name]}#{name}) | {' | '.join(cells)} |"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_its_section_and_its_row(name: str) -> None:
    assert name in sections()
    assert row(name, PRESETS[name]) in README.splitlines()


def test_no_section_is_about_something_that_does_not_exist() -> None:
    assert set(sections()) == set(PRESETS)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_function_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(rf"`({'|'.join(ROOMS)})\.(\w+)`", page.read_text(encoding="utf-8"))
    for room, function in named:
        place = "covey_verify.texts" if room == "length" else "covey.objective"
        module = importlib.import_module(f"{place}.{room}")
        assert inspect.isfunction(getattr(module, function, None)), f"{room}.{function}"


@pytest.mark.parametrize("function", [f for functions in AXES.values() for f in functions])
def test_every_function_of_an_axis_is_explained_somewhere(function) -> None:
    room = function.__module__.rpartition(".")[2]
    assert any(f"`{room}.{function.__name__}`" in p.read_text(encoding="utf-8") for p in PAGES)


# --- metrics --------------------------------------------------------------------------------------


def test_every_metric_is_explained_and_no_other() -> None:
    explained = set(re.findall(r"^\| `([\w/.@]+)`", METRICS, flags=re.MULTILINE))
    assert logged() - explained == set()
    assert explained - logged() == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_metric_that_a_page_watches_is_logged(page: Path) -> None:
    families = {name.partition("/")[0] for name in logged() if "/" in name}
    named = re.findall(rf"`((?:{'|'.join(families)})/[\w.]+)`", page.read_text(encoding="utf-8"))
    for name in named:
        assert re.sub(r"\d\.\d\d_\d\.\d\d", "A_B", name) in logged(), name


def test_the_numbers_that_the_pages_derive() -> None:
    # VESPO's weight outside [.05, 5], and the weight of easy and hard prompts under the std.
    for ratio in (0.05, 5.0):
        assert ratio**2 * math.exp(3 * (1 - ratio)) < 0.05
        assert ratio**3 * math.exp(2 * (1 - ratio)) < 0.05
    assert 1 / math.sqrt(0.05 * 0.95) == pytest.approx(4.6, abs=0.05)
