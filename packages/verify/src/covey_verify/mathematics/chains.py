"""The value that a chain of relations gives: `x = 2/4 = 1/2`, `1/2 = 0.5`, `f(x) = 3`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from covey_verify.mathematics.exact import decimals
from covey_verify.mathematics.magnitude import approximate
from covey_verify.mathematics.tree import CONSTANTS, Node

EQUATIONS = frozenset("=≈")


def is_name(node: Node, products: bool = False) -> bool:
    """Return whether a node is a name that can be assigned a value: x, f(x), |AB|, A:B, (p,q)."""
    if node.kind in ("tuple", "list", "ratio") or (node.kind == "call" and node.text == "abs"):
        return all(is_name(part, True) for part in node.parts)
    if node.kind == "product":  # |AB|, or the ratio AB/CD of two lengths
        lengths = all(n.text.isupper() for n in node.walk() if n.kind == "name")
        return (products or lengths) and all(p.kind == "inverse" or is_name(p, products) for p in node.parts)
    if node.kind == "word":
        return products
    return node.kind in ("text", "apply") or (node.kind == "name" and node.text not in CONSTANTS)


def chain_values(chain: Node, *, named: bool) -> list[tuple[Node, str]] | None:
    """Return the values in `name = value = ...`, each with the relation before it, or None.

    With ``named`` also the values of `1/2 = 0.5`, which has no name, and of `xy = 5`.
    """
    if chain.kind == "list" or not chain.marks or not set(chain.marks) <= EQUATIONS:
        return None
    if is_name(chain.parts[0], named):
        return list(zip(chain.parts[1:], chain.marks, strict=True))
    nodes = (node for part in chain.parts for node in part.walk())
    if not named or any(node.kind == "name" and node.text not in CONSTANTS for node in nodes):
        return None
    return list(zip(chain.parts, ("=", *chain.marks), strict=True))


def main_value(values: Sequence[tuple[Node, str]]) -> Node:
    """Return the last exact value; an approximation only if there is nothing else."""
    exactly = [value for value, mark in values if mark == "="]
    return exactly[-1] if exactly else values[0][0]


def assigned_value(node: Node) -> Node | None:
    """Return the value in `name = value`, or None."""
    values = chain_values(node, named=False) if node.kind == "chain" else None
    return main_value(values) if values else None


def is_approximation(value: Node, approximation: Node) -> bool:
    """Return whether an approximation is off by at most one unit of its last digit, or by one percent."""
    nodes = [n.parts[0] if n.kind == "quantity" else n for n in (value, approximation)]
    a, b = map(approximate, nodes)
    places = decimals(nodes[1].text) if nodes[1].kind == "number" else None
    unit = 10.0**-places if places is not None else 0.01 * abs(a)
    return not math.isnan(a - b) and abs(a - b) <= unit


def only_variable(node: Node) -> str:
    """Return the only variable of all values of a list, such as `x = 1 or x = 2` and `x = 1, 2`, or ""."""
    if node.kind != "list" or assigned_value(node.parts[0]) is None:
        return ""
    names = {assigned_name(part) for part in node.parts if part.kind == "chain"}
    alike = all(map(assigned_value, node.parts)) or not any(p.kind == "chain" for p in node.parts[1:])
    return names.pop() if alike and len(names) == 1 else ""


def solutions(node: Node, unknown: str) -> Node:
    """Return several values of one variable, or values joined by `or`, as a set, which has no order."""
    if not unknown and not (node.kind == "list" and node.text == "or"):
        return node
    elements = list[Node]()
    for part in node.parts:
        value = (assigned_value(part) or part) if unknown else part
        elements += value.parts if value.kind == "list" else (value,)
    return Node("set", tuple(elements), "" if unknown else node.text)


def joined_otherwise(ours: Node, theirs: Node) -> bool:
    """Return whether one list joins relations by `or` and the other by `and`; a comma may mean either."""
    if not ours.kind == theirs.kind == "list" or all(p.kind != "chain" for p in theirs.parts):
        return False
    return {ours.text, theirs.text} == {"and", "or"} or (theirs.text == "or" and not ours.text)


def assigned_name(chain: Node) -> str:
    """Return the name that gets a value: `f` for `f(x) = 3`, but `f(2)` for `f(2) = 3`."""
    return re.sub(r"\(\D*\)$", "", chain.parts[0].text.replace(" ", "") or repr(chain.parts[0]))
