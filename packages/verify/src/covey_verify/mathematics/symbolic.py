"""Algebra in a killable subprocess: formulas that exact arithmetic cannot compare, evaluated to many digits.

Two formulas are equal if they agree, to more digits than any of their numbers has, at points that follow
from a hash of both, so that no answer can be made to agree there only. The points are real. Where one formula
is real and the other is not, they differ, unless the row declares the reading `real`. mpmath computes values,
SymPy integrals, limits and infinite sums. Both get objects from our own reader, never a text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from typing import Any

import mpmath

from covey_verify.mathematics.compare import Comparison, Percent, Ratio, Reading
from covey_verify.mathematics.exact import exact, rounding
from covey_verify.mathematics.magnitude import MAX_TERMS, approximate
from covey_verify.mathematics.points import INTEGRAL, TooManyEdges, Value, points
from covey_verify.mathematics.rational import constant
from covey_verify.mathematics.reader import read_answer
from covey_verify.mathematics.tree import CONSTANTS, Node, TooLarge, Unreadable, name
from covey_verify.mathematics.vocabulary import CIRCULAR, HYPERBOLIC

POINTS_TO_DECIDE = 48
"""Points at which two formulas have to agree."""
MIN_POINTS = 3
"""Points that suffice if both formulas have a value at no more of them."""
MAX_DIGITS = 30_000
FUNCTIONS = {
    **{f: getattr(mpmath, f) for f in (*CIRCULAR, *HYPERBOLIC)},
    **{f"arc{f}": getattr(mpmath, f"a{f}") for f in CIRCULAR},
    **{f"ar{f}": getattr(mpmath, f"a{f}") for f in HYPERBOLIC},
    "ln": mpmath.ln, "abs": abs, "floor": mpmath.floor, "ceil": mpmath.ceil, "factorial": mpmath.factorial,
    "double factorial": mpmath.fac2, "binomial": mpmath.binomial,
}  # fmt: skip


class NoValue(Enum):
    """The reason why a formula has no value at a point."""

    NOT_REAL = auto()
    UNDEFINED = auto()


class NotReal(ValueError):
    """Raised if an expression of real numbers has no real value at a point."""


class Undefined(ValueError):
    """Raised if an expression has no value at a point, or none that can be computed."""


def equal(
    reference: str,
    answer: str,
    percent: Percent = "ignored",
    ratio: Ratio = "exact",
    reading: Reading = "complex",
) -> tuple[bool, str]:
    """Return whether an answer equals the reference answer, and why not."""
    algebra = Algebra(reading)
    comparison = Comparison(algebra.leaf, percent, ratio)
    try:
        verdict = comparison.compare(read_answer(reference), read_answer(answer))
    except (Unreadable, TooLarge) as error:
        return False, str(error)
    return bool(verdict), "" if verdict else algebra.reason or comparison.reason


def second_opinion(reference: str, answer: str) -> bool:
    """Return math-verify's verdict, without its time limits: they use signals, and this is a child."""
    from math_verify import parse, verify

    references, answers = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (reference, answer))
    return bool(verify(references, answers, timeout_seconds=None))


