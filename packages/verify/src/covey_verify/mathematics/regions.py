"""Sets of real numbers: unions of intervals and points, from intervals, unions, builders and inequalities.

The ends on a number line divide it into cells, points and the gaps between them in turn. A set is the cells
that belong to it, so unions, intersections and complements are operations on sets of cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from covey_verify.mathematics.magnitude import approximate
from covey_verify.mathematics.rational import linear, same
from covey_verify.mathematics.tree import CONSTANTS, FLIPPED, INFINITY, Node, name, negative, number

INEQUALITIES = frozenset("<>≤≥≠")
OPERATIONS: dict[str, Callable[[bool, bool], bool]] = {
    "union": lambda a, b: a or b,
    "intersection": lambda a, b: a and b,
    "difference": lambda a, b: a and not b,
}
MAX_PARTS = 40
MINUS_INFINITY = negative(INFINITY)


class NoRegion(ValueError):
    """Raised if a node is not a set of real numbers whose ends are known."""


@dataclass(frozen=True)
class Region:
    """A set of real numbers: its ends in increasing order, and which of the cells between belong to it."""

    ends: tuple[Node, ...]
    cells: tuple[bool, ...]
    variable: str = ""
    """The name in the inequality that describes it."""


def region(node: Node) -> Region:
    """Return the set of real numbers that a node describes. Raises NoRegion."""
    if len(node.parts) > MAX_PARTS:
        raise NoRegion
    if node.kind == "tuple" and len(node.parts) == 2:
        return _interval(node.parts[0], node.parts[1], "[" in node.text, "]" in node.text)
    if node.kind == "set":
        points = (_interval(part, part, True, True) for part in node.parts)
        return reduce(_union, points, Region((), (False,)))
    if node == name("ℝ"):
        return Region((), (True,))
    if node.kind in OPERATIONS:
        return combine_regions(node.kind, [region(part) for part in node.parts])
    if node.kind == "builder":
        return _region_of_builder(node)
    if node.kind == "chain":
        return _region_of_relations(node)
    if node.kind == "list" and all(part.kind == "chain" for part in node.parts):
        parts = [region(part) for part in node.parts]
        if node.text:
            return combine_regions("union" if node.text == "or" else "intersection", parts)
        # A comma between two half-lines that overlap means `and`, otherwise `or`.
        both = combine_regions("intersection", parts)
        return both if any(both.cells) else combine_regions("union", parts)
    raise NoRegion


def complement(points: Region) -> Region:
    """Return the rest of the real line."""
    return Region(points.ends, tuple(not cell for cell in points.cells), points.variable)


def inequality(node: Node) -> bool:
    """Return whether a node has a relation other than an equation."""
    if node.kind == "chain":
        return bool(INEQUALITIES & set(node.marks))
    return node.kind == "list" and any(map(inequality, node.parts))


def _interval(low: Node, high: Node, from_low: bool, to_high: bool) -> Region:
    ends = approximate(low), approximate(high)
    if any(map(math.isnan, ends)) or ends[0] > ends[1] or (ends[0] == ends[1] and low != high):
        raise NoRegion
    if ends[0] == ends[1]:
        if math.isinf(ends[0]):
            raise NoRegion
        return Region((low,), (False, from_low and to_high, False))
    finite = [end for end, size in zip((low, high), ends, strict=True) if math.isfinite(size)]
    cells = [True]
    if math.isfinite(ends[0]):
        cells = [False, from_low, *cells]
    if math.isfinite(ends[1]):
        cells = [*cells, to_high, False]
    return Region(tuple(finite), tuple(cells))


def _union(a: Region, b: Region) -> Region:
    return combine_regions("union", [a, b])


def combine_regions(kind: str, regions: Sequence[Region]) -> Region:
    """Return the union, intersection or difference of sets. Raises NoRegion if they are about two names."""
    names = {r.variable for r in regions if r.variable}
    if len(names) > 1:
        raise NoRegion
    result = regions[0]
    for other in regions[1:]:
        ends = _merge_ends(result.ends, other.ends)
        cells = zip(_refine_cells(result, ends), _refine_cells(other, ends), strict=True)
        result = _simplify_region(ends, [OPERATIONS[kind](a, b) for a, b in cells])
    return Region(result.ends, result.cells, "".join(names))


def _equal(a: Node, b: Node) -> bool:
    verdict = same(a, b)
    return verdict if verdict is not None else math.isclose(approximate(a), approximate(b), rel_tol=1e-13)


def _merge_ends(first: Sequence[Node], second: Sequence[Node]) -> tuple[Node, ...]:
    merged: list[Node] = []
    for end in sorted((*first, *second), key=approximate):
        if not merged or not _equal(merged[-1], end):
            merged.append(end)
    return tuple(merged)


def _refine_cells(region: Region, ends: Sequence[Node]) -> list[bool]:
    """Return a set's cells on a line with more ends."""
    cells = [region.cells[0]]
    k = 0
    for end in ends:
        if k < len(region.ends) and _equal(region.ends[k], end):
            k += 1
            cells += region.cells[2 * k - 1 : 2 * k + 1]
        else:
            cells += [region.cells[2 * k]] * 2
    return cells


