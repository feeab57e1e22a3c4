"""Check that pages agree with the code, and the words of both: links, commands, configs, paths, Python.

`make docs` runs it.

Prints each finding as file:line: what; exit code 1 if there is any. Every yaml block is a config or a part
of one; a python block that begins with `# name.py` is a file beside the page's configs.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cyclopts import CycloptsError, MissingArgumentError

from covey.cli import app
from covey.config.load import load_config
from covey.config.schema import Sandbox, Scoring
from covey.rewards.loading import load_rewards
from covey.rollouts.learned import LEARNED
from covey_verify.errors import CoveyError

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/covey"
VERIFY = ROOT / "packages/verify"
DEMO = PACKAGE / "config/recipes/demo.yaml"
"""The config whose settings a command `covey demo` may change."""
PLACES = (ROOT, PACKAGE, VERIFY / "src")
"""Where a path in a page may begin."""
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *VERIFY.glob("*.md")])
SOURCES = [
    f for room in (PACKAGE, VERIFY / "src") for kind in ("*.py", "*.yaml") for f in sorted(room.rglob(kind))
]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
CODE, LINK = re.compile(r"`([^`]+)`"), re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"([\w.-]+(?:/[\w.-]+)*/?)(?::(?:\w+\.)?(\w+))?")
COUNT = re.compile(
    r"\b(?:\d+|\w+teen|(?:twenty|thirty|forty|fifty)[\w-]*) (?:presets|causes|findings)\b", re.IGNORECASE
)
BETTER = {
    "a share of": "a fraction of",
    "cut off": "truncated",
    "for ever": "forever",
    "go on": "continue",
    "goes on": "continues",
    "lane": "method, route",
    "nobody waits": "no process waits",
    "pushed": "raised, lowered",
    "right answer": "correct answer",
    "right completion": "correct completion",
    "stands for": "means",
    "stands in": "is in",
    "turned over": "flipped",
    "whoever": "anybody who",
    "wrong answer": "incorrect answer",
    "wrong completion": "incorrect completion",
}
"""Phrase banned from users' pages and texts in the code -> the better word; in CONTRIBUTING.md too."""
NOT_FOR_USERS = ("CHANGELOG.md", "CONTRIBUTING.md", "architecture.md", "coverage.md", "log.md")
BANNED = re.compile(
    r"\b(?:" + "|".join(phrase.replace(" ", r"\s+") for phrase in BETTER) + r")s?\b", re.IGNORECASE
)
OPENING = re.compile(r"(?:Say|What|How|Where|When|Why|Whoever|Its|Those) ")
"""First words that no docstring has: a verb or a noun is clearer, as Show, Reason, Number, Time, Place."""
ARROW = re.compile(r"[.;:]\s+-> [a-z]")
"""An arrow in the place of `Return`. Between shapes, or a key and its value, arrows are at home."""
OURS = re.compile(r"(?<![\w./-])(?:benchmarks|conformance|docs|examples|tests)/[\w./-]+\.(?:py|md|yaml)\b")
"""A file of the repository that a text names, as in `python benchmarks/real.py`."""
Line = tuple[int, str]
Block = tuple[int, str, list[str]]
"""Number of the first line, language, lines."""


def parsed(page: Path) -> tuple[list[Line], list[Block]]:
    """The lines outside of fenced blocks, numbered, and the blocks."""
    prose: list[Line] = []
    blocks: list[Block] = []
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            inside = not inside
            blocks += [(number + 1, line[3:].strip(), [])] if inside else []
        else:
            blocks[-1][2].append(line) if inside else prose.append((number, line))
    return prose, blocks


def findings(page: Path) -> Iterator[Line]:
    """All that is wrong with a page."""
    prose, blocks = parsed(page)
    found = [(n, path_problem(page, code)) for n, line in prose for code in CODE.findall(line)]
    found += [(n, link_problem(page, target)) for n, line in prose for target in LINK.findall(line)]
    if page.name != "log.md":  # which says what was, on its day
        found += [(n, problem(line)) for n, line in prose for problem in (count_problem, file_problem)]
    if page.name not in NOT_FOR_USERS:
        found += banned_phrases(prose)
    commands = [(n, code) for n, line in prose for code in CODE.findall(line)]
    for start, language, lines in blocks:
        if language == "sh":
            commands += whole_commands(start, lines)
            found += [(n, file_problem(line)) for n, line in enumerate(lines, start)]
        if language == "python":
            found.append((start, python_problem("\n".join(lines))))
    found += [(n, command_problem(code)) for n, code in commands if code.startswith(("covey ", "make "))]
    yield from ((number, what) for number, what in (*found, *config_problems(blocks)) if what)


def link_problem(page: Path, target: str) -> str | None:
    """What is wrong with a link, if it leads to a file of ours."""
    if re.match(r"[a-z]+:", target):
        return None
    file, _, anchor = target.partition("#")
    path = page.parent / file if file else page
    if not path.exists():
        return f"no such file: {file}"
    titles = (
        [line.strip("# ").lower() for _, line in parsed(path)[0] if line.startswith("#")] if anchor else ()
    )
    anchors = [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]  # as GitHub spells them
    return f"no such heading: {target}" if anchor and anchor not in anchors else None


