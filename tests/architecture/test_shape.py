"""The shape of the code: what a reader may rely on."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import covey
import covey_verify
from covey.config.rows import key_paths
from covey.rewards.scorer import Rewards
from covey_verify.sandbox.choice import choose

SOURCE = Path(covey.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
VERIFY = Path(covey_verify.__file__).parent
BOTH = [*FILES, *sorted(VERIFY.rglob("*.py"))]


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_the_training_loop_fits_on_a_page() -> None:
    tree = ast.parse((SOURCE / "training" / "rl.py").read_text())
    (loop,) = [f for f in functions(tree) if f.name == "train"]
    assert loop.end_lineno - loop.lineno < 30
    assert len((SOURCE / "training" / "rl.py").read_text().splitlines()) < 160


@pytest.mark.parametrize("path", BOTH, ids=lambda p: "/".join(p.parts[-3:]))
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
        names = {section: {section, *ALSO.get(section, ())} for section in (*SECTIONS, "config")}
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
ALSO = {"sampler": ("servers", "settings")}
"""Further names of a section, where its own would be another thing's."""
SECTIONS = sorted({k.split(".")[-2] for k in key_paths() if "." in k})


def test_every_setting_is_read_from_its_section() -> None:
    read = read_from_sections([ast.parse(p.read_text()) for p in FILES])
    for section, taker in HANDED_OVER.items():
        read |= {f"{section}.{name}" for name in inspect.signature(taker).parameters}
    unread = [k for k in key_paths() if ".".join(f"config.{k}".split(".")[-2:]) not in read]
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
        "covey.rewards.loading",
        "covey.tasks.source",
        "covey.commands.scoring",
        "covey.insight.show",
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- the house: what keeps a reader's trail whole -------------------------------------------------


def modules() -> dict[str, ast.Module]:
    """Every module of both packages by its dotted name."""
    names = {
        ".".join(p.relative_to(root.parent).with_suffix("").parts): p
        for root in (SOURCE, VERIFY)
        for p in BOTH
        if p.is_relative_to(root)
    }
    return {name.removesuffix(".__init__"): ast.parse(path.read_text()) for name, path in names.items()}


def imported(tree: ast.Module, known: set[str]) -> set[str]:
    """Modules of ours that a module names in any import: inside functions and for types only, too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            if any(f"{node.module}.{alias.name}" not in known for alias in node.names):
                found.add(node.module)
    return found & known


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that are left when those that import nothing that is left are taken away, again and again."""
    left = dict(imports)
    while free := [m for m, names in left.items() if not names & (set(left) - {m})]:
        for module in free:
            del left[module]
    return sorted(left)


def test_no_import_goes_round_in_a_circle_not_even_inside_functions() -> None:
    trees = modules()
    assert not circle({module: imported(tree, set(trees)) for module, tree in trees.items()})


def test_data_have_classes_of_their_own() -> None:
    assert not any("SimpleNamespace" in p.read_text() for p in BOTH)


def test_only_setting_up_the_loops_and_the_pipeline_take_a_run() -> None:
    takers = {
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        for function in functions(ast.parse(path.read_text()))
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if argument.annotation is not None and re.search(r"\bRun\b", ast.unparse(argument.annotation))
    }
    a_loop = re.compile(r"\ndef (train\(run: Run|\w+\(run: Run\) -> StepBuilder)")
    loops = {f"training/{path.name}" for path in FILES if a_loop.search(path.read_text())}
    around = (
        "setup",
        "resume",
        "learners",
        "updates",
        "memory",
        "time_estimate",
        "pipeline",
        "finish",
        "example_sampling",
    )
    others = {f"training/{name}.py" for name in around}
    assert takers <= others | loops | {"trl/measure.py"}


EMPTY_NAMES = {
    *("found", "known", "said", "own", "place", "made", "now", "each", "of", "one", "this"),
    *("done", "asked", "wanted", "seen", "given", "so_far", "there", "here"),
}
"""Participles, pronouns and adverbs that have named anything at all: a match, a path, a reply, a table."""


def defined_name(node: ast.AST) -> str | None:
    """The name of a function, or of a field of a class or an object."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return node.attr if is_stored else None


def test_a_variable_is_named_by_the_thing_that_it_holds() -> None:
    empty = set()
    for path in BOTH:
        tree = ast.parse(path.read_text())
        # The variable of a comprehension is read within its line.
        inside = {
            id(name)
            for node in ast.walk(tree)
            if isinstance(node, ast.comprehension)
            for name in ast.walk(node.target)
        }
        for node in ast.walk(tree):
            # `Shape.of(model)` reads as a sentence, and `place` is a word for where a penalty counts.
            name = defined_name(node)
            if name in EMPTY_NAMES - {"of", "place"}:
                empty.add(f"{path.relative_to(path.parents[1])}:{node.lineno}: {name}")
        for function in functions(tree):
            # A keyword-only parameter may be a setting, whose name users write.
            settings = {id(argument) for argument in function.args.kwonlyargs}
            for node in ast.walk(function):
                if isinstance(node, ast.arg) and id(node) not in settings:
                    name = node.arg
                elif (
                    isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inside
                ):
                    name = node.id
                else:
                    continue
                if name in EMPTY_NAMES:
                    empty.add(f"{path.relative_to(path.parents[1])}:{node.lineno}: {name}")
    assert not empty


SHARED_PARTICIPLES = {
    *("setting", "embed", "seed"),  # nouns and a verb
    # In the audit, whose functions are still to be renamed.
    *("corrected", "lacking", "logged", "negated", "sampled", "scaled", "scored", "trained", "varied"),
}


def test_no_participle_alone_names_functions_of_two_modules() -> None:
    irregular = {
        "bound",
        "built",
        "drawn",
        "found",
        "given",
        "held",
        "kept",
        "known",
        "made",
        "said",
        "shown",
    }
    modules_of: dict[str, set[Path]] = {}
    for path in BOTH:
        for function in functions(ast.parse(path.read_text())):
            name = function.name.lstrip("_")
            is_property = any("property" in ast.unparse(d) for d in function.decorator_list)
            if not is_property and (re.fullmatch("[a-z]+(ed|ing)", name) or name in irregular):
                modules_of.setdefault(name, set()).add(path)
    assert {name for name, paths in modules_of.items() if len(paths) > 1} <= SHARED_PARTICIPLES


def test_no_file_of_tests_is_imported_for_its_helpers() -> None:
    tests = Path(__file__).parents[1]
    imports = re.compile(r"^ *from tests\S*\.test_\w+ import|^ *from tests\S* import test_", re.MULTILINE)
    assert not [path.name for path in tests.rglob("*.py") if imports.search(path.read_text())]


def test_scripts_of_the_docs_import_what_there_is() -> None:
    for path in (Path(__file__).parents[2] / "docs").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("covey"):
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, (path.name, missing)


def test_the_measures_of_the_house_see_what_they_should() -> None:
    one = ast.parse("from covey.b import f\nX = 1\nT = TypeVar('T')\n_y = 2\ndef g(): ...")
    two = ast.parse("class g: ...\ndef h():\n    import covey.a\nX: int = 2")
    known = {"covey.a", "covey.b", "covey.c"}
    assert imported(one, known) == {"covey.b"} and imported(two, known) == {"covey.a"}
    assert circle({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == ["a", "b", "c"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
