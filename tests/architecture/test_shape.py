"""The shape of the code: what a reader may rely on."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import covey
from covey.config.sources import key_paths
from covey.rewards.scorer import Rewards
from covey.sandbox.choice import choose

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


def read_from_sections(trees: list[ast.AST]) -> set[str]:
    """`section.setting` of all attributes that are taken from a section, by whatever name it goes.

    A section goes by its own name, or by another that was assigned from it (`r = config.rollout`).
    """
    read: set[str] = set()
    for tree in trees:
        names = {section: {section} for section in (*SECTIONS, "config")}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                for target, value in pairs(node.targets[0], node.value):
                    if (
                        isinstance(target, ast.Name)
                        and isinstance(value, ast.Attribute)
                        and value.attr in names
                    ):
                        names[value.attr].add(target.id)
            if isinstance(node, ast.arg) and node.annotation is not None:
                annotation = ast.unparse(node.annotation).strip("'\"").lower()
                if annotation in names:
                    names[annotation].add(node.arg)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                of = name_in(node.value)
                if isinstance(node.value, ast.Attribute) and of != "config":
                    of = (
                        of if name_in(node.value.value) in {*names["config"], "self"} else ""
                    )  # data.train is no section
                read |= {f"{section}.{node.attr}" for section, known in names.items() if of in known}
    return read


def name_in(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


HANDED_OVER = {"sandbox": choose, "scoring": Rewards}
"""Who takes a section's settings as keyword arguments; ruff sees that they are used there."""
SECTIONS = sorted({k.partition(".")[0] for k in key_paths() if "." in k})


def test_every_setting_is_read_from_its_section() -> None:
    read = read_from_sections([ast.parse(p.read_text()) for p in FILES])
    for section, taker in HANDED_OVER.items():
        read |= {f"{section}.{name}" for name in inspect.signature(taker).parameters}
    unread = [k for k in key_paths() if (k if "." in k else f"config.{k}") not in read]
    assert not unread


def test_a_setting_that_nothing_reads_is_noticed() -> None:
    read = read_from_sections(
        [ast.parse("def f(t: Train, config): r = config.rollout; t.lr; r.stop; other.top_p; data.train.name")]
    )
    assert read >= {"train.lr", "rollout.stop", "config.rollout"}
    assert not {"rollout.top_p", "train.stop", "train.steps", "train.name"} & read


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
