"""Exact arithmetic: numbers with square roots, and rational functions of names, as fractions of polynomials.

A polynomial is {monomial: coefficient}, a monomial a sorted tuple of (atom, power). Atoms are names, square
roots of primes, i (whose squares are replaced by their values) and anything else that is not rational
(`sin(x)`), as a text. Two fractions with equal cross products are equal; if they differ, that is certain only
where no relation between the atoms can be missed.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

from covey_verify.mathematics.tree import Node

Monomial: TypeAlias = tuple[tuple[str, int], ...]
Polynomial: TypeAlias = dict[Monomial, Fraction]
Quotient: TypeAlias = tuple[Polynomial, Polynomial]
ONE: Polynomial = {(): Fraction(1)}
MAX_WORK = 5_000
"""Most products of terms (of 64 bits) in a comparison."""
MAX_POWER = 64
"""Largest exponent of a power that is multiplied out."""
MAX_RADICAND = 10**8
"""Largest radicand that is factored."""
ROOT = "√"


class Inexact(ValueError):
    """Raised if an expression is not rational, is too large to be expanded, or divides by zero."""


def constant(node: Node) -> Fraction | None:
    r"""Return the value of a rational number, None for anything else.

    >>> from covey_verify.mathematics.reader import read_answer
    >>> constant(read_answer(r"\frac{2^3}{6}")), constant(read_answer(r"\pi"))
    (Fraction(4, 3), None)
    """
    if node.kind == "number":
        return node.value
    try:
        return _constant(*Expansion().fraction(node))
    except Inexact:
        return None


def same(ours: Node, theirs: Node) -> bool | None:
    """Return whether two expressions are equal; None if exact arithmetic cannot tell."""
    try:
        left, right = Expansion().cross_products(ours, theirs)
    except Inexact:
        return None
    difference = _plus(left, right, -1)
    if not difference:
        return True
    return False if _independent(difference) else None


def proportional(ours: Node, theirs: Node) -> Fraction | None:
    """Return the number by which the second has to be multiplied to give the first; 0 if there is none.

    None if exact arithmetic cannot tell.
    """
    try:
        left, right = Expansion().cross_products(ours, theirs)
    except Inexact:
        return None
    if not left or not right:
        return Fraction(not left and not right)
    first = min(left)
    factor = left[first] / right[first] if first in right else Fraction(0)
    if not _plus(left, right, -factor):
        return factor
    return Fraction(0) if _independent(left) and _independent(right) else None


def linear(node: Node, variable: str) -> tuple[Fraction, Fraction] | None:
    """Return (slope, constant) of a linear expression in one variable, None for anything else."""
    try:
        above, below = Expansion().fraction(node)
    except Inexact:
        return None
    first: Monomial = ((variable, 1),)
    if set(below) != {()} or not set(above) <= {(), first}:
        return None
    return above.get(first, Fraction(0)) / below[()], above.get((), Fraction(0)) / below[()]


def _independent(polynomial: Polynomial) -> bool:
    """Return whether a polynomial is zero only if it has no terms, because its atoms have no relation."""
    atoms = {atom for monomial in polynomial for atom, _ in monomial}
    return len(atoms & {"π", "e"}) < 2 and not any("(" in atom for atom in atoms)


def _constant(above: Polynomial, below: Polynomial) -> Fraction | None:
    if set(above) <= {()} and set(below) == {()}:
        return above.get((), Fraction(0)) / below[()]
    return None


class Expansion:
    """The expansion of expressions into fractions of polynomials, of a limited size. Raises Inexact."""

    def __init__(self) -> None:
        self.work = 0

    def cross_products(self, ours: Node, theirs: Node) -> Quotient:
        """Return the cross products of two fractions, which are equal if the fractions are."""
        (a, b), (c, d) = self.fraction(ours), self.fraction(theirs)
        return self.times(a, d), self.times(c, b)

    def fraction(self, node: Node) -> Quotient:
        """Return an expression as numerator and denominator."""
        if node.kind == "number" and node.value is not None:
            return ({(): node.value} if node.value else {}), ONE
        if node.kind == "name" and node.text != "∞":
            return {((node.text, 1),): Fraction(1)}, ONE
        if node.kind == "sum":
            return self._sum(node)
        if node.kind == "product":
            above, below = ONE, ONE
            for part in node.parts:
                a, b = self.fraction(part)
                above, below = self.times(above, a), self.times(below, b)
            return above, below
        if node.kind == "inverse":
            return self._integer_power(*self.fraction(node.parts[0]), -1)
        if node.kind == "power":
            return self._power(*node.parts)
        if node.kind in ("call", "apply", "big"):
            value = self._apply_function(node) if node.kind == "call" else None
            return (self._atom(node) if value is None else value), ONE
        raise Inexact

    def _sum(self, node: Node) -> Quotient:
        above: Polynomial = {}
        below = ONE
        for part in node.parts:
            a, b = self.fraction(part)
            if b == below:
                above = _plus(above, a)
            else:
                above, below = _plus(self.times(above, b), self.times(a, below)), self.times(below, b)
        return above, below

    def _power(self, base: Node, exponent: Node) -> Quotient:
        power = _constant(*self.fraction(exponent))
        above, below = self.fraction(base)
        rational_base = _constant(above, below)
        if power is None or power.denominator > 2 or (power.denominator == 2 and rational_base is None):
            return self._atom(Node("call", (base, exponent), "power")), ONE
        if power.denominator == 2:
            return self._integer_power(_root(rational_base or Fraction(0)), ONE, power.numerator)
        if rational_base:
            return {(): rational_base ** int(power)}, ONE
        return self._integer_power(above, below, int(power))

    def _integer_power(self, above: Polynomial, below: Polynomial, power: int) -> Quotient:
        if abs(power) > MAX_POWER or (not above and power <= 0):
            raise Inexact
        if power < 0:
            above, below = below, above
        raised = ONE, ONE
        for _ in range(abs(power)):
            raised = self.times(raised[0], above), self.times(raised[1], below)
        return raised

    def _apply_function(self, node: Node) -> Polynomial | None:
        """Return the value of a function of rational numbers, if exact arithmetic can compute it."""
        values = [_constant(*self.fraction(part)) for part in node.parts]
        if None in values:
            return None
        numbers = [v for v in values if v is not None]
        if node.text == "root" and numbers[1] == 2:
            return _root(numbers[0])
        value = _compute_exactly(node.text, numbers)
        return None if value is None else {(): value} if value else {}

    def _atom(self, node: Node) -> Polynomial:
        return {((f"{node.text}({','.join(map(self._key, node.parts))})", 1),): Fraction(1)}

    def _key(self, node: Node) -> str:
        """Return a text that is the same for expressions which are equal as polynomials."""
        try:
            above, below = self.fraction(node)
        except Inexact:
            return repr(node)
        if set(below) == {()}:
            above, below = {m: c / below[()] for m, c in above.items()}, ONE
        # Hexadecimal, as Python refuses to write long numbers in decimals.
        terms = [
            sorted((m, f"{c.numerator:x}/{c.denominator:x}") for m, c in polynomial.items())
            for polynomial in (above, below)
        ]
        return "/".join(map(str, terms))

    def times(self, a: Polynomial, b: Polynomial) -> Polynomial:
        """Return a product."""
        if a is ONE or b is ONE:
            return a if b is ONE else b
        product: Polynomial = {}
        for first, x in a.items():
            for second, y in b.items():
                self.work += 1 + (x.numerator.bit_length() + y.denominator.bit_length()) // 64
                if self.work > MAX_WORK:
                    raise Inexact
                monomial, factor = _multiply_monomials(first, second)
                product[monomial] = product.get(monomial, Fraction(0)) + x * y * factor
        return {monomial: c for monomial, c in product.items() if c}


def _compute_exactly(function: str, numbers: list[Fraction]) -> Fraction | None:
    """Return the value of a function of rational numbers, if it is certain to be rational."""
    if function in ("max", "min"):
        return max(numbers) if function == "max" else min(numbers)
    if function == "abs":
        return abs(numbers[0])
    if function in ("floor", "ceil"):
        return Fraction(math.floor(numbers[0]) if function == "floor" else math.ceil(numbers[0]))
    if any(n.denominator != 1 for n in numbers):
        return None
    first, *rest = map(int, numbers)
    second = rest[0] if rest else 0
    if function == "factorial" and first >= 0:
        return Fraction(math.factorial(first))
    if function == "binomial" and first >= 0 and second >= 0:
        return Fraction(math.comb(first, second))
    if function == "mod" and second > 0:
        return Fraction(first % second)
    if function in ("gcd", "lcm"):
        return Fraction((math.gcd if function == "gcd" else math.lcm)(first, *rest))
    if function == "root" and 2 < second < MAX_POWER and 0 < first < 10**40:
        near = round(first ** (1 / second))
        return Fraction(near) if near**second == first else None
    if function == "log" and second > 1 and 0 < first < 10**40:
        near = round(math.log(first) / math.log(second))
        return Fraction(near) if second**near == first else None
    return None


@lru_cache(1024)
def _root(value: Fraction) -> Polynomial:
    """Return the square root of a rational number as a product of square roots of primes and i."""
    if not value:
        return {}
    rest = abs(value.numerator * value.denominator)
    outside = 1
    primes = []
    divisor = 2
    if rest > MAX_RADICAND:
        outside = math.isqrt(rest)
        rest = 1
        if outside**2 != abs(value.numerator * value.denominator):
            raise Inexact
    while divisor * divisor <= rest:
        while rest % divisor**2 == 0:
            outside *= divisor
            rest //= divisor**2
        if rest % divisor == 0:
            primes.append(divisor)
            rest //= divisor
        divisor += 1
    primes += [rest] if rest > 1 else []
    atoms = [(f"{ROOT}{p}", 1) for p in primes] + ([("i", 1)] if value < 0 else [])
    return {tuple(sorted(atoms)): Fraction(outside, value.denominator)}


def _plus(a: Polynomial, b: Polynomial, factor: Fraction | int = 1) -> Polynomial:
    total = dict(a)
    for monomial, coefficient in b.items():
        total[monomial] = total.get(monomial, Fraction(0)) + factor * coefficient
    return {monomial: c for monomial, c in total.items() if c}


def _multiply_monomials(first: Monomial, second: Monomial) -> tuple[Monomial, int]:
    """Return the product of two monomials, and the number that squares of roots and of i give."""
    if not first or not second:
        return first or second, 1
    powers = dict(first)
    for atom, power in second:
        powers[atom] = powers.get(atom, 0) + power
    factor = 1
    for atom in [a for a, n in powers.items() if n > 1 and (a == "i" or a[0] == ROOT)]:
        square = -1 if atom == "i" else int(atom[1:])
        factor *= square ** (powers[atom] // 2)
        powers[atom] %= 2
    return tuple(sorted((a, n) for a, n in powers.items() if n)), factor
