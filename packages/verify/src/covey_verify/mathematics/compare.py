"""The comparison of an answer with the reference answer, by structure, part by part.

It is three-valued: None means that only algebra can tell. ``symbolic``, in a subprocess, passes a ``leaf``
that decides by algebra; the exact one here compares numbers and words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from covey_verify.mathematics.notation import END, Node, flat, value, without_spaces

Leaf = Callable[[Node, Node], bool | None]
# Relations as read from right to left.
FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", "=": "=", r"\neq": r"\neq"}
INFINITY = Node("leaf", r"\infty"), Node("leaf", r"-\infty")
APPLIED = re.compile(r"(?<=[a-zA-Z}]) ?\((?:[^()]|\([^()]*\))*\)$")
"""The argument of a function: f(2) can be assigned a value, whatever is in the parentheses."""
DIFFERENCE = re.compile(r"\d+-\d+")
"""As a reference answer this is a range, a score or a telephone number, never a subtraction left to do."""
NO_FORMULA = re.compile(r"['⟨⟩⨯\ufffd\x00-\x1f\x7f]|\d ?_|(?<![_^])\d [.\d]|\.\d+\.|[-+*/^_=<>]$")
"""Text that no formula contains or ends with, but that an untrained model writes."""
# Kinds whose parts have an order.
ORDERED = {"()", "[]", "[)", "(]", "matrix", ":"}


def compare(reference: Node, answer: Node, leaf: Leaf) -> bool | None:
    """Return whether two structures are equal; None if that needs algebra."""
    reference, answer = _region(_plain(reference)), _region(_plain(answer))
    # Lists of values of one variable: `x = 1 or x = 2` against `1, 2`, but not against `y = 1, 2`.
    names = _unknown(reference), _unknown(answer)
    if names[0] != names[1] if all(names) else not any(names) and _joined_otherwise(reference, answer):
        return False
    reference, answer = _solutions(reference, names[0]), _solutions(answer, names[1])
    if reference.kind == answer.kind == "chain":
        return _chains(reference, answer, leaf)
    if "chain" in (reference.kind, answer.kind):
        return _against_chain(reference, answer, leaf)
    if reference.kind in ("leaf", "text") and answer.kind in ("leaf", "text"):
        return _leaves(reference, answer, leaf)
    kinds = {reference.kind, answer.kind}
    if kinds <= {"list", "()"} and reference.kind != answer.kind:
        return _in_order(reference.parts, answer.parts, leaf)  # 3,1 for (3,1)
    if reference.kind == answer.kind and reference.kind in ORDERED:
        return reference.marks == answer.marks and _in_order(reference.parts, answer.parts, leaf)
    if kinds <= {"list", "set"} or kinds == {"union"}:
        if all(map(_assigned, reference.parts)) and not any(map(_assigned, answer.parts)):
            return _in_order(reference.parts, answer.parts, leaf)  # x=1, y=2 is not 2, 1
        return _in_any_order(reference.parts, answer.parts, leaf)
    if "leaf" in kinds and kinds & {"matrix", "union"}:
        return leaf(reference, answer)  # a sum of matrices
    # A last chance for `3,14`, which parses as the list 3 and 14.
    comma = next(
        (n for n in (reference, answer) if n.kind == "list" and re.fullmatch(r"\d+,\d+", n.text)), None
    )
    if comma is not None:  # 3,14 where commas are decimal points
        point = Node("leaf", comma.text.replace(",", "."))
        return compare(point, answer, leaf) if comma is reference else compare(reference, point, leaf)
    return False


def exact(reference: Node, answer: Node) -> bool | None:
    """Return whether two leaves are equal as numbers or words; None for anything else."""
    a, b = value(reference.text), value(answer.text)
    if a is not None and b is not None:
        return close(reference.text, a, answer.text, b)
    # Never None: algebra knows no words.
    if "text" in (reference.kind, answer.kind):
        return _folded(reference.text) == _folded(answer.text)
    same = without_spaces(reference.text) == without_spaces(answer.text)
    return True if same and balanced(reference.text) else None


def close(reference_text: str, reference: Fraction, answer_text: str, answer: Fraction) -> bool:
    """Return whether two numbers are equal, or the one is a decimal to which the other rounds.

    A more precise answer equals a decimal reference if that has 3 significant digits or more. A decimal
    answer equals an exact reference by rounding only if it has 10 or more.

    >>> close("3.14", Fraction("3.14"), "22/7", Fraction(22, 7))
    True
    >>> close("0.5", Fraction(1, 2), ".46", Fraction("0.46"))
    False
    """
    if reference == answer:
        return True
    ours, theirs = decimals(reference_text), decimals(answer_text)
    # Decimal places at whose last digit half a unit of difference is allowed; None: no rounding.
    half = None
    if ours is not None and significant(reference_text) >= 3 and (theirs is None or theirs > ours):
        half = ours
    elif ours is None and theirs is not None and significant(answer_text) >= 10:
        half = theirs
    return half is not None and 2 * abs(reference - answer) <= Fraction(1, 10**half)


def decimals(text: str) -> int | None:
    """Return the number of digits after the point; None if there is no point."""
    match = re.search(r"\.(\d+)$", text)
    return len(match[1]) if match else None


def significant(text: str) -> int:
    """Return the number of significant digits."""
    return len(re.sub(r"\D", "", text).lstrip("0"))


def balanced(text: str) -> bool:
    """Return whether as many brackets close as open; a truncated text is no formula."""
    return text.count("{") == text.count("}") and text.count("(") == text.count(")")


def no_formula(text: str) -> bool:
    """Return whether a cheap check already shows that algebra cannot read a clean text.

    >>> no_formula("4 4"), no_formula("3+"), no_formula("3+4")
    (True, True, False)
    """
    return not balanced(text) or NO_FORMULA.search(text) is not None


def _plain(node: Node) -> Node:
    """Return the option `A` for (A) and A)."""
    if node.kind in ("leaf", "text") and re.fullmatch(r"\(?[A-Z]\)", node.text):
        return Node(node.kind, node.text.strip("()"))
    return node


def _unknown(node: Node) -> str:
    """Return the one variable of all values of a list, as in `x = 1 or x = 2` and `x = 1, 2`, or ""."""
    if node.kind != "list" or _assigned(node.parts[0]) is None:
        return ""
    names = {_name(part) for part in node.parts if part.kind == "chain"}
    same = all(map(_assigned, node.parts)) or not any(p.kind == "chain" for p in node.parts[1:])
    return names.pop() if same and len(names) == 1 else ""


def _region(node: Node) -> Node:
    """Return the set that relations of one variable describe together, if `or`, `and` or a comma joins them.

    A comma between two half-lines that overlap means `and`, otherwise `or`.
    """
    if node.kind != "list" or any(p.kind != "chain" for p in node.parts) or len(node.marks) > 1:
        return node
    found = [as_interval(part) for part in node.parts]
    ranges = [one for one in found if one is not None]
    if len(ranges) < len(found) or len(set(map(_variable, node.parts))) > 1:
        return node
    both = _between(ranges)
    if node.marks == ("and",):
        return both or node
    low, high = (value(end.text) for end in both.parts) if both else (None, None)
    empty = low is not None and high is not None and low >= high
    if node.marks == ("or",) or empty:
        return Node("union", node.text, tuple(ranges))
    return both or node


def _between(ranges: Sequence[Node]) -> Node | None:
    """Return the intersection of two half-lines, of which one has no upper and the other no lower end."""
    above = [r for r in ranges if r.parts[1:] == INFINITY[:1]]
    below = [r for r in ranges if r.parts[:1] == INFINITY[1:]]
    if not len(ranges) == 2 == len(above) + len(below) or len(above) == 2 or len(below) == 2:
        return None
    (low,), (high,) = above, below
    # The kind is the pair of brackets: `(` or `[` of the lower end, `)` or `]` of the upper.
    return Node(low.kind[0] + high.kind[1], low.text, (low.parts[0], high.parts[1]))


def _joined_otherwise(reference: Node, answer: Node) -> bool:
    """Return whether one joins relations by `or` and the other by `and`; a comma may mean either."""
    if not reference.kind == answer.kind == "list" or all(p.kind != "chain" for p in answer.parts):
        return False
    if "or" in answer.marks:
        return "or" not in reference.marks
    return "and" in answer.marks and "or" in reference.marks


def _solutions(node: Node, unknown: str) -> Node:
    """Return several values of one variable, or values joined by `or`, as a set, which has no order."""
    if not unknown and not (node.kind == "list" and "or" in node.marks):
        return node
    found = ((_assigned(p) or p) if unknown else p for p in node.parts)
    return Node("set", node.text, tuple(one for part in found for one in flat(part)))


def _name(chain: Node) -> str:
    """Return the name that gets a value: `f` for `f(x) = 3`, but `f(2)` for `f(2) = 3`."""
    return re.sub(r"\(\D*\)$", "", chain.parts[0].text.replace(" ", ""))


def _marks_agree(reference: Node, answer: Node) -> bool:
    """Return whether units agree (`5` may answer `5 cm`, `m` not `cm`), and bases and phrases are equal."""
    ours, theirs = reference.marks, answer.marks
    # A phrase ("? or so") or the base of a reference ("base 2") contains a space, a unit does not.
    strict = any(" " in mark for mark in (*theirs, *(m for m in ours if m.startswith("base "))))
    return ours == theirs or not (strict or (ours and theirs))


def _leaves(reference: Node, answer: Node, leaf: Leaf) -> bool | None:
    if not _marks_agree(reference, answer):
        return False
    if not balanced(answer.text):
        return False
    if DIFFERENCE.fullmatch(without_spaces(reference.text)):
        return without_spaces(reference.text) == without_spaces(answer.text)
    known = exact(reference, answer)
    return leaf(reference, answer) if known is None else known


def _in_order(references: Sequence[Node], answers: Sequence[Node], leaf: Leaf) -> bool | None:
    if len(references) != len(answers):
        return False
    return _all([compare(g, a, leaf) for g, a in zip(references, answers, strict=True)])


def _in_any_order(references: Sequence[Node], answers: Sequence[Node], leaf: Leaf) -> bool | None:
    """Return whether every element has an equal on the other side."""
    table = [[compare(reference, answer, leaf) for answer in answers] for reference in references]
    # Rows of the table and of its transpose: an element has an equal if its row has a True, perhaps if it
    # has a None.
    rows = (*table, *zip(*table, strict=True))
    return _all([True if True in row else None if None in row else False for row in rows])


def _all(results: Sequence[bool | None]) -> bool | None:
    return False if False in results else None if None in results else True


def _is_name(node: Node) -> bool:
    """Return whether a node is a name that can be assigned a value: x, f(x), |AB|, A:B, (p,q)."""
    if node.kind in ("()", "list", ":"):
        return all(map(_is_name, node.parts))
    named = re.sub(r"\^ ?\{-1\} ?(?=\()", "", node.text)  # an inverse function
    # Without indices, \frac (as in dy/dx) and arguments, a name has letters, but no operators and no digits.
    bare = re.sub(r"_ ?(?:\{[^{}]*\}|\w)|\\frac" + END, "", APPLIED.sub("", named))
    return (
        node.kind in ("leaf", "text")
        and any(c.isalpha() for c in bare)
        and not re.search(r"[-+*^/<>\d]|\\(?:sqrt|infty|pi)" + END, bare)
    )


def _assigned(node: Node) -> Node | None:
    """Return the value in `name = value`, with or without an approximation behind it, or None."""
    if node.kind != "chain" or not set(node.marks) <= {"=", r"\approx"} or not _is_name(node.parts[0]):
        return None
    # The last one of `x = 2/4 = 1/2`; an approximation only if there is nothing else.
    exact_parts = [p for p, mark in zip(node.parts[1:], node.marks, strict=True) if mark == "="]
    return exact_parts[-1] if exact_parts else node.parts[1]


def _consistent(node: Node, leaf: Leaf) -> bool | None:
    """Return whether all values of `name = a = b` are equal: `x = 2 = 3` is no answer, neither 2 nor 3."""
    parts = [p for p, mark in zip(node.parts[1:], node.marks, strict=True) if mark == "="]
    return _in_order(parts[1:], parts[:-1], leaf)


def _against_chain(reference: Node, answer: Node, leaf: Leaf) -> bool | None:
    """Compare a value or an interval with a chain of relations."""
    if answer.kind == "chain":
        if (found := _assigned(answer)) is not None:
            return _all([compare(reference, found, leaf), _consistent(answer, leaf)])
        if set(answer.marks) <= {"=", r"\approx"} and all(p.text.strip() for p in answer.parts):
            values = [p for p, mark in zip(answer.parts, ("=", *answer.marks), strict=True) if mark == "="]
            return _in_order([reference] * len(values), values, leaf)  # 1/2 = 0.5
        between = as_interval(answer)
        return compare(reference, between, leaf) if between and reference.kind != "leaf" else False
    found = _assigned(reference) or as_interval(reference)
    return compare(found, answer, leaf) if found else False


def _chains(reference: Node, answer: Node, leaf: Leaf) -> bool | None:
    ours, theirs = _assigned(reference), _assigned(answer)
    if ours and theirs and _name(reference) == _name(answer):
        return _all([compare(ours, theirs, leaf), _consistent(answer, leaf)])
    ranges = as_interval(reference), as_interval(answer)
    if ranges[0] and ranges[1] and not ours and _variable(reference) == _variable(answer):
        return compare(ranges[0], ranges[1], leaf)
    # `1 < x` says the same as `x > 1`.
    backwards = Node("chain", "", answer.parts[::-1], tuple(FLIPPED.get(m, m) for m in answer.marks[::-1]))
    results = [
        _in_order(reference.parts, a.parts, leaf) for a in (answer, backwards) if a.marks == reference.marks
    ]
    if True in results:
        return True
    return (
        leaf(reference, answer)
        if len(reference.marks) == len(answer.marks) == 1
        else None
        if None in results
        else False
    )


def _variable(chain: Node) -> str:
    return next(p.text for p in chain.parts if _is_name(p))


def as_interval(chain: Node) -> Node | None:
    r"""Return the set that `1 < x \leq 2`, `x > 1` or `x \in S` describes, or None."""
    parts, marks = chain.parts, chain.marks
    if marks == (r"\in",):
        return parts[1] if _is_name(parts[0]) else None
    if marks[0] in (">", r"\geq"):
        parts, marks = parts[::-1], tuple(FLIPPED.get(m, m) for m in marks[::-1])
    if not set(marks) <= {"<", r"\leq"} or sum(map(_is_name, parts)) != 1:
        return None
    # The variable is first (x < 1), last (1 < x) or between two ends (1 < x < 2).
    place = next(i for i, p in enumerate(parts) if _is_name(p))
    if (len(parts), place) not in ((2, 0), (2, 1), (3, 1)):
        return None
    low, high = (parts[0] if place else INFINITY[1]), (parts[-1] if place < len(parts) - 1 else INFINITY[0])
    opening = "[" if place and marks[0] == r"\leq" else "("
    closing = "]" if place < len(parts) - 1 and marks[-1] == r"\leq" else ")"
    return Node(opening + closing, chain.text, (low, high))


def _folded(text: str) -> str:
    return " ".join(text.casefold().strip(" .()").split())
