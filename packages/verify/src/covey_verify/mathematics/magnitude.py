"""The magnitude of the numbers in a formula, estimated in floating point without computing any of them.

A short formula can ask for more digits than a computer can store: powers of powers, factorials of
factorials, binomials. ``approximate`` follows the tree in floats only, and stops at an exponent, a factorial
or a number of digits larger than in any real answer. Anything unknown (variables, most functions) is NaN,
which exceeds no limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from covey_verify.mathematics.tree import Node, TooLarge

MAX_EXPONENT = 10_000
MAX_FACTORIAL = 2_000
"""The argument of the first factorial that is too large."""
MAX_NUMBER = 30_000
"""Most digits of a number."""
MAX_TERMS = 10_000
"""Most terms of a sum."""
CONSTANTS = {"e": math.e, "π": math.pi, "∞": math.inf}
FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "arcsin": math.asin, "arccos": math.acos,
    "arctan": math.atan, "ln": math.log, "abs": abs, "floor": math.floor, "ceil": math.ceil,
    "sinh": math.sinh, "cosh": math.cosh, "tanh": math.tanh,
}  # fmt: skip


def approximate(node: Node) -> float:
    """Return a number's value in floating point, NaN if it has none. Raises TooLarge."""
    parts = [approximate(part) for part in node.parts]
    if node.kind == "number" and node.value is not None:
        return _float(node.value)
    if node.kind == "name":
        return CONSTANTS.get(node.text, math.nan)
    if node.kind == "sum":
        return sum(parts)
    if node.kind == "product":
        return math.prod(parts)
    if node.kind == "inverse":
        return 1 / parts[0] if parts[0] else math.nan
    if node.kind == "power":
        return _power(*parts)
    if node.kind == "big" and len(parts) == 4 and MAX_TERMS < parts[2] - parts[1] < math.inf:
        raise TooLarge(f"more than {MAX_TERMS} terms")
    return _apply_function(node.text, parts) if node.kind == "call" else math.nan


def _apply_function(function: str, parts: list[float]) -> float:
    if function in ("factorial", "double factorial"):
        return _factorial(parts[0]) if function == "factorial" else math.nan
    if function == "binomial":
        return _binomial(*parts)
    if function == "root":
        return _power(parts[0], 1 / parts[1]) if parts[1] else math.nan
    try:
        if function == "log":
            return math.log(parts[0]) / math.log(parts[1])
        return float(FUNCTIONS[function](parts[0])) if function in FUNCTIONS else math.nan
    except (ValueError, OverflowError, ZeroDivisionError):
        return math.nan


def _float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf


def _power(base: float, exponent: float) -> float:
    size = abs(base)
    if math.isfinite(exponent) and abs(exponent) > MAX_EXPONENT:
        raise TooLarge(f"an exponent above {MAX_EXPONENT}")
    if not size or math.isnan(size) or math.isnan(exponent) or math.isinf(exponent):
        return 0.0 if not size and exponent > 0 else math.nan
    # Number of digits of the power; a base that is infinite here has more than 300.
    digits = abs(exponent) * (abs(math.log10(size)) if math.isfinite(size) else 300)
    if digits > MAX_NUMBER or (math.isinf(size) and abs(exponent) > 1):
        raise TooLarge(f"a number of more than {MAX_NUMBER} digits")
    if base < 0 and not exponent.is_integer():
        return math.nan
    try:
        return float(base**exponent)
    except OverflowError:
        return math.inf


def _factorial(n: float) -> float:
    if n >= MAX_FACTORIAL:
        raise TooLarge(f"a factorial of {MAX_FACTORIAL} or more")
    try:
        return math.gamma(n + 1)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


def _binomial(n: float, k: float) -> float:
    fewer = min(k, n - k)
    if fewer > MAX_EXPONENT or (math.isinf(n) and not math.isnan(k)):
        raise TooLarge("a large binomial")
    if math.isnan(fewer) or fewer < 0:
        return math.nan
    # log10 of n! / (k! (n - k)!).
    digits = (math.lgamma(n + 1) - math.lgamma(fewer + 1) - math.lgamma(n - fewer + 1)) / math.log(10)
    return 10**digits if digits < 300 else math.inf