class Algebra:
    """The comparison of two formulas; ``reason`` says why they are not equal."""

    def __init__(self, reading: Reading = "complex") -> None:
        self.real = reading == "real"
        self.reason = ""

    def no(self, reason: str) -> bool:
        """Return False, and keep the reason."""
        self.reason = reason
        return False

    def leaf(self, ours: Node, theirs: Node, multiple: bool) -> bool:
        """Return whether two formulas are equal, or one formula is a ``multiple`` of the other."""
        verdict = exact(ours, theirs, multiple)
        if verdict is not None:
            return verdict
        if ours.kind == theirs.kind == "big" and ours.text == theirs.text == "int" and len(ours.parts) == 3:
            same = ours.parts[:2] == theirs.parts[:2]
            return same and self.leaf(ours.parts[2], theirs.parts[2], False)
        both = Node("sum", (ours, theirs))
        free = sorted({n.text for n in both.walk() if n.kind == "name"} - CONSTANTS)
        names = [n for n in free if "#" not in n]
        # Without variables, or if i is written, values may be complex.
        allows_complex = not names or any(n == name("i") for n in both.walk())
        digits = 100 + 2 * _digits(both)
        if digits > MAX_DIGITS:
            return self.no("too many digits to compare")
        allowed = rounding(ours.text, theirs.text) if {ours.kind, theirs.kind} & {"number"} else None
        with mpmath.workdps(digits):
            try:
                return self._at_points(ours, theirs, names, allows_complex, multiple, allowed)
            except TooManyEdges:
                return self.no("too many places at which they may change")

    def _at_points(
        self,
        ours: Node,
        theirs: Node,
        names: Sequence[str],
        allows_complex: bool,
        multiple: bool,
        allowed: Fraction | None,
    ) -> bool:
        tried = 0
        factor: Value | None = None
        for at in points(ours, theirs, names):
            where = ", ".join(f"{n} = {mpmath.nstr(v, 6)}" for n, v in at.items())
            our_value, their_value = (self._value(side, at, allows_complex) for side in (ours, theirs))
            if our_value is NoValue.UNDEFINED or their_value is NoValue.UNDEFINED:
                continue
            if isinstance(our_value, NoValue) or isinstance(their_value, NoValue):
                if our_value is their_value or self.real:
                    continue
                return self.no(f"only one of the formulas is real at {where}")
            if multiple:
                if not our_value or not their_value:
                    if bool(our_value) != bool(their_value):
                        return self.no("another relation")
                    continue
                factor = our_value / their_value if factor is None else factor
                their_value = their_value * factor
            near = _near(our_value, their_value, allowed)
            if not near and factor is None:
                near = self._near_in_the_end((ours, theirs), (our_value, their_value), at, allows_complex)
            if not near:
                return self.no(f"they differ at {where}" if names else "the values differ")
            tried += 1
            if tried == POINTS_TO_DECIDE or not names:
                return True
        return tried >= MIN_POINTS or self.no("there are too few points at which both have a value")

    def _near_in_the_end(
        self, sides: tuple[Node, Node], values: Sequence[Value], at: Mapping[str, Value], allows_complex: bool
    ) -> bool:
        """Return whether only rounding made the difference: large terms that cancel need more digits."""
        for factor in (2, 10):
            with mpmath.workdps(min(factor * mpmath.mp.dps, MAX_DIGITS)):
                ours, theirs = (self._value(side, at, allows_complex) for side in sides)
                if isinstance(ours, NoValue) or isinstance(theirs, NoValue):
                    return False
                if _near(ours, theirs, None):
                    return True
                pairs = zip(values, (ours, theirs), strict=True)
                if all(abs(rough - precise) <= abs(precise) * 1e-20 for rough, precise in pairs):
                    return False  # both had enough digits
        return False

    def _value(self, node: Node, at: Mapping[str, Value], allows_complex: bool) -> Value | NoValue:
        """Return a formula's value at a point, or the reason why there is none."""
        try:
            value = Evaluation(at, allows_complex, self.real).value(node)
        except NotReal:
            return NoValue.NOT_REAL
        except (Undefined, ZeroDivisionError, ValueError, TypeError, OverflowError):
            return NoValue.UNDEFINED
        return value if mpmath.isfinite(value) else NoValue.UNDEFINED


