"""The site: built strictly, loads nothing from elsewhere, and has every public name and every setting."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covey.cli.settings import loss_rows
from covey.config.algorithm import algorithm_keys
from covey.config.rows import key_paths

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))  # its programs import each other
import curves  # noqa: E402
import reference  # noqa: E402
import website  # noqa: E402

PAGES = reference.pages()
NAMES = [(page, module, name) for page, modules in reference.API.items() for module in modules
         for name in reference.public_names(importlib.import_module(module))]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical")
    return website.build(tmp_path_factory.mktemp("built") / "home")


@pytest.mark.parametrize(("page", "module", "name"), NAMES, ids=lambda text: text)
def test_a_public_name_is_described_on_its_page(page: str, module: str, name: str) -> None:
    thing = getattr(importlib.import_module(module), name)
    assert inspect.getdoc(thing)
    assert f"{{ #{module}.{name} }}" in PAGES[page]


def test_the_names_are_those_that_python_lists() -> None:
    listed = {f"{module}.{name}" for _, module, name in NAMES}
    for module in ("covey", "covey_verify"):
        shown = {f"{module}.{name}" for name in dir(importlib.import_module(module)) if name[0] != "_"}
        assert shown and shown <= listed
    assert {"covey.audit.writers.trl.record_run", "covey.trl.GRPOTrainer", "covey.trl.GRPOConfig"} <= listed


def test_every_setting_has_a_heading_of_its_own() -> None:
    text = PAGES["settings.md"] + PAGES["algorithm.md"]
    keys = [*key_paths(), *algorithm_keys(), *(row.key for row in loss_rows())]
    assert [key for key in keys if not re.search(rf"^#+ `{re.escape(key)}`", text, re.MULTILINE)] == []
    for page in PAGES.values():
        anchors = re.findall(r"\{ #(\S+) \}$", page, re.MULTILINE)
        assert len(anchors) == len(set(anchors))


def test_an_entry_has_the_facts_of_its_row() -> None:
    entry = PAGES["settings.md"].partition("### `train.lr`")[2].partition("###")[0]
    for fact in ("Default: `1e-06`", "Values: float >= 0", "In TRL: `learning_rate`", "On resume: "):
        assert fact in entry
    assert "Read by: every method but `pairs`, `rejection_sampling`, `filter`" in entry


def test_a_docstring_is_markdown() -> None:
    made = reference.prose("Add <b> to a_b*.\n\n>>> f(<x>)\n2\n\n    a <c>\n\nSee ``d_<e>``.")
    assert made == (
        "Add &lt;b> to a\\_b\\*.\n\n```pycon\n>>> f(<x>)\n2\n```\n\n    a <c>\n\nSee ``d_<e>``.\n"
    )


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    address = r"""["']?(?:https?:)?//"""
    loads = re.compile(rf"(?:src=|url\(|@import |<link rel=\W?(?:stylesheet|pre\w+|icon)\W? href=){address}")
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 80
    assert [file for file in files if loads.search(file.read_text(encoding="utf-8"))] == []


def test_the_site_has_the_pages_of_the_index(site: Path) -> None:
    index = (site / "llms.txt").read_text(encoding="utf-8")
    whole = (site / "llms-full.txt").read_text(encoding="utf-8")
    for _, pages in website.navigation():
        assert pages
        for title, path, about in pages:
            assert about
            folder = Path(path).parent if Path(path).name == "README.md" else Path(path).with_suffix("")
            assert (site / folder / "index.html").is_file(), title
            assert f"{folder}/index.md>".removeprefix("./") in index
    assert "AdamW learning rate" in whole


def test_the_search_knows_settings_and_not_the_log(site: Path) -> None:
    entries = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    places = {entry["location"] for entry in entries}
    assert {"docs/reference/settings/#train.lr", "docs/findings/"} <= places
    assert "docs/log/" not in places


def test_a_broken_link_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zensical")
    broken = {**PAGES, "audit.md": "# covey.audit\n\n[gone](settings.md#train.nothing)\n"}
    monkeypatch.setattr(reference, "pages", lambda: broken)
    with pytest.raises(subprocess.CalledProcessError):
        website.build(tmp_path / "home")


def test_files_that_are_no_pages_are_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = website.ROOT / "docs/algorithms/ppo.md"
    assert "](../../examples/ppo.yaml)" in website.linked(page, tmp_path)
    assert (tmp_path / "examples/ppo.yaml").is_file()
    monkeypatch.setenv("COVEY_REPOSITORY", "https://example.org/o/covey")
    assert "](https://example.org/o/covey/blob/main/examples/ppo.yaml)" in website.linked(page, tmp_path)


@pytest.mark.parametrize("file", website.NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [c for c in json.loads(file.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for cell in cells:
        assert cell["outputs"] or cell is cells[0]
        exec("".join(cell["source"]), names)
    assert names["result"].conclusion.word == "learned"
    assert "truncated" in capsys.readouterr().out
    assert str(Path.home()) not in file.read_text(encoding="utf-8")


def test_the_curves_are_those_of_the_record() -> None:
    made = curves.curves()
    kept = {file.stem: file.read_text(encoding="utf-8") for file in curves.CURVES.glob("*.svg")}
    assert len(made) >= 9
    assert {name: kept[name] for name in made} == made
    assert all(len(picture) <= 30_000 for picture in kept.values())
