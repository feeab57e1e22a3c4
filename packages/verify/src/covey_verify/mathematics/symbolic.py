"""Algebra in a killable subprocess: SymPy objects made by a LaTeX grammar, never by evaluation.

Two expressions are equal if they agree at every point where they are tried, to 200 digits and after
expansion; if their difference is a rational function, its numerator has to be zero as well. This is much
faster than simplification, and tiny differences stay differences. The points follow from a hash of both
expressions, so no answer can be made to agree at these points only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from hashlib import sha256
from typing import Any, TypeAlias

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from covey_verify.mathematics.compare import compare, decimals, no_formula, significant
from covey_verify.mathematics.notation import CLOSE, OPEN, ROW, THOUSANDS, Node, Percent, read, value
from covey_verify.mathematics.scope import scoped

Formula: TypeAlias = Any
"""An object of SymPy, which declares no types: an expression, a relation or a matrix."""
RANGES = ((1, 2), (2, 3), (-3, -2), (0, 1), (-2, -1), (6, 8), (-1, 0), (3, 4))
"""Ranges from which a variable's values are drawn: on both sides of 0, 1 and -1, small enough for powers."""
GRAIN = 1 << 61
"""Denominators of points have this size, so that no sine of a multiple of pi is zero at a point."""
DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)")
# A number or a closing parenthesis directly before an opening bracket: a product.
FACTORS = re.compile(r"((?:^|(?<=[-+*/=(,{\s]))\d+|\)) ?(?=[({])")
TRANSPOSED = re.compile(r"(?<!matrix\})\^ ?(?:T|\{ ?T ?\})")
"""The exponent T of anything but a matrix: the grammar would transpose, and 2 transposed is 2."""
CONVERSION = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
# Typical pairs: reading and comparing them fills the caches of ``warm_up``.
WARM = r"""
\frac{1}{2} = \frac{2}{4}; 1-\frac{1}{e} = \frac{e-1}{e}; 2^{-9}\sqrt{2} = \frac{\sqrt{2}}{512}
2.25\pi = \frac{9}{4} \pi; (x+3)^2 = x^2+6x+9; (x-1)(x+1) = x^2-1; x(x+2) = x^2+2x
3x+4y^2-5(z-1) = 4y^{2}+3x-5z+5; -2a+b = b-2a; \frac{x^2+1}{y} = \frac{1}{y}(1+x^{2})
\frac{x+1}{2x-3} = \frac{-x-1}{3-2x}; \sqrt{x+1} = (x+1)^{1/2}; \sin^2(x) \cos b = \cos(b)\sin(x)^2
2\sin(x)\cos(x) = \sin(2x); \tan x = \frac{\sin x}{\cos x}; \ln x+\log_2 8 = 3+\ln(x); e^{i\pi} = -1
e^{2x} = (e^x)^2; \sqrt[3]{8} = 2; \frac{1}{\sqrt{2}} = \frac{\sqrt{2}}{2}
\frac{-1+\sqrt{5}}{2} = \frac{\sqrt{5}-1}{2}; 5+2\sqrt{3} = 2\sqrt{3}+5; \binom{5}{2} + 5! = 130
2^{10} = 1024; 3x+4y-7 = 7-3x; n(n+1)/2 = \frac{n(n+1)}{2}; f(x)+x_1 = x_1; 10^{-20} = 0
\infty = -\infty; \sum_{k=0}^{n-1} F_{k} = 0; |x| = |-x|; \begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix} = 0
"""


class Unreadable(ValueError):
    """The text is no formula."""


def equal(reference: str, answer: str, percent: Percent = "ignored") -> str:
    """Return `equal` or `different`, or the side that is unreadable: `reference` or `answer`."""
    unreadable: list[str] = []

    def leaf(ours: Node, theirs: Node) -> bool | None:
        expressions = []
        for side, node in (("reference", ours), ("answer", theirs)):
            try:
                expressions.append(expression(node.text))
            except Unreadable:
                unreadable.append(side)
                return False
        return agree(expressions[0], expressions[1], ours.text, theirs.text)

    if compare(read(reference, percent), read(answer, percent), leaf):
        return "equal"
    return unreadable[0] if unreadable else "different"


