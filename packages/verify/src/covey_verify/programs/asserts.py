"""Tests as a list of asserts, the format of MBPP and similar data sets."""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Sequence


def asserts_of(tests: object) -> list[str]:
    """Return the asserts of a column, or [] if it holds something else, such as {input, output}.

    Raises ValueError for a list of texts if a text has no assert or is not Python.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            return []
    if not isinstance(tests, Sequence) or not any(isinstance(test, str) for test in tests):
        return []
    for number, test in enumerate(tests, start=1):
        try:
            parsed = ast.parse(test).body if isinstance(test, str) else []
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"test {number} is not Python: {error}") from None
        if not any(isinstance(line, ast.Assert) for line in parsed):
            raise ValueError(f"test {number} has no assert: {str(test)[:80]!r}")
    return [str(test) for test in tests]


def function_of(asserts: Sequence[str], setup: str = "") -> str:
    """Return the function that every assert calls and neither Python nor the setup defines.

    Raises ValueError if there is none or more than one.

    >>> function_of(["assert set(f([1])) == {1}", "assert f([]) == g(0)"])
    'f'
    """
    defined = {*vars(builtins), *_bound_names(setup)}
    # One set of called names per assert: helpers such as `g` are rarely in all of them.
    called = [_called_names(ast.parse(test)) - defined for test in asserts]
    common = sorted(set.intersection(*called))
    if len(common) != 1:
        names = ", ".join(common) or "no function"
        raise ValueError(f"its asserts all call {names}; name the tested function in column 'entry_point'")
    return common[0]


def _called_names(tree: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _bound_names(setup: str) -> set[str]:
    """Return the names that code imports or defines."""
    names = set[str]()
    for node in ast.walk(ast.parse(setup)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(name.asname or name.name).partition(".")[0] for name in node.names}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names