def path_problem(page: Path, code: str) -> str | None:
    """What is wrong with a path of the repository, or with the name after its colon."""
    if not (match := PATH.fullmatch(code)):
        return None
    path, name = match.groups()
    if path.startswith("runs/") or "NNNNNN" in path:
        return None  # a file of the reader's own runs
    # What begins like nothing of ours is the reader's own, or no path; in coverage.md all files are ours.
    ours = [base for base in PLACES if (base / path.partition("/")[0]).exists()]
    if not ours and not (page.name == "coverage.md" and Path(path).suffix in {".py", ".md", ".c"}):
        return None
    if not (found := [base / path for base in ours if (base / path).exists()]):
        return f"no such path: {path}"
    defined = rf"^\s*(async def|def|class) {name}\b|^ *{name}\b.*=|^ *{name}: "
    missing = name and not re.search(defined, found[0].read_text(encoding="utf-8"), re.MULTILINE)
    return f"{path} defines no {name}" if missing else None


def count_problem(line: str) -> str | None:
    """A count of what is added to now and then: nothing corrects it when it is."""
    counted = COUNT.search(line)
    return f"a count that the next one makes false: {counted[0]}; leave the number out" if counted else None


def banned_phrases(prose: list[Line]) -> Iterator[Line]:
    """Phrases with a better word, also across the end of a line. Code and addresses may have them."""
    numbers = [number for number, _ in prose]
    text = "\n".join(LINK.sub("]", CODE.sub("`", line)) for _, line in prose)
    for phrase in BANNED.finditer(text):
        said = " ".join(phrase[0].split())
        better = BETTER.get(said.lower()) or BETTER[said.lower().removesuffix("s")]
        yield numbers[text.count("\n", 0, phrase.start())], f"not '{said}', but: {better}"


def texts(source: Path) -> Iterator[tuple[list[Line], bool]]:
    """Texts in a file of the package, as numbered lines, and whether each is a docstring, as of a field."""
    content = source.read_text(encoding="utf-8")
    if source.suffix == ".yaml":
        yield list(enumerate(content.splitlines(), start=1)), False
        return
    nodes = list(ast.walk(ast.parse(content)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        # A string without a space is a name.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield list(enumerate(node.value.splitlines(), node.lineno)), id(node) in docstrings


def source_findings(source: Path) -> Iterator[Line]:
    """All that is wrong with the words of messages, settings, helps, docstrings and tables."""
    for lines, docstring in texts(source):
        yield from banned_phrases(lines)
        yield from ((n, problem) for n, line in lines for problem in [file_problem(line)] if problem)
        if docstring and OPENING.match(lines[0][1]):
            yield lines[0][0], f"a docstring begins with a verb or a noun, not: {lines[0][1].split()[0]}"
        if docstring and ARROW.search("\n".join(line for _, line in lines)):
            yield lines[0][0], "a docstring says `Return ...` instead of `. -> ...`"


def python_problem(text: str) -> str | None:
    """Why a block is not Python."""
    try:
        compile(text, "block", "exec")
    except SyntaxError as error:
        return f"not valid Python: {error}"
    return None


def whole_commands(start: int, lines: list[str]) -> Iterator[Line]:
    """Yield the commands of a block, numbered, those of several lines as one."""
    begun = ""
    for number, line in enumerate(lines, start):
        begun += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield number, begun
            begun = ""


def command_problem(code: str) -> str | None:
    """What is wrong with a `covey` or `make` command: its name, a flag, a setting or its value."""
    program, *words = shlex.split(code, comments=True)
    if program == "make":
        unknown = [w for w in words if "=" not in w and w not in TARGETS]
        return f"the Makefile has no target {unknown[0]}" if unknown else None
    try:
        _, bound, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
        recipe = DEMO if words[0] == "demo" else None
        load_config(recipe, overrides=bound.arguments.get("settings", ()))
    except MissingArgumentError:
        return None  # a command that is only mentioned
    except (CycloptsError, CoveyError) as error:
        return f"{code}: {error}"
    return None


def file_problem(line: str) -> str | None:
    """Why a line names a file that is not there. What a script made may name it with its commit."""
    missing = [path for path in OURS.findall(line) if not (ROOT / path).exists()]
    return f"no such file: {missing[0]}" if missing and "of commit" not in line else None


def config_problems(blocks: list[Block]) -> Iterator[Line]:
    """Blocks of YAML that covey would refuse, rewards included."""
    with tempfile.TemporaryDirectory() as folder:
        for _, language, lines in blocks:
            if language == "python" and (named := re.fullmatch(r"# (\w+\.py)", lines[0])):
                (Path(folder) / named[1]).write_text("\n".join(lines), encoding="utf-8")
        for start, _, lines in (b for b in blocks if b[1] == "yaml"):
            file = Path(folder) / "config.yaml"
            file.write_text("\n".join(lines), encoding="utf-8")
            try:
                for stage in load_config(file).stages():
                    if rewards := stage.config.rewards:  # nothing is run, so nothing has to be confined
                        _ = load_rewards(
                            rewards, stage.folder, Scoring(), Sandbox(unsafe_local=True), LEARNED
                        ).verdict
            except CoveyError as error:
                yield start, str(error).replace(f"{folder}/", "")


if __name__ == "__main__":
    everything = [(page.relative_to(ROOT), *line) for page in PAGES for line in sorted(findings(page))]
    everything += [(file.relative_to(ROOT), *line) for file in SOURCES for line in source_findings(file)]
    for where, number, what in everything:
        print(f"{where}:{number}: {what}")
    sys.exit(bool(everything))
