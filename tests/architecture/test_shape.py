"""The shape of the code: what a reader may rely on."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import covey
from covey.config.load import key_paths

SOURCE = Path(covey.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_the_training_loop_fits_on_a_page() -> None:
    tree = ast.parse((SOURCE / "training" / "rl.py").read_text())
    (loop,) = [f for f in functions(tree) if f.name == "train"]
    assert loop.end_lineno - loop.lineno < 30
    assert len((SOURCE / "training" / "rl.py").read_text().splitlines()) < 160


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_file_says_what_room_it_is_and_stays_readable(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert (ast.get_docstring(tree) or "").strip(), "the first line says what the file is"
    assert len(text.splitlines()) <= 450
    for function in functions(tree):
        assert function.end_lineno - function.lineno < 70, function.name


def test_no_branch_on_an_algorithm_name() -> None:
    for path in FILES:
        assert not re.search(r"algorithm(\.name)? ==", path.read_text()), path


def test_every_setting_is_read_somewhere() -> None:
    text = "\n".join(p.read_text() for p in FILES if p.parent.name != "config")
    text += (SOURCE / "config" / "load.py").read_text()
    unread = [k for k in key_paths() if not re.search(rf"\b{k.rpartition('.')[2]}\b", text)]
    assert not unread


def test_the_public_names() -> None:
    assert covey.__all__ == [
        "Completion",
        "CoveyError",
        "Group",
        "Problem",
        "Score",
        "StepRewards",
        "__version__",
        "evaluate",
        "explain",
        "resume",
        "reward",
        "sample",
        "train",
    ]
    assert all(hasattr(covey, name) for name in covey.__all__)


def test_light_rooms_do_not_load_torch() -> None:
    modules = [
        "covey",
        "covey.cli",
        "covey.config",
        "covey.rewards.base",
        "covey.tasks.source",
        "covey.scoring",
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
