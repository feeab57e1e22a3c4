"""The points at which algebra compares two formulas: drawn from a hash of both, so nobody can aim at them.

Some variables have to be integers. A formula that changes at a number, as |x - 70| does at 70, gets points on
both sides of this number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, TypeAlias

import mpmath

from covey_verify.mathematics.magnitude import approximate
from covey_verify.mathematics.rational import linear
from covey_verify.mathematics.tree import Node, negative

Value: TypeAlias = Any
"""A number of mpmath, which declares no types."""
MAX_ATTEMPTS = 120
"""Points that are tried, with or without a value there."""
MAX_EDGES = 10
"""Numbers at which a formula may change, if points have to lie on both sides of each."""
RANGES = ((0, 1), (1, 2), (2, 5), (5, 60))
BROKEN = frozenset({"abs", "floor", "ceil", "max", "min", "root"})
"""Functions that may be equal to others on a part of the line."""
INTEGRAL = frozenset({"mod", "gcd", "lcm"})
"""Functions of integers."""


class TooManyEdges(ValueError):
    """Raised if two formulas may change at more numbers than there are points to look at."""


def points(ours: Node, theirs: Node, names: Sequence[str]) -> Iterator[dict[str, Value]]:
    """Yield values of the variables, drawn from a hash of both formulas. Raises TooManyEdges."""
    if not names:
        yield {}
        return
    seed = sha256(f"{ours}\0{theirs}".encode(errors="replace")).hexdigest()
    both = Node("sum", (ours, theirs))
    whole, counts = _integers(both)
    edges = _edges(both, names)
    has_steps = any(n.kind == "call" and n.text in ("floor", "ceil") for n in both.walk())
    for number in range(MAX_ATTEMPTS):
        at = {}
        tries_integers = has_steps and number % 3 == 2
        for k, variable in enumerate(names):
            draw = int.from_bytes(sha256(f"{seed}{number}{variable}".encode()).digest()[:16])
            if variable in counts:
                at[variable] = mpmath.mpf(2 + (draw + number) % 40)
            elif variable in whole:  # eight in a row have all remainders by 2, 4 and 8
                at[variable] = mpmath.mpf(8 * (draw % 2**36) + number % 8)
            elif tries_integers:  # where floor and ceil jump
                at[variable] = mpmath.mpf(number // 3 % 9 - 3)
            else:
                positive = number < len(RANGES) or variable[:4] == "base"
                at[variable] = _real(draw, number + k, positive, edges if number % 2 else [])
        yield at


def _edges(both: Node, names: Sequence[str]) -> list[float]:
    """Return the sizes at which a formula may change, as |x - 70| does at 70: the sizes of its numbers.

    Raises TooManyEdges if there are too many to look at.
    """
    edges: set[float] = set()
    broken = [n for n in both.walk() if n.kind == "call" and n.text in BROKEN]
    for part in broken:
        for argument in part.parts:
            others = [Node("sum", (argument, negative(p))) for p in part.parts if p is not argument]
            lines = [linear(line, variable) for line in (argument, *others) for variable in names]
            edges |= {abs(float(line[1] / line[0])) for line in lines if line and line[0]}
    for part in both.walk():
        size = abs(approximate(part))
        if part.kind not in ("sum", "name") and 0 < size < 1e300:
            edges.add(size)
    edges.discard(0.0)
    if broken and len(edges) > MAX_EDGES:
        raise TooManyEdges
    return sorted(edges)[-MAX_EDGES:]


def _real(draw: int, number: int, positive: bool, edges: Sequence[float]) -> Value:
    """Return an irrational number in one of RANGES, or on a side of an edge, chosen by ``number``."""
    share = (draw % 2**61 + mpmath.sqrt(2) - 1) / 2**61
    low, high = RANGES[number % len(RANGES)]
    value = low + (high - low) * share
    if edges:
        edge = mpmath.mpf(edges[number // 4 % len(edges)])
        direction = 1 if number // 2 % 2 else -1
        scale = (1, 1, 3, 30)[draw >> 70 & 3] if direction > 0 else 1
        value = edge * (1 + direction * share) * scale
    return -value if draw & 1 << 64 and not positive else value


def _integers(node: Node) -> tuple[set[str], set[str]]:
    """Return the variables that have to be integers, and the variables that count the terms of a sum."""
    whole: set[str] = set()
    counts: set[str] = set()
    for part in node.walk():
        inside: set[str] = set()
        if part.kind == "power" and approximate(part.parts[0]) < 0:
            inside = {n.text for n in part.parts[1].walk() if n.kind == "name"}
        elif part.kind == "call" and part.text in INTEGRAL:
            inside = {n.text for n in part.walk() if n.kind == "name"}
        elif part.kind == "big" and len(part.parts) == 4 and part.text != "int":
            counts |= {n.text for bound in part.parts[1:3] for n in bound.walk() if n.kind == "name"}
        whole |= inside
    return whole, counts
