"""How large the numbers are that a formula asks for, found without computing one of them.

A short formula can ask for more digits than a computer has: powers of powers, factorials of
factorials, binomials. This reader follows the formula with floating-point numbers only, and gives
up where an exponent, a factorial or a number of digits is beyond all real answers. What it does not
know (variables, most functions) is NaN, which is beyond nothing.
"""

from __future__ import annotations

import math
import re

MAX_EXPONENT, MAX_FACTORIAL, MAX_NUMBER = 10_000, 2_000, 100_000
"""The last one counts digits."""
SUSPECT = re.compile(r"[!^]|choose|binom|Gamma|Γ")
TERM = re.compile(r"\\[a-zA-Z]+|\d+(?:\.\d+)?|\.\d+|\S")
OPENING = {"{": "}", "(": ")", "[": "]", "\ue001": "\ue002", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
CONSTANTS = {"e": math.e, r"\pi": math.pi}
TIMES, OVER = {"*", r"\cdot", r"\times", r"\ast"}, {"/", r"\div"}
UNKNOWN_SIZE = math.nan


class _Beyond(Exception):
    """A number is larger than any real answer's."""


def monstrous(cleaned: str) -> bool:
    r"""Whether a clean text asks for a number that nobody should compute.

    >>> [monstrous(t) for t in (r"9^{9^{9}}", r"((9!)!)!", r"\binom{10^9}{5*10^8}", r"2^{2025}", "x^2")]
    [True, True, True, False, False]
    """
    if SUSPECT.search(cleaned) is None:
        return False
    digits = re.sub(r"\ue000|(?<=\d),(?=\d{3}(?!\d))", "", cleaned)
    reader = _Reader(TERM.findall(digits))
    try:
        while reader.left:
            reader.sum()
            reader.take()  # a bracket or separator too many
    except (_Beyond, RecursionError):
        return True
    return False


class _Reader:
    """Reads a formula's tokens from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self.left = tokens[::-1]

    def next(self) -> str:
        return self.left[-1] if self.left else ""

    def take(self) -> str:
        return self.left.pop() if self.left else ""

    def sum(self) -> float:
        """Up to a closing bracket or a separator."""
        total, product = 0.0, self.signed()
        while piece := self.next():
            if piece in "+-":
                total, product = total + product, self.signed()
            elif piece == r"\choose":
                self.take()
                return _binomial(total + product, self.sum())
            elif piece in OPENING.values() or piece in ",;&=<>":
                break
            else:
                product = self.multiplied(product)
        return total + product

    def signed(self) -> float:
        """The sign of a term."""
        sign = 1.0
        while self.next() and self.next() in "+-":
            sign = -sign if self.take() == "-" else sign
        return sign

    def multiplied(self, product: float) -> float:
        divide = self.next() in OVER
        if divide or self.next() in TIMES:
            self.take()
            if not self.next() or self.next() in OPENING.values():
                return UNKNOWN_SIZE
            factor = self.signed() * self.factor()
        else:
            factor = self.factor()
        return _divided(product, factor) if divide else product * factor

    def factor(self) -> float:
        """An atom with its factorials and powers."""
        found = self.atom()
        while (piece := self.next()) in ("!", "^", "_"):
            self.take()
            if piece == "!":
                found = _factorial(found)
            elif piece == "_":
                self.signed()
                self.atom()
                found = UNKNOWN_SIZE
            else:
                found = _power(found, self.signed() * self.factor())
        return found

    def atom(self) -> float:
        """A number, a group in brackets, or a command with its arguments."""
        piece = self.take()
        if piece in OPENING:
            found = self.sum()
            while self.next() and self.next() in ",;&=<>":  # several values are no number
                self.take()
                self.sum()
                found = UNKNOWN_SIZE
            self.take()
            return found
        if piece == r"\frac":
            return _divided(self.atom(), self.atom())
        if piece == r"\binom":
            return _binomial(self.atom(), self.atom())
        if piece == r"\sqrt":
            degree = self.atom() if self.next() == "[" else 2.0
            return _power(self.atom(), _divided(1.0, degree))
        if piece in (r"\Gamma", "Γ"):
            return _factorial(self.atom() - 1)
        if piece[:1].isdigit() or (piece[:1] == "." and len(piece) > 1):
            return float(piece)
        return CONSTANTS.get(piece, UNKNOWN_SIZE)


def _divided(a: float, b: float) -> float:
    return a / b if b else UNKNOWN_SIZE


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > MAX_EXPONENT:
        raise _Beyond
    size = abs(base)
    if not size or math.isnan(size) or math.isnan(exponent):
        return UNKNOWN_SIZE if size else 0.0
    if math.isfinite(size) and abs(exponent) * abs(math.log10(size)) > MAX_NUMBER:
        raise _Beyond
    if math.isinf(size) and abs(exponent) > 1:  # more than 300 digits, and again to a power
        raise _Beyond
    try:
        found = size**exponent
    except OverflowError:
        found = math.inf
    return -found if base < 0 and exponent % 2 == 1 else found


def _factorial(n: float) -> float:
    if n >= MAX_FACTORIAL:
        raise _Beyond
    try:
        return math.gamma(n + 1)
    except OverflowError:
        return math.inf
    except ValueError:
        return UNKNOWN_SIZE


def _binomial(n: float, k: float) -> float:
    fewer = min(k, n - k)
    if fewer > MAX_EXPONENT or (math.isinf(n) and not math.isnan(k)):
        raise _Beyond
    if math.isnan(fewer) or fewer < 0:
        return UNKNOWN_SIZE
    digits = (math.lgamma(n + 1) - math.lgamma(fewer + 1) - math.lgamma(n - fewer + 1)) / math.log(10)
    return 10**digits if digits < 300 else math.inf