def _near(a: Value, b: Value, allowed: Fraction | None) -> bool:
    """Return whether two values are equal to three fifths of the digits, or as a decimal allows."""
    difference = abs(a - b)
    if allowed is not None and difference <= mpmath.mpf(allowed.numerator) / allowed.denominator:
        return True
    size = max(abs(a), abs(b), mpmath.mpf(1))
    return bool(difference <= size * mpmath.mpf(10) ** (-3 * mpmath.mp.dps // 5))


def _digits(node: Node) -> int:
    """Return an estimate of the digits, before or after the point, of the numbers in a formula."""
    total = 0.0
    for part in node.walk():
        if part.kind == "number" and part.value is not None:
            total += (part.value.numerator.bit_length() + part.value.denominator.bit_length()) / 3
        elif part.kind == "power":
            base, exponent = map(approximate, part.parts)
            size = math.log10(abs(base)) if base and math.isfinite(base) else 1.0
            total += abs(exponent * size) if math.isfinite(exponent) else 0.0
        elif part.kind == "call" and part.text == "factorial":
            n = approximate(part.parts[0])
            total += math.lgamma(n + 1) if 1 < n < MAX_TERMS else 0.0
    return int(min(total, MAX_DIGITS))


class Evaluation:
    """The values of formulas at one point, to the digits that mpmath is set to."""

    def __init__(self, at: Mapping[str, Value], allows_complex: bool, real: bool) -> None:
        self.at = dict(at)
        self.allows_complex = allows_complex
        self.real = real

    def value(self, node: Node) -> Value:
        """Return a node's value. Raises NotReal, Undefined and what mpmath raises."""
        value = self._value(node)
        if isinstance(value, mpmath.mpc):
            if value.imag == 0:
                return value.real
            if not self.allows_complex:
                raise NotReal
        return value

    def _value(self, node: Node) -> Value:
        if node.kind == "number" and node.value is not None:
            return mpmath.mpf(node.value.numerator) / node.value.denominator
        if node.kind == "name":
            constants = {"π": mpmath.mp.pi, "e": mpmath.mp.e, "i": mpmath.mpc(0, 1), "∞": mpmath.inf}
            if node.text.endswith("_#"):  # a term of a sequence, such as a_k in a sum over k
                return self._unknown_function(node.text, [self.at["#"]])
            return +constants[node.text] if node.text in constants else self.at[node.text]
        if node.kind == "big":
            return self._big(node)
        parts = [self.value(part) for part in node.parts]
        if node.kind == "sum":
            return sum(parts, mpmath.mpf(0))
        if node.kind == "product":
            return mpmath.fprod(parts)
        if node.kind == "inverse":
            return 1 / parts[0]
        if node.kind == "power":
            return self._power(node, *parts)
        if node.kind == "call":
            return self._call(node.text, parts)
        if node.kind == "apply":
            return self._unknown_function(node.text, parts)
        raise Undefined

    def _unknown_function(self, title: str, parts: Sequence[Value]) -> Value:
        """Return some value for an unknown function, the same for the same arguments."""
        key = title + ",".join(mpmath.nstr(part, 30) for part in parts)
        return mpmath.mpf(int.from_bytes(sha256(key.encode()).digest()[:12])) / 2**95

    def _power(self, node: Node, base: Value, exponent: Value) -> Value:
        if self.real and not isinstance(base, mpmath.mpc) and base < 0:
            share = constant(node.parts[1])
            if share is not None and share.denominator % 2:
                return (-1 if share.numerator % 2 else 1) * mpmath.power(-base, exponent)
        return mpmath.power(base, exponent)

    def _call(self, function: str, parts: list[Value]) -> Value:
        first = parts[0]
        if function == "root":
            whole = mpmath.isint(parts[1]) and int(parts[1]) % 2
            if self.real and whole and not isinstance(first, mpmath.mpc) and first < 0:
                return -mpmath.power(-first, 1 / parts[1])
            return mpmath.power(first, 1 / parts[1])
        if function == "log":
            return mpmath.ln(first) / mpmath.ln(parts[1])
        if function in ("max", "min"):
            return max(parts) if function == "max" else min(parts)
        if function in INTEGRAL:
            if not all(map(mpmath.isint, parts)):
                raise Undefined
            integers = [int(part) for part in parts]
            if function == "mod":
                return mpmath.mpf(integers[0] % integers[1])
            return mpmath.mpf((math.gcd if function == "gcd" else math.lcm)(*integers))
        if function not in FUNCTIONS:
            raise Undefined
        return FUNCTIONS[function](*parts)

    def _big(self, node: Node) -> Value:
        variable = node.parts[0].text
        if node.text in ("sum", "prod") and node.parts[2] != name("∞"):
            low, high = (self.value(part) for part in node.parts[1:3])
            if not (mpmath.isint(low) and mpmath.isint(high)) or high - low > MAX_TERMS:
                raise Undefined
            terms = []
            for k in range(int(low), int(high) + 1):
                self.at[variable] = mpmath.mpf(k)
                terms.append(self.value(node.parts[3]))
            return mpmath.fsum(terms) if node.text == "sum" else mpmath.fprod(terms)
        if len(node.parts) == 3 and node.text == "int":
            raise Undefined  # an antiderivative is known up to a constant only
        import sympy

        value = closed_form(node)
        at = {s: sympy.Float(self.at[s.name], mpmath.mp.dps) for s in value.free_symbols if s.name in self.at}
        number = sympy.N(value.subs(at), mpmath.mp.dps)
        if not number.is_number or not number.is_finite:
            raise Undefined
        real, imaginary = number.as_real_imag()
        return mpmath.mpc(*(part._to_mpmath(mpmath.mp.prec) for part in (real, imaginary)))  # noqa: SLF001


@lru_cache(64)
def closed_form(node: Node) -> Any:
    """Return an integral, a limit or an infinite sum as SymPy computes it. Raises Undefined."""
    import sympy

    variable, *bounds, body = (to_sympy(part) for part in node.parts)
    if node.text == "lim":
        result = sympy.limit(body, variable, bounds[0])
    elif node.text == "int":
        result = sympy.integrate(body, (variable, *bounds))
    elif node.text == "sum":
        result = sympy.summation(body, (variable, *bounds))
    else:
        result = sympy.product(body, (variable, *bounds))
    if result.has(sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.AccumBounds):
        raise Undefined
    return result


def to_sympy(node: Node) -> Any:
    """Return a formula as a SymPy expression. Raises Undefined."""
    import sympy

    if node.kind == "number" and node.value is not None:
        return sympy.Rational(node.value.numerator, node.value.denominator)
    if node.kind == "name":
        constants = {"π": sympy.pi, "e": sympy.E, "i": sympy.I, "∞": sympy.oo}
        return constants.get(node.text, sympy.Symbol(node.text, real=True))
    parts = [to_sympy(part) for part in node.parts]
    if node.kind == "sum":
        return sympy.Add(*parts)
    if node.kind == "product":
        return sympy.Mul(*parts)
    if node.kind == "inverse":
        return 1 / parts[0]
    if node.kind == "power":
        return sympy.Pow(*parts)
    renamed = {"ln": "log", "ceil": "ceiling", "abs": "Abs"}
    title = renamed.get(node.text, node.text)
    # SymPy's names: asin for arcsin, asinh for arsinh.
    for prefix in ("arc", "ar"):
        if title.startswith(prefix):
            title = "a" + title.removeprefix(prefix)
            break
    is_known = title in ("root", "log", "floor", "ceiling", "Abs", "factorial", "binomial")
    if node.kind != "call" or not (is_known or title.lstrip("a") in (*CIRCULAR, *HYPERBOLIC)):
        raise Undefined
    return getattr(sympy, title)(*parts)


def warm_up() -> None:
    """Load what forked children then share."""
    import sympy

    for left, right in (
        (r"\sqrt{1+\sqrt2}", r"\ln 2"),
        (r"\sin x", r"\cos x"),
        (r"\int_0^1 x^2 dx", r"\sin 1"),
    ):
        equal(left, right)
    sympy.integrate(sympy.sin(sympy.Symbol("x")), sympy.Symbol("x"))