def _simplify_region(ends: Sequence[Node], cells: Sequence[bool]) -> Region:
    """Return a set without the ends at which nothing changes."""
    kept_ends = list[Node]()
    kept_cells = [cells[0]]
    for k, end in enumerate(ends):
        point, after = cells[2 * k + 1 : 2 * k + 3]
        if not kept_cells[-1] == point == after:
            kept_ends.append(end)
            kept_cells += [point, after]
    return Region(tuple(kept_ends), tuple(kept_cells))


def _region_of_builder(node: Node) -> Region:
    """Return the set {x | condition}, or {x in S | condition}."""
    subject, condition = node.parts
    domain = region(condition)
    if subject.kind == "chain" and subject.marks == ("∈",):
        subject, inside = subject.parts
        domain = combine_regions("intersection", [region(inside), domain])
    if subject.kind != "name" or domain.variable != subject.text:
        raise NoRegion
    return Region(domain.ends, domain.cells)


def _region_of_relations(chain: Node) -> Region:
    """Return the numbers for which all relations of a chain hold."""
    if chain.marks == ("∈",):
        side = region(chain.parts[1])
        if chain.parts[0].kind != "name":
            raise NoRegion
        return Region(side.ends, side.cells, chain.parts[0].text)
    # f(x) > 2 is about the values of f.
    parts = [name(f"{p.text}({p.parts})") if p.kind == "apply" else p for p in chain.parts]
    sides = zip(parts, chain.marks, parts[1:], strict=False)
    return combine_regions("intersection", [_half_line(*relation) for relation in sides])


def _half_line(left: Node, mark: str, right: Node) -> Region:
    """Return the numbers for which one relation holds: linear, or |linear| or x^2 against a number."""
    names = {n.text for side in (left, right) for n in side.walk() if n.kind == "name"} - CONSTANTS
    if len(names) != 1 or mark not in "<>≤≥≠=":
        raise NoRegion
    variable = names.pop()
    if _constant_side(left):
        left, mark, right = right, FLIPPED.get(mark, mark), left
    if _constant_side(right) and left == name(variable):
        return _with_name(_region_beside(mark, right), variable)
    size = _size(left, right)
    if size is not None and mark in FLIPPED and approximate(size[1]) > 0:
        inside, limit = size
        kind = "intersection" if mark in "<≤" else "union"
        halves = _half_line(inside, mark, limit), _half_line(inside, FLIPPED[mark], negative(limit))
        return combine_regions(kind, halves)
    slopes = linear(Node("sum", (left, negative(right))), variable)
    if slopes is None or not slopes[0]:
        raise NoRegion
    slope, rest = slopes
    if slope < 0:
        mark = FLIPPED.get(mark, mark)
    return _with_name(_region_beside(mark, number(-rest / slope)), variable)


def _size(left: Node, right: Node) -> tuple[Node, Node] | None:
    """Return (x, c) if a relation compares |x| or x^2 with a constant: |x| with c."""
    if not _constant_side(right):
        return None
    if left.kind == "call" and left.text == "abs":
        return left.parts[0], right
    if left.kind == "power" and left.parts[1].value == 2:
        return left.parts[0], Node("call", (right, number(2)), "root")
    return None


def _constant_side(node: Node) -> bool:
    return not any(n.kind == "name" and n.text not in CONSTANTS - {"i"} for n in node.walk())


def _with_name(points: Region, variable: str) -> Region:
    return Region(points.ends, points.cells, variable)


def _region_beside(mark: str, end: Node) -> Region:
    """Return the numbers that are below, above, equal or unequal to an end."""
    if mark in "=≠":
        point = _interval(end, end, True, True)
        return point if mark == "=" else complement(point)
    if mark in "<≤":
        return _interval(MINUS_INFINITY, end, False, mark == "≤")
    return _interval(end, INFINITY, mark == "≥", False)
