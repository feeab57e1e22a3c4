"""No model text is evaluated in a trusted process: neither package has a place where that could happen."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import covey
import covey_verify

PACKAGES = [Path(package.__file__).parent for package in (covey, covey_verify)]
EVALUATING = {"eval", "exec", "sympify", "parse_expr", "parse_latex", "literal_eval", "__import__", "compile"}
UNPICKLING = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
ALLOWED = {
    "covey_verify/sandbox/driver.py": {"exec", "compile", "__import__"},  # the confined child itself
    "covey/config/trl.py": {"literal_eval"},  # TRL's defaults, in a file of the package
    "covey_verify/isolated.py": {"compile"},  # in a child, and what it compiles is never run
}
IN_CHILDREN_ONLY = {"sympy", "mpmath", "math_verify", "reasoning_gym"}
CHILDREN = {
    "covey_verify/mathematics/points.py",
    "covey_verify/mathematics/symbolic.py",
    "covey_verify/isolated.py",
}


@cache
def sources() -> dict[str, ast.Module]:
    return {str(f.relative_to(p.parent)): ast.parse(f.read_text()) for p in PACKAGES for f in p.rglob("*.py")}


def test_nothing_is_evaluated_but_in_the_confined_child() -> None:
    found = {}
    for name, tree in sources().items():
        calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
        plain = {c.id for c in calls if isinstance(c, ast.Name)}
        # re.compile and torch's model.eval() are methods of something else
        methods = {c.attr for c in calls if isinstance(c, ast.Attribute)} - {"compile", "eval"}
        if evaluating := (plain | methods) & EVALUATING:
            found[name] = evaluating
    assert found == ALLOWED


OWN_PROCESSES = {"covey/system/processes.py"}
"""What the ranks of one run tell each other, which torch pickles: nobody else can speak there."""


def test_algebra_is_imported_by_children_only_and_nothing_is_unpickled() -> None:
    for name, tree in sources().items():
        modules = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        modules |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not modules & UNPICKLING or name in OWN_PROCESSES, name
        assert name in CHILDREN or not modules & IN_CHILDREN_ONLY, name