def second_opinion(reference: str, answer: str) -> bool:
    """Return math-verify's verdict, without its time limits: they use signals, and this is a child."""
    from math_verify import parse, verify

    references, answers = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (reference, answer))
    return bool(verify(references, answers, timeout_seconds=None))


def readable(references: Sequence[str]) -> list[bool]:
    """Return for each reference whether it is a number, a word or a formula."""
    return [_readable(read(reference)) for reference in references]


def _readable(node: Node) -> bool:
    if node.parts:
        return all(map(_readable, node.parts))
    if node.kind == "text" or value(node.text) is not None:
        return bool(node.text)
    try:
        expression(node.text)
    except Unreadable:
        return False
    return True


def expression(text: str) -> Formula:
    """Return a clean text as a SymPy object. Raises Unreadable."""
    if (known := value(text)) is not None:
        return sympy.Rational(known)
    if no_formula(text):
        raise Unreadable(text)
    latex = text.replace(THOUSANDS, "").replace(OPEN, r"\{").replace(CLOSE, r"\}").replace(ROW, r"\\ ")
    latex = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", latex)
    try:
        latex = scoped(latex)
    except ValueError as error:
        raise Unreadable(text) from error
    latex = FACTORS.sub(r"\1*", latex)  # the grammar takes 3(4) for a mixed number
    latex = TRANSPOSED.sub("^{(T)}", latex)
    # Decimals as fractions: SymPy would make floats of them, which are not exact.
    latex = DECIMAL.sub(lambda m: rf"{{\frac{{{m[1]}{m[2]}}}{{{10 ** len(m[2])}}}}}", latex)
    try:
        found = latex2sympy(latex, normalization_config=None, conversion_config=CONVERSION)
    except Exception as error:
        raise Unreadable(text) from error
    # ``zoo`` is complex infinity, the value of a division by zero.
    if found.has(sympy.zoo, sympy.nan):
        raise Unreadable(text)
    if not found.has(sympy.Derivative):
        return found
    return found.replace(_is_quotient, lambda d: sympy.Symbol(f"d{d.expr}/d{d.variables}"))


def _is_quotient(part: Formula) -> bool:
    """Return whether a part is dy/dx of an unknown y, to be kept as a name: SymPy would compute 0."""
    return isinstance(part, sympy.Derivative) and part.expr.is_Symbol and part.expr not in part.variables


def agree(reference: Formula, answer: Formula, reference_text: str = "", answer_text: str = "") -> bool:
    """Return whether two SymPy objects are equal; texts of decimals allow for rounding."""
    kinds = (sympy.core.relational.Relational, sympy.MatrixBase, sympy.Expr)
    if hasattr(reference, "doit") and not isinstance(reference, kinds[0]):
        # Sums, integrals and derivatives are computed now.
        reference, answer = reference.doit(), answer.doit()
    kind = next((k for k in kinds if isinstance(reference, k)), None)
    if kind is None or not isinstance(answer, kind):
        return bool(reference == answer)
    if kind is kinds[0]:
        return _relations_agree(reference, answer)
    if kind is kinds[1]:
        return reference.shape == answer.shape and all(map(agree, reference, answer))
    if reference == answer:
        return True
    # Values decide; simplification only if there are too few points at which both have one.
    ratio = _compare_values(reference, answer, _tolerance(reference_text, answer_text))
    return ratio if ratio is not None else bool(sympy.simplify(reference - answer) == 0)


def _tolerance(reference: str, answer: str) -> Fraction:
    """Return half a unit of the last digit of a decimal reference with 3 digits or more, else 0.

    A decimal answer counts from 10 digits on, as in ``compare.close``.
    """
    for text, least in ((reference, 3), (answer, 10)):
        places = decimals(text)
        if places is not None and re.fullmatch(r"-?[\d.]+", text) and significant(text) >= least:
            return Fraction(1, 2 * 10**places)
    return Fraction(0)


