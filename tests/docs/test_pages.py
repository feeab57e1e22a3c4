"""Every page says what is there, and the coverage table is whole."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
COVERAGE = (ROOT / "docs/coverage.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in COVERAGE.splitlines()
    if re.match(r"\| [SP]\d+ ", line)
]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_check", ROOT / "docs/check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = loaded()


@pytest.mark.parametrize("page", CHECK.PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_says_what_is_there(page: Path) -> None:
    assert list(CHECK.findings(page)) == []


def test_the_texts_in_the_code_are_in_the_fields_words() -> None:
    found = [
        (file.relative_to(ROOT), *line) for file in CHECK.SOURCES for line in CHECK.source_findings(file)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.py", '"""A module."""\nx = "the run goes\\non here"\n', "not 'goes on'"),
        ("a.py", 'def f() -> str:\n    """The right answer."""\n    return ""\n', "not 'right answer'"),
        ("a.py", 'x = f"{y} of whoever asks"\n', "not 'whoever'"),
        ("a.py", 'x: int\n"""Its size in bytes."""\n', "a verb or a noun, not: Its"),
        ("a.py", 'def f() -> int:\n    """Do it. -> the result."""\n', "`Return ...`"),
        ("a.yaml", "a: 1\nsays: it is cut off\n", "not 'cut off'"),
        ("a.py", 'x = "measured (docs/nope.md)"\n', "no such file: docs/nope.md"),
    ],
)
def test_a_mistake_in_the_code_is_found(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    ((_, what),) = CHECK.source_findings(tmp_path / name)
    assert says in what


def test_names_calls_and_shapes_are_left_alone(tmp_path: Path) -> None:
    text = 'x = "lanes"\ny = "`goes on`"\nz = f("What is it?")\n"""Map. (N,) -> (N,)."""\n'
    (tmp_path / "a.py").write_text(text)
    assert list(CHECK.source_findings(tmp_path / "a.py")) == []


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("see [x](nope.md)", 1, "no such file: nope.md"),
        ("\n# A b\n[x](#a-c)", 3, "no such heading: #a-c"),
        ("`objective/loss.py:nope`", 1, "defines no nope"),
        ("`src/covey/nope.py`", 1, "no such path"),
        ("`covey trian`", 1, 'Unknown command "trian"'),
        ("```sh\ncovey train a.yaml --train.lrr 1\n```", 2, "did you mean train.lr"),
        ("```sh\ncovey sample m --nope 1\n```", 2, "--nope"),
        ("```sh\ncovey demo \\\n  --stages.2.train.lrr 1\n```", 3, "did you mean"),
        ("`make nothing`", 1, "no target nothing"),
        ("```yaml\nalgoritm: dapo\n```", 2, "did you mean algorithm"),
        ("```yaml\nrewards: [math_anwser]\n```", 2, "did you mean math_answer"),
        ("It has 35 presets.", 1, "35 presets; leave the number out"),
        ("It knows\nseventeen causes.", 2, "seventeen causes"),
        ("```python\ndef f(:\n```", 2, "not valid Python"),
        ("It counts the Wrong answers.", 1, "not 'Wrong answers', but: incorrect answer"),
        ("by `python benchmarks/nope.py --write`", 1, "no such file: benchmarks/nope.py"),
        ("```sh\n\npython benchmarks/nope.py\n```", 3, "no such file"),
        ("```\nx\n```\nThe run goes\non.", 4, "not 'goes on', but: continues"),
    ],
)
def test_a_mistake_is_found(tmp_path: Path, text: str, line: int, says: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    ((number, what),) = CHECK.findings(page)
    assert number == line and says in what


def test_the_readers_own_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`groups/dead` `mine.py:f` `covey train`\n```python\n# mine.py\ndef f(completion): return 1.0\n```\n"
        "```yaml\nrewards: [mine.py:f]\n```\n[x](https://example.org) "
        "`python benchmarks/nope.py` of commit 8e212e8"
    )
    assert list(CHECK.findings(page)) == []


def test_a_banned_word_is_left_to_names_code_and_what_was(tmp_path: Path) -> None:
    text = "`covey recommend` [methods](methods.md) `a share of` the lanesman goes\n\n```\ngoes on\n```"
    (tmp_path / "methods.md").touch()
    (tmp_path / "page.md").write_text(text)
    (tmp_path / "log.md").write_text("It goes on.")
    assert [line for page in ("page.md", "log.md") for line in CHECK.findings(tmp_path / page)] == []


def test_contributing_has_the_table_of_banned_phrases() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.partition("| not | but |\n|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [f"| {phrase} | {better} |" for phrase, better in CHECK.BETTER.items()]


def test_the_coverage_table_is_whole() -> None:
    ids = [row[0] for row in ROWS]
    assert ids == [f"S{n}" for n in range(1, 185)] + [f"P{n}" for n in range(1, 21)]
    for name, _, state, where, proof in ROWS:
        word = state.partition(":")[0]
        assert word in {"done", "part", "not yet"}, name
        assert (word == "part") == (":" in state), f"{name}: `part` says what is missing"
        assert word == "not yet" or "`" in where, f"{name}: where is it?"
        assert word != "done" or "`" in proof or "](" in proof, f"{name}: what proves it?"


def test_the_counts_are_those_of_the_table() -> None:
    for kind in "SP":
        counts = Counter(state.partition(":")[0] for name, _, state, *_ in ROWS if name[0] == kind)
        said = f"{counts['done']} done, {counts['part']} in part, {counts['not yet']} not yet"
        assert said in COVERAGE, f"{kind}: {said}"
