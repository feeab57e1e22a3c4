"""The typed tree of an answer, and the two reasons why a text has none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from typing import Literal

Percent = Literal["ignored", "hundredths"]
# Limits of a real answer.
MAX_LENGTH = 4_000
"""Most characters."""
MAX_DEPTH = 40
"""Most nested brackets."""
MAX_DIGITS = 400
"""Most digits of a number."""
HUGE = re.compile(rf"\d{{{MAX_DIGITS + 1}}}|\d[eE][-+]?\d{{4}}")
RELATIONS = frozenset("=<>≤≥≠∈≈≡")
FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
"""Relations as read from right to left; the others are the same."""


class Unreadable(ValueError):
    """Raised if the reader does not understand a text; its message says why."""


class TooLarge(ValueError):
    """Raised if a text is larger than any real answer, or asks for larger numbers."""


@dataclass(frozen=True)
class Node:
    """A part of an answer.

    | kind | parts | text, value, marks |
    |---|---|---|
    | `number` | | as written, its exact value |
    | `name` | | a variable, or a constant: `e`, `i`, `π`, `∞` |
    | `sum`, `product` | terms, factors | |
    | `inverse`, `power` | (divisor), (base, exponent) | |
    | `call` | arguments | the function: `sin`, `root`, `log`, `abs`, ... |
    | `apply` | arguments | the name of an unknown function |
    | `big` | (variable, low, high, body) | `sum`, `prod`, `int`, `lim` |
    | `text` | | words |
    | `word` | (their product) | a few letters: a word or a product |
    | `list` | elements | `and`, `or` or "" |
    | `tuple` | elements | the two brackets of a tuple or an interval |
    | `set`, `union`, `intersection`, `difference` | elements, sets | |
    | `builder` | (variable or membership, condition) | |
    | `matrix` | cells, row by row | its brackets `v` or `V`; number of rows |
    | `chain` | the sides | marks: the relations between them |
    | `ratio` | terms | |
    | `quantity` | (amount) | the unit; value: the factor to its base unit |
    | `based` | | the digits; value: the base |
    | `modulo` | (value, modulus) | |
    | `piecewise` | value, condition, value, ... | |
    | `opaque` | | a formula that equals only itself |
    """

    kind: str
    parts: tuple[Node, ...] = ()
    text: str = ""
    value: Fraction | None = None
    marks: tuple[str, ...] = ()

    def walk(self) -> Iterator[Node]:
        """Yield the node and everything below it."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def with_parts(self, parts: tuple[Node, ...]) -> Node:
        """Return a node like this one with other parts."""
        return self if parts == self.parts else replace(self, parts=parts)


KINDS = """
    text list tuple set union intersection difference builder matrix chain ratio based modulo piecewise opaque
"""
STRUCTURES = frozenset(KINDS.split())
"""Kinds that are neither numbers nor formulas."""


def number(value: Fraction | int, text: str = "") -> Node:
    """Return a number, with the text in which it was written, if that matters for rounding."""
    return Node("number", text=text, value=Fraction(value))


def name(text: str) -> Node:
    """Return a variable or a constant."""
    return Node("name", text=text)


def product(*factors: Node) -> Node:
    """Return a product; products in it become part of it."""
    flat = tuple(factor for f in factors for factor in (f.parts if f.kind == "product" else (f,)))
    return flat[0] if len(flat) == 1 else Node("product", flat)


def quotient(above: Node, below: Node) -> Node:
    """Return a fraction, a product with an inverse."""
    return product(above, Node("inverse", (below,)))


def negative(node: Node) -> Node:
    """Return a node with the other sign."""
    if node.kind == "number" and node.value is not None:
        return number(-node.value, node.text)
    if node.kind == "product" and node.parts[0].kind == "number":
        return Node("product", (negative(node.parts[0]), *node.parts[1:]))
    return product(number(-1), node)


def too_large(text: str) -> bool:
    """Return whether a text is longer, deeper or has longer numbers than any real answer."""
    depth = deepest = 0
    for character in text[:MAX_LENGTH]:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return len(text) > MAX_LENGTH or deepest > MAX_DEPTH or HUGE.search(text) is not None


PI = name("π")
INFINITY = name("∞")
CONSTANTS = frozenset("eiπ∞ℝℚℤℕℂ")
"""Names that are not variables."""


def combine_parts(kind: str, parts: Sequence[Node]) -> Node:
    """Return a sum or product, with one unit of its parts outside: 2 * 30° is (2 * 30)°."""
    if len(parts) == 1:
        return parts[0]
    # Brackets [x+1] in a product only group; a percentage in a calculation is a fraction.
    bare = [p.parts[0] if p.kind == "tuple" and len(p.text) == 2 and len(p.parts) == 1 else p for p in parts]
    bare = [quotient(p.parts[0], number(100)) if p.text == "percent" else p for p in bare]
    if any(p.kind == "matrix" for p in bare):
        return _with_matrices(kind, bare)
    if any(p.kind == "opaque" for p in bare):  # 1 + 2 + ... + n
        return Node("opaque", tuple(bare), kind)
    for part in bare:
        if part.kind in STRUCTURES:
            raise Unreadable(f"a {part.kind} in a calculation")
    measured = [p for p in bare if p.kind == "quantity"]
    inner = [p.parts[0] if p.kind == "quantity" else p for p in bare]
    result = product(*inner) if kind == "product" else Node("sum", tuple(inner))
    if not measured:
        return result
    inverse = any(p.kind == "inverse" and p.parts[0].kind == "quantity" for p in bare)
    if inverse or len({(p.text, p.value) for p in measured}) > 1 or (kind == "product" and len(measured) > 1):
        raise Unreadable("units in a calculation")
    return Node("quantity", (result,), measured[0].text, measured[0].value)


