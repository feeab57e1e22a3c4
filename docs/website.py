"""Builds the site: `make site`, or `python docs/website.py`, into the folder site; a few seconds.

The pages are those of the repository, at the same places, with the generated ones of `reference.py` in
docs/reference and the notebooks as pages. The navigation and llms.txt are made of docs/README.md. A broken
link or anchor ends the build with exit code 1. Two variables name addresses:

    COVEY_REPOSITORY   https://github.com/OWNER/covey: links to files that are no pages lead there; else they
                       lead to copies
    COVEY_SITE         the site's own address, for llms.txt and the sitemap
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import reference
import yaml
from check import LINK, NOT_FOR_USERS, PAGES, ROOT

SOURCES = [*PAGES, *ROOT.glob("conformance/*.md"), *ROOT.glob("benchmarks/results/*.md")]
STYLE = ROOT / "docs/website.css"
PICTURES = [*ROOT.glob("docs/images/**/*.*"), *ROOT.glob("benchmarks/results/*.svg"), STYLE]
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))
NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n"
"""Front matter of a page that the search leaves out."""
SECTION, ENTRY = re.compile(r"\*\*(.+)\*\*"), re.compile(r"- \[(.+)\]\((.+)\): (.*)")
REFERENCE = {
    "Settings": ("settings.md", "every setting: default, values, TRL's name, methods that read it"),
    "Algorithm and loss": ("algorithm.md", "every function on the axes of an algorithm, and its settings"),
    "API: covey": ("python.md", "the Python API"),
    "API: covey_verify": ("verifiers.md", "the API of the verifiers, with their settings"),
    "API: covey.trl": ("trl.md", "TRL's trainers, and the meaning of every field of TRL's configs"),
    "API: covey.audit": ("audit.md", "recorders for other trainers"),
}
"""Title -> page in docs/reference, description."""
Section = tuple[str, Sequence[tuple[str, str, str]]]
"""Title; title, path and description of each page."""


def navigation() -> Iterator[Section]:
    """Yield the sections of docs/README.md, and the generated pages after the methods."""
    docs = ROOT / "docs"
    text = (docs / "README.md").read_text(encoding="utf-8")
    for part in text.split("\n\n**")[1:]:
        title, *lines = f"**{part}".replace("\n  ", " ").splitlines()
        entries = [found.groups() for line in lines if (found := ENTRY.fullmatch(line))]
        (section,) = SECTION.fullmatch(title).groups()
        yield section, [(name, within(docs / target), about) for name, target, about in entries]
        if section.startswith("Methods"):
            yield "Families of algorithms", list(families(docs / "algorithms"))
            yield (
                "Reference",
                [(n, f"docs/reference/{file}", about) for n, (file, about) in REFERENCE.items()],
            )


def families(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield title, path and description of the pages that the list of presets leads to, in its order."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    for name in dict.fromkeys(re.findall(r"^\| \[`\w+`\]\((\w+\.md)", text, re.MULTILINE)):
        title, about, *_ = (folder / name).read_text(encoding="utf-8").removeprefix("# ").split("\n\n")
        yield title, within(folder / name), " ".join(about.split())


def within(path: Path) -> str:
    """Return a path from the root of the repository; that of a notebook is its page's."""
    return path.resolve().relative_to(ROOT).with_suffix(".md").as_posix()


def stage(pages: Path) -> None:
    """Write all pages, pictures and linked files into a folder, at their places in the repository."""
    made = {f"docs/reference/{name}": text for name, text in reference.pages().items()}
    made |= {within(file): notebook_page(file) for file in NOTEBOOKS}
    made |= {within(page): linked(page, pages) for page in SOURCES}
    made |= {name: f"{NOT_SEARCHED}{made[name]}" for name in made if not for_users(name)}
    for name, text in made.items():
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        (pages / name).write_text(text, encoding="utf-8")
    for file in PICTURES:
        copied(file, pages)


def for_users(name: str) -> bool:
    """Whether the search finds a page; results and work on covey would hide the others."""
    return Path(name).name not in (*NOT_FOR_USERS, "AGENTS.md") and not name.startswith("benchmarks/")


def copied(file: Path, pages: Path) -> None:
    """Copy a file to its place among the pages."""
    target = pages / file.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)


def linked(page: Path, pages: Path) -> str:
    """Return a page whose links to files that are no pages lead to the repository, or to copies of them."""
    repository = os.environ.get("COVEY_REPOSITORY", "").rstrip("/")

    def target(found: re.Match[str]) -> str:
        file = (page.parent / found[1].partition("#")[0]).resolve()
        if re.match(r"[a-z]+:", found[1]) or not file.is_file() or file in (*SOURCES, *PICTURES):
            return found[0]
        if file in NOTEBOOKS:
            return found[0].replace(".ipynb", ".md")
        if repository:
            return f"]({repository}/blob/main/{file.relative_to(ROOT).as_posix()})"
        copied(file, pages)
        return found[0]

    return LINK.sub(target, page.read_text(encoding="utf-8"))


def notebook_page(file: Path) -> str:
    """Return a notebook as a page: texts, code, and what the code gave."""
    parts = list[str]()
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("data", {"text/plain": output.get("text", "")})
            if "text/html" in shown:  # a blank line would end the block of HTML
                parts.append("<div>" + re.sub(r"\n\s*\n", "\n", "".join(shown["text/html"])) + "</div>")
            else:
                parts.append(f"```text\n{''.join(shown['text/plain'])}\n```")
    return "\n\n".join(parts) + "\n"


def config(sections: Sequence[Section]) -> Mapping[str, Any]:
    """Return the builder's settings: those of website.yml, the navigation, llms.txt and the addresses."""
    about = yaml.safe_load((ROOT / "docs" / "website.yml").read_text(encoding="utf-8"))
    nav = [{title: [{name: path} for name, path, _ in pages]} for title, pages in sections]
    texts = {title: [{path: text} for _, path, text in pages] for title, pages in sections}
    return {
        **about,
        "site_url": os.environ.get("COVEY_SITE", "http://127.0.0.1:8000/"),
        "docs_dir": "pages",
        "site_dir": "site",
        "nav": nav,
        "plugins": [*about["plugins"], {"llmstxt": {"full_output": "llms-full.txt", "sections": texts}}],
    }


def build(home: Path) -> Path:
    """Build the site in a folder, which is emptied; return the folder of the site.

    Raises CalledProcessError if a link or an anchor is broken; the builder has printed which.
    """
    shutil.rmtree(home, ignore_errors=True)
    stage(home / "pages")
    settings = yaml.safe_dump(dict(config(list(navigation()))), sort_keys=False)
    (home / "mkdocs.yml").write_text(settings, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    subprocess.run(command, cwd=home, check=True)
    return home / "site"


if __name__ == "__main__":
    try:
        built = build(ROOT / "build" / "site")
    except subprocess.CalledProcessError:
        sys.exit(1)
    shutil.rmtree(ROOT / "site", ignore_errors=True)
    shutil.move(built, ROOT / "site")
