"""Tools that covey brings: a calculator, and Python in the sandbox."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

MAX_POWER = 300
"""Power of ten that bounds every number in a calculation: without it a power could hang a run."""
MAX_EXPRESSION = 1_000
"""Most characters of an expression: a shorter one cannot nest deep enough to crash the parser."""
OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, parentheses and + - * / // % **, as in (12 + 7) * 3.
    """
    text = str(expression).strip()
    try:
        if len(text) > MAX_EXPRESSION:
            raise OverflowError("the expression is too long")
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text[:80]!r}: {error}") from None
    # Up to 1e15 a float holds integers exactly, so "6 / 2" may print as 3.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> float:
    # ``type`` rather than isinstance: True is not a number here.
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _check_magnitude(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = _value(node.left)
        right = _value(node.right)
        # Refused before it is computed: an integer's power may take minutes and gigabytes.
        if isinstance(node.op, ast.Pow) and left and abs(right) * math.log10(abs(left)) > MAX_POWER:
            raise OverflowError("the result is too large")
        return _check_magnitude(OPERATORS[type(node.op)](left, right))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is not arithmetic")


def _check_magnitude(value: object) -> float:
    if not isinstance(value, int | float) or abs(value) > 10.0**MAX_POWER:
        raise OverflowError("the result is not a real number, or too large")
    return value


PYTHON_PROGRAM = """\
import sys
sys.stderr = sys.stdout
try:
    exec(compile({code!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except SystemExit:
    pass
except BaseException as error:
    place = error.__traceback__.tb_next
    while place and place.tb_next and place.tb_next.tb_frame.f_code.co_filename == "program.py":
        place = place.tb_next
    line = getattr(error, "lineno", None) or (place.tb_lineno if place else "?")
    print(f"error: {{type(error).__name__}}: {{error}} (line {{line}})")
"""
"""The program around a model's program for `python`: an exception is printed for the model to read.

The line number belongs to the innermost frame in the model's own program.
"""


def python(code: str) -> str:
    """Run a Python program in a fresh interpreter and return what it prints.

    Args:
        code: The program. It has to print what it finds.
    """
    raise AssertionError(f"in the sandbox, not here: {code[:40]}")


BUILT_IN_TOOLS: Mapping[str, Callable[..., str]] = {"calculate": calculate, "python": python}