def _compare_values(reference: Formula, answer: Formula, tolerance: Fraction) -> bool | None:
    """Return whether both agree wherever both have a value; None if there are too few such points."""
    names = sorted({s.name for s in reference.free_symbols | answer.free_symbols})
    difference, tried = reference - answer, 0
    # Variables that occur in an exponent get other points, see ``_point``.
    raised = {s.name for power in difference.atoms(sympy.Pow) for s in power.exp.free_symbols}
    for place in range(len(RANGES) if names else 1):
        at: dict[str, Formula] = {}
        for k, name in enumerate(names):
            at[name] = _point(f"{place}\0{name}\0{reference}\0{answer}", place + k, name in raised)
        # The grammar reads i as a symbol.
        at["i"] = sympy.I
        a, b, apart = (_value(formula, at) for formula in (reference, answer, difference))
        if a is None or b is None or apart is None:
            # Without variables there is one point: a number is not equal to something without a value.
            if not names and (a is None) != (b is None):
                return False
            continue
        # A difference may be a rounding error of 15 digits: 200 digits tell.
        if abs(apart) > tolerance and not _vanishes(difference, at, min(abs(a), abs(b), 1)):
            return False
        tried += 1
    if tried < (2 if names else 1):
        return None
    return tolerance > 0 or _is_zero(difference)


def _point(key: str, place: int, raised: bool) -> Formula:
    """Return a number in the range of a place, drawn by a hash of the compared expressions.

    For a rational exponent (``raised``) SymPy would try to take the root of its denominator, so such a point
    is irrational.
    """
    digest = sha256(key.encode(errors="replace")).digest()
    low, high = RANGES[place % len(RANGES)]
    size = 60 if raised else GRAIN
    below = size + int.from_bytes(digest[:7]) % size
    found = low + (high - low) * sympy.Rational(1 + int.from_bytes(digest[7:15]) % (below - 1), below)
    root = 3 + digest[15]
    return found * sympy.sqrt(root**2 + 1) / root if raised else found


def _is_zero(difference: Formula) -> bool:
    """Return whether a difference that vanishes at all points is 0; exact for rational functions."""
    symbols = sorted(difference.free_symbols, key=str)
    if not symbols or not difference.is_rational_function(*symbols):
        return True
    above = sympy.fraction(sympy.together(difference))[0]
    try:
        return bool(sympy.Poly(above, *symbols, domain="QQ").is_zero)
    except (sympy.CoercionFailed, sympy.PolynomialError):  # its coefficients contain roots or pi
        return True


def _vanishes(difference: Formula, at: Mapping[str, Formula], scale: Formula) -> bool:
    """Return whether a difference is 0 to 200 digits, before and after it is expanded."""
    there = difference.subs({s: at[s.name] for s in difference.free_symbols})
    for form in (there, sympy.expand(there)):
        left = sympy.N(form, 15, maxn=200)
        lost = all(part._prec == 1 for part in left.atoms(sympy.Float))  # noqa: SLF001 - no digit is sure
        if left != 0 and (not lost or abs(left) > scale * sympy.Float("1e-40")):
            return False
    return True


def _value(formula: Formula, at: Mapping[str, Formula]) -> Formula:
    """Return a formula's value at a point; None if it has none."""
    try:
        found = sympy.N(formula.subs({s: at[s.name] for s in formula.free_symbols}), 15, maxn=200)
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    return found if found.is_number and found.is_finite else None


def _relations_agree(reference: Formula, answer: Formula) -> bool:
    """Return whether relations are equivalent: `a < b`, `c < d` if b - a is a positive multiple of d - c."""
    sides = [r.lhs - r.rhs for r in (reference, answer)]
    if sides[0] == 0 or sides[1] == 0:
        return bool(reference == answer)
    ratio = sympy.simplify(sides[0] / sides[1])
    if not ratio.is_number or ratio == 0:
        return False
    if reference.rel_op in ("==", "!="):
        return bool(reference.rel_op == answer.rel_op)
    return bool((answer.rel_op if ratio > 0 else answer.reversed.rel_op) == reference.rel_op)


def warm_up() -> None:
    """Fill the caches of the parser and of SymPy, which forked children then share."""
    for pair in re.split("[;\\n]", WARM.strip()):
        left, right = map(expression, pair.split(" = "))
        agree(left, right)
    agree(expression("y=2x+1"), expression("2x-y+1=0"))