def _with_matrices(kind: str, parts: Sequence[Node]) -> Node:
    """Return a multiple of a matrix, or a sum of matrices, as a matrix."""
    matrices = [p for p in parts if p.kind == "matrix"]
    first = matrices[0]
    others = [p for p in parts if p.kind != "matrix"]
    if kind == "product" and len(matrices) == 1:
        return first.with_parts(tuple(combine_parts("product", (*others, cell)) for cell in first.parts))
    if kind == "product" and not others:
        return reduce(_times, matrices)
    if kind == "product" or others or len({(m.value, len(m.parts), m.text) for m in matrices}) > 1:
        raise Unreadable("a product of matrices")
    cells = zip(*(m.parts for m in matrices), strict=True)
    return first.with_parts(tuple(combine_parts("sum", cell) for cell in cells))


def negate(node: Node) -> Node:
    """Return a node with the other sign, with its unit outside."""
    if node.kind == "quantity":
        return Node("quantity", (negative(node.parts[0]),), node.text, node.value)
    if node.kind == "matrix":
        return _with_matrices("product", (number(-1), node))
    if node.kind in STRUCTURES:
        raise Unreadable(f"a {node.kind} in a calculation")
    return negative(node)


def in_radians(node: Node) -> Node:
    """Return an angle in radians."""
    if node.kind != "quantity":
        return node
    if node.text != "degree":
        raise Unreadable(f"an angle in {node.text}")
    return product(node.parts[0], PI, Node("inverse", (number(180),)))


def _times(left: Node, right: Node) -> Node:
    """Return the product of two matrices."""
    rows = _rows(left)
    columns = list(zip(*_rows(right), strict=True))
    if left.text or right.text or len(rows[0]) != len(_rows(right)):
        raise Unreadable("a product of matrices that do not fit")
    cells = tuple(
        combine_parts("sum", [combine_parts("product", pair) for pair in zip(row, column, strict=True)])
        for row in rows
        for column in columns
    )
    return Node("matrix", cells, "", Fraction(len(rows)))


def _rows(matrix: Node) -> list[tuple[Node, ...]]:
    width = len(matrix.parts) // int(matrix.value or 1)
    return [matrix.parts[k : k + width] for k in range(0, len(matrix.parts), width)]


def matrix_power(matrix: Node, power: int) -> Node:
    """Return a small power of a matrix, or its inverse for -1."""
    if power > 0:
        return reduce(_times, [matrix] * power)
    rows = _rows(matrix)
    whole = determinant(rows)
    places = [(r, c) for r in range(len(rows)) for c in range(len(rows))]
    # Cramer's rule: the cofactors, transposed, by the determinant.
    cells = tuple(quotient(_cofactor(rows, c, r), whole) for r, c in places)
    return Node("matrix", cells, matrix.text, matrix.value)


def determinant(rows: Sequence[tuple[Node, ...]]) -> Node:
    """Return the determinant of a matrix of four rows or fewer, as a formula of its cells."""
    if any(len(row) != len(rows) for row in rows) or len(rows) > 4:
        raise Unreadable("a determinant of a matrix that is not square, or large")
    if not rows:
        return number(1)
    terms = [combine_parts("product", (cell, _cofactor(rows, 0, k))) for k, cell in enumerate(rows[0])]
    return combine_parts("sum", terms)


def _cofactor(rows: Sequence[tuple[Node, ...]], row: int, column: int) -> Node:
    rest = [cells[:column] + cells[column + 1 :] for k, cells in enumerate(rows) if k != row]
    minor = determinant(rest)
    return negate(minor) if (row + column) % 2 else minor


def determinant_of(matrix: Node) -> Node:
    """Return the determinant of a matrix."""
    if matrix.kind != "matrix":
        raise Unreadable("the determinant of no matrix")
    return determinant(_rows(matrix))


def conjugate(node: Node) -> Node:
    """Return a formula with the other sign of i."""
    if node == name("i"):
        return negative(node)
    return node.with_parts(tuple(map(conjugate, node.parts)))


def transpose(matrix: Node) -> Node:
    """Return a matrix with rows and columns exchanged."""
    rows = int(matrix.value or 1)
    columns = len(matrix.parts) // rows
    parts = tuple(matrix.parts[r * columns + c] for c in range(columns) for r in range(rows))
    return Node("matrix", parts, matrix.text, Fraction(columns))


def with_products(node: Node, other: Node, only_sums: bool = False) -> Node:
    """Return an answer with g(x + 1) as a product, if the other has g as a letter and not as a function.

    ``only_sums``: g(x) stays a function, which it means in a reference.
    """
    letters = {n.text for n in other.walk() if n.kind == "name"}
    letters -= {n.text for n in other.walk() if n.kind == "apply"}

    def plain(part: Node) -> Node:
        parts = tuple(map(plain, part.parts))
        is_product = part.kind == "apply" and part.text in letters and len(parts) == 1
        if is_product and (parts[0].kind == "sum" or not only_sums):
            return product(name(part.text), parts[0])
        return replace(part, parts=parts)

    return plain(node) if any(n.kind == "apply" and n.text in letters for n in node.walk()) else node
