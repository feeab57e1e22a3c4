"""Equality of formulas by exact arithmetic, and the rounding that decimals allow."""

from __future__ import annotations

import re
from fractions import Fraction

from covey_verify.mathematics.rational import constant, proportional, same
from covey_verify.mathematics.tree import STRUCTURES, Node, name, negative, number


def exact(ours: Node, theirs: Node, multiple: bool = False) -> bool | None:
    """Return whether two formulas are equal by exact arithmetic; None if that cannot tell."""
    if multiple:
        factor = proportional(ours, theirs)
        return None if factor is None else bool(factor)
    a, b = constant(ours), constant(theirs)
    if a is not None and b is not None:
        return close(ours.text, a, theirs.text, b)
    if infinite(ours) or infinite(theirs):
        return infinite(ours) == infinite(theirs) != 0
    verdict = same(ours, theirs)
    if verdict is False and _decimal(ours, theirs):  # 3.142 for pi
        return None
    return verdict


def decidable(node: Node) -> bool:
    """Return whether exact arithmetic suffices to compare everything in an answer with anything."""
    if node.kind in STRUCTURES or node.kind == "quantity":
        return all(map(decidable, node.parts))
    return bool(infinite(node)) or exact(node, number(Fraction(1, 99_991))) is not None


def infinite(node: Node) -> int:
    """Return the sign of an infinity, 0 for anything else."""
    if node == name("∞"):
        return 1
    return -1 if node == negative(name("∞")) else 0


def _decimal(ours: Node, theirs: Node) -> bool:
    """Return whether one side is a decimal to which the other might round."""
    for node, fewest_digits in ((ours, 3), (theirs, 10)):
        text = node.text if node.kind == "number" else ""
        if decimals(text) is not None and significant(text) >= fewest_digits:
            return True
    return False


def close(reference_text: str, reference: Fraction, answer_text: str, answer: Fraction) -> bool:
    """Return whether two numbers are equal, or one number is a decimal to which the other rounds.

    A more precise answer equals a decimal reference if the reference has 3 significant digits or more.
    A decimal answer equals an exact reference by rounding only if it has 10 digits or more.

    >>> close("3.14", Fraction("3.14"), "22/7", Fraction(22, 7))
    True
    >>> close("0.5", Fraction(1, 2), ".46", Fraction("0.46"))
    False
    """
    if reference == answer:
        return True
    half = rounding(reference_text, answer_text)
    return half is not None and abs(reference - answer) <= half


def rounding(reference_text: str, answer_text: str) -> Fraction | None:
    """Return the difference that two decimals allow: half a unit of a last digit; None: no rounding."""
    ours, theirs = decimals(reference_text), decimals(answer_text)
    places = None
    if ours is not None and significant(reference_text) >= 3 and (theirs is None or theirs > ours):
        places = ours
    elif ours is None and theirs is not None and significant(answer_text) >= 10:
        places = theirs
    return None if places is None else Fraction(1, 2 * 10**places)


def decimals(text: str) -> int | None:
    """Return the number of digits after the point; None if there is no point."""
    match = re.search(r"\.(\d+)$", text)
    return len(match[1]) if match else None


def significant(text: str) -> int:
    """Return the number of significant digits."""
    return len(re.sub(r"\D", "", text).lstrip("0"))
