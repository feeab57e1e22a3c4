"""The magnitude of the numbers in a formula, estimated without computing any of them.

A short formula can ask for more digits than a computer can store: powers of powers, factorials of factorials,
binomials. This reader follows the formula in floating point only, and stops at an exponent, a factorial or a
number of digits larger than in any real answer. Anything unknown (variables, most functions) is NaN, which
exceeds no limit.
"""

from __future__ import annotations

import math
import re

MAX_EXPONENT, MAX_FACTORIAL, MAX_NUMBER = 10_000, 2_000, 100_000
"""Limits of an exponent, of the argument of a factorial, and of the digits of a number."""
# Without one of these a formula has no number much larger than those written in it.
SUSPECT = re.compile(r"[!^]|choose|binom|Gamma|Γ")
TERM = re.compile(r"\\[a-zA-Z]+|\d+(?:\.\d+)?|\.\d+|\S")
# Opening tokens and their closing ones; \ue001 and \ue002 are OPEN and CLOSE of ``notation``.
OPENING = {"{": "}", "(": ")", "[": "]", "\ue001": "\ue002", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
CONSTANTS = {"e": math.e, r"\pi": math.pi}
TIMES, OVER = {"*", r"\cdot", r"\times", r"\ast"}, {"/", r"\div"}
UNKNOWN_SIZE = math.nan


class _Beyond(Exception):
    """A number is larger than in any real answer."""


def monstrous(cleaned: str) -> bool:
    r"""Return whether a clean text contains a number that is too large to compute.

    >>> [monstrous(t) for t in (r"9^{9^{9}}", r"((9!)!)!", r"\binom{10^9}{5*10^8}", r"2^{2025}", "x^2")]
    [True, True, True, False, False]
    """
    if SUSPECT.search(cleaned) is None:
        return False
    # Without separators of thousands.
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
    """A recursive-descent reader of a formula's tokens; each method returns the value of its part, or NaN."""

    def __init__(self, tokens: list[str]) -> None:
        # Reversed, so that `pop` takes the next token in constant time.
        self.left = tokens[::-1]

    def next(self) -> str:
        return self.left[-1] if self.left else ""

    def take(self) -> str:
        return self.left.pop() if self.left else ""

    def sum(self) -> float:
        """Read a sum up to a closing bracket or a separator."""
        total, product = 0.0, self.signed()
        while piece := self.next():
            if piece in "+-":
                total, product = total + product, self.signed()
            # `n \choose k` divides its whole group in two.
            elif piece == r"\choose":
                self.take()
                return _binomial(total + product, self.sum())
            elif piece in OPENING.values() or piece in ",;&=<>":
                break
            else:
                product = self.multiplied(product)
        return total + product

    def signed(self) -> float:
        """Take the signs before a term and return their product."""
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
        """Read an atom with its factorials, powers and indices."""
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
                # factor() calls itself here, so that powers associate to the right.
                found = _power(found, self.signed() * self.factor())
        return found

    def atom(self) -> float:
        """Read a number, a group in brackets, or a command with its arguments."""
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
            # Gamma(n) = (n - 1)!
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
    # Number of digits of the power.
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
    # log10 of n! / (k! (n - k)!).
    digits = (math.lgamma(n + 1) - math.lgamma(fewer + 1) - math.lgamma(n - fewer + 1)) / math.log(10)
    return 10**digits if digits < 300 else math.inf
