"""Algebra, in a killable subprocess only: SymPy objects made by a LaTeX grammar, never by evaluation.

Two expressions are equal if they agree wherever they are tried: exactly where the difference is
rational, else to 200 digits and after expansion. That is much faster than simplification, and tiny
differences stay differences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from covey.rewards.compare import balanced, compare, decimals, significant
from covey.rewards.notation import CLOSE, OPEN, ROW, THOUSANDS, Node, Percent, read, value

Formula: TypeAlias = Any
"""One of sympy, which declares no types: an expression, a relation or a matrix."""
POINTS = tuple(map(Fraction, ["7/5", "23/9", "-17/7", "5/11", "-31/13", "43/6"]))
DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)")
FACTORS = re.compile(r"((?:^|(?<=[-+*/=(,{\s]))\d+|\)) ?(?=[({])")
CONVERSION = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
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
    """A text that is no formula."""


def equal(gold: str, answer: str, percent: Percent = "ignored") -> str:
    """`equal`, `different`, or which side is `unreadable`: `gold` or `answer`."""
    unreadable: list[str] = []

    def leaf(ours: Node, theirs: Node) -> bool | None:
        expressions = []
        for side, node in (("gold", ours), ("answer", theirs)):
            try:
                expressions.append(expression(node.text))
            except Unreadable:
                unreadable.append(side)
                return False
        return agree(expressions[0], expressions[1], ours.text, theirs.text)

    if compare(read(gold, percent), read(answer, percent), leaf):
        return "equal"
    return unreadable[0] if unreadable else "different"


def second_opinion(gold: str, answer: str) -> bool:
    """What math-verify says. Its own time limits are off: they rely on signals, and this is a child."""
    from math_verify import parse, verify

    golds, answers = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
    return bool(verify(golds, answers, timeout_seconds=None))


def readable(golds: Sequence[str]) -> list[bool]:
    """Which golds are numbers, words or formulas."""
    return [_readable(read(gold)) for gold in golds]


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
    """A clean text as a SymPy object. Raises Unreadable."""
    if (known := value(text)) is not None:
        return sympy.Rational(known)
    if not balanced(text) or re.search(r"['⟨⟩]|\d ?_", text):
        raise Unreadable(text)
    latex = text.replace(THOUSANDS, "").replace(OPEN, r"\{").replace(CLOSE, r"\}").replace(ROW, r"\\ ")
    latex = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", latex)
    latex = FACTORS.sub(r"\1*", latex)  # the grammar takes 3(4) for a mixed number
    latex = DECIMAL.sub(lambda m: rf"{{\frac{{{m[1]}{m[2]}}}{{{10 ** len(m[2])}}}}}", latex)
    try:
        found = latex2sympy(latex, normalization_config=None, conversion_config=CONVERSION)
    except Exception as error:
        raise Unreadable(text) from error
    if found.has(sympy.zoo, sympy.nan):
        raise Unreadable(text)
    return found


def agree(gold: Formula, answer: Formula, gold_text: str = "", answer_text: str = "") -> bool:
    """Whether two SymPy objects are the same thing."""
    kinds = (sympy.core.relational.Relational, sympy.MatrixBase, sympy.Expr)
    if hasattr(gold, "doit") and not isinstance(gold, kinds[0]):
        gold, answer = gold.doit(), answer.doit()
    kind = next((k for k in kinds if isinstance(gold, k)), None)
    if kind is None or not isinstance(answer, kind):
        return bool(gold == answer)
    if kind is kinds[0]:
        return _relations_agree(gold, answer)
    if kind is kinds[1]:
        return gold.shape == answer.shape and all(map(agree, gold, answer))
    if gold == answer:
        return True
    ratio = _compare_values(gold, answer, _tolerance(gold_text, answer_text))
    return ratio if ratio is not None else bool(sympy.simplify(gold - answer) == 0)


def _tolerance(gold: str, answer: str) -> Fraction:
    """Half a unit of the last digit where the gold is a decimal number with 3 digits or more."""
    for text, least in ((gold, 3), (answer, 10)):
        places = decimals(text)
        if places is not None and re.fullmatch(r"-?[\d.]+", text) and significant(text) >= least:
            return Fraction(1, 2 * 10**places)
    return Fraction(0)


def _compare_values(gold: Formula, answer: Formula, tolerance: Fraction) -> bool | None:
    """Agreement at every point that both have a value at; None if there are too few."""
    names = sorted({s.name for s in gold.free_symbols | answer.free_symbols})
    difference, tried = gold - answer, 0
    for place in range(len(POINTS) if names else 1):
        at = {n: sympy.Rational(POINTS[(place + k) % len(POINTS)]) + k for k, n in enumerate(names)}
        at["i"] = sympy.I
        a, b, apart = (_value(formula, at) for formula in (gold, answer, difference))
        if a is None or b is None or apart is None:
            if not names and (a is None) != (b is None):
                return False
            continue
        if abs(apart) > tolerance and not _vanishes(difference, at, min(abs(a), abs(b), 1)):
            return False
        tried += 1
    return True if tried >= (2 if names else 1) else None


def _vanishes(difference: Formula, at: Mapping[str, Formula], scale: Formula) -> bool:
    """Whether 200 digits of a difference leave nothing of it, before and after it is expanded."""
    there = difference.subs({s: at[s.name] for s in difference.free_symbols})
    for form in (there, sympy.expand(there)):
        left = sympy.N(form, 15, maxn=200)
        lost = all(part._prec == 1 for part in left.atoms(sympy.Float))  # noqa: SLF001 - no digit is sure
        if left != 0 and (not lost or abs(left) > scale * sympy.Float("1e-40")):
            return False
    return True


def _value(formula: Formula, at: Mapping[str, Formula]) -> Formula:
    """A formula's value at a point; None where it has none."""
    try:
        found = sympy.N(formula.subs({s: at[s.name] for s in formula.free_symbols}), 15, maxn=200)
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    return found if found.is_number and found.is_finite else None


def _relations_agree(gold: Formula, answer: Formula) -> bool:
    """`a < b` and `c < d` say the same if b - a is a positive multiple of d - c."""
    sides = [r.lhs - r.rhs for r in (gold, answer)]
    if sides[0] == 0 or sides[1] == 0:
        return bool(gold == answer)
    ratio = sympy.simplify(sides[0] / sides[1])
    if not ratio.is_number or ratio == 0:
        return False
    if gold.rel_op in ("==", "!="):
        return bool(gold.rel_op == answer.rel_op)
    return bool((answer.rel_op if ratio > 0 else answer.reversed.rel_op) == gold.rel_op)


def warm_up() -> None:
    """Fill the tables of the parser and of SymPy, which the children then share."""
    for pair in re.split("[;\\n]", WARM.strip()):
        left, right = map(expression, pair.split(" = "))
        agree(left, right)
    agree(expression("y=2x+1"), expression("2x-y+1=0"))
