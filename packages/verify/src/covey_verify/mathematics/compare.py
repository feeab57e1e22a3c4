"""The comparison of an answer with the reference answer, by structure, part by part.

It is three-valued: None means that only algebra can tell. ``symbolic``, in a subprocess, passes a ``leaf``
that decides by algebra; the default ``leaf`` knows exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal, TypeAlias

from covey_verify.mathematics.chains import (
    assigned_name,
    assigned_value,
    chain_values,
    is_approximation,
    is_name,
    joined_otherwise,
    main_value,
    only_variable,
    solutions,
)
from covey_verify.mathematics.exact import exact
from covey_verify.mathematics.rational import constant, proportional
from covey_verify.mathematics.regions import NoRegion, Region, combine_regions, complement, inequality, region
from covey_verify.mathematics.tree import (
    FLIPPED,
    STRUCTURES,
    Node,
    in_radians,
    name,
    negative,
    number,
    product,
    quotient,
    with_products,
)
from covey_verify.mathematics.units import POUND, UNKNOWN
from covey_verify.mathematics.vocabulary import is_letters

Percent = Literal["ignored", "hundredths"]
Ratio = Literal["exact", "fraction"]
Reading = Literal["complex", "real"]
TRUTHS = frozenset({"t", "f", "true", "false", "yes", "no"})
"""Words of answers to questions: a list of them answers several questions, in order."""
VECTORS = ("i", "j", "k", "imath", "jmath", "k")
"""Names of unit vectors, perhaps with a hat."""
STATEMENTS = {"dne": "does not exist", "infinitely many": "infinitely many solutions"}
"""Short forms of answers in words."""
Leaf: TypeAlias = Callable[[Node, Node, bool], bool | None]
"""(reference, answer, whether a multiple is enough) -> whether two formulas are equal."""


class Comparison:
    """Compares a reference answer with an answer; ``reason`` then says why they differ."""

    def __init__(self, leaf: Leaf = exact, percent: Percent = "ignored", ratio: Ratio = "exact") -> None:
        self.leaf = leaf
        self.percent = percent
        self.ratio = ratio
        self.reason = ""

    def no(self, reason: str) -> bool:
        """Return False, and keep the first reason."""
        self.reason = self.reason or reason
        return False

    def compare(self, ours: Node, theirs: Node) -> bool | None:
        """Return whether two answers are equal; None if that needs algebra."""
        if ours == theirs:
            return True
        if "quantity" in (ours.kind, theirs.kind):
            return self._quantities(ours, theirs)
        ours, theirs = _system(ours), _system(theirs)
        if {"text", "word"} & {ours.kind, theirs.kind}:
            return self._words(*(_clock(n) for n in (ours, theirs)))
        if _set_like(ours) or _set_like(theirs):
            pair = as_regions(ours, theirs)
            if pair is not None:
                return self._ends_agree(*pair)
        return self._structures(ours, theirs)

    def _structures(self, ours: Node, theirs: Node) -> bool | None:
        # Lists of values of one variable: `x = 1 or x = 2` against `1, 2`, but not against `y = 1, 2`.
        names = only_variable(ours), only_variable(theirs)
        other_variables = all(names) and names[0] != names[1]
        if other_variables or (not any(names) and joined_otherwise(ours, theirs)):
            return self.no("the values are joined otherwise, or belong to other variables")
        ours, theirs = solutions(ours, names[0]), solutions(theirs, names[1])
        kinds = {ours.kind, theirs.kind}
        if kinds == {"chain"}:
            return self._chains(ours, theirs)
        if "chain" in kinds:
            return self._against_chain(ours, theirs)
        if not kinds & STRUCTURES:
            return self._formulas(ours, theirs)
        vectors = [components(n) for n in (ours, theirs)]
        if "tuple" in kinds and vectors != [None, None]:  # 2i + 3j for (2, 3)
            parts = [n.parts if v is None else v for n, v in zip((ours, theirs), vectors, strict=True)]
            shorter = min(map(len, parts))
            if all(len(p) == shorter or p[shorter:] == (number(0),) for p in parts):
                return self._in_order(parts[0][:shorter], parts[1][:shorter])
        if theirs.text == "or" and theirs.kind == "set" and ours.kind not in STRUCTURES:  # 3/4 or 0.75
            return all_true([self.compare(ours, part) for part in theirs.parts])
        return self._kinds(ours, theirs, kinds)

    def _kinds(self, ours: Node, theirs: Node, kinds: set[str]) -> bool | None:
        """Compare two structures, or a structure with a formula."""
        if "ratio" in kinds:
            return self._ratios(ours, theirs)
        if kinds == {"list", "tuple"} and {"[)", "(]"}.isdisjoint((ours.text, theirs.text)):  # 3,1 for (3,1)
            return self._in_order(ours.parts, theirs.parts)
        if kinds == {"list"} and all(fold_words(p.text) in TRUTHS for n in (ours, theirs) for p in n.parts):
            return self._in_order(ours.parts, theirs.parts)
        if kinds <= {"list", "set"} or kinds in ({"union"}, {"intersection"}):
            if all(map(assigned_value, ours.parts)) and not any(map(assigned_value, theirs.parts)):
                return self._in_order(ours.parts, theirs.parts)  # x=1, y=2 is not 2, 1
            return self._in_any_order(ours.parts, theirs.parts)
        if kinds == {"modulo"}:
            return self._congruent(ours, theirs)
        if kinds == {"piecewise"}:
            return self._cases(ours, theirs)
        if len(kinds) == 1 and ours.kind in ("tuple", "matrix", "based", "difference", "builder"):
            return self._compare_in_order(ours, theirs)
        return self._decimal_comma(ours, theirs) or self.no(f"a {_title(theirs)} for a {_title(ours)}")

    # ---- leaves

    def _formulas(self, ours: Node, theirs: Node) -> bool | None:
        verdict = self.leaf(with_products(ours, theirs, only_sums=True), with_products(theirs, ours), False)
        return verdict if verdict is not False else self.no("the values differ")

    def _decimal_comma(self, ours: Node, theirs: Node) -> bool:
        """Return whether one side is `3,14` with a decimal comma, read as a list, and the other 3.14."""
        for listed, plain in ((ours, theirs), (theirs, ours)):
            is_pair = listed.kind == "list" and len(listed.parts) == 2 and not listed.text
            if is_pair and plain.kind == "number":
                whole, digits = listed.parts
                if whole.kind == digits.kind == "number" and whole.text.isdigit() and digits.text.isdigit():
                    return plain.value == Fraction(f"{whole.text}.{digits.text}")
        return False

    def _words(self, ours: Node, theirs: Node) -> bool | None:
        """Compare words; a few letters (`abc`) may also be their product."""
        kinds = {ours.kind, theirs.kind}
        if kinds <= {"text", "word", "name"} and fold_words(ours.text) == fold_words(theirs.text):
            return ours.text == theirs.text or kinds != {"name"}
        if kinds == {"word"} and not (is_letters(ours.text) or is_letters(theirs.text)):
            return self.no("other words")
        products = [n.parts[0] if n.kind == "word" else n for n in (ours, theirs)]
        if theirs.kind == "text" and theirs.parts and ours.kind != "text":  # 3-2 is a subtraction left to do
            products[1] = theirs.parts[0]
        if any(p.kind in ("text", "list", "set", "tuple") for p in products):
            return self.no("other words")
        return self.compare(products[0], products[1])

    def _quantities(self, ours: Node, theirs: Node) -> bool | None:
        """Compare amounts with units (`5` may answer `5 cm`, `500 cm` may answer `5 m`) or percent signs."""
        units = [n.text if n.kind == "quantity" else "" for n in (ours, theirs)]
        if "percent" in units:
            return self._percentages(ours, theirs, units)
        if units[1][:2] == UNKNOWN and units[0] != units[1]:
            return self.no(f"the words {units[1].removeprefix(UNKNOWN)!r}")
        if set(units) == {"degree", "rad"}:
            angles = [in_radians(n) if n.text == "degree" else n.parts[0] for n in (ours, theirs)]
            return self.compare(angles[0], angles[1])
        if set(units) == {"sterling", "kg"} and {ours.value, theirs.value} == {1, POUND}:
            units = ["pound", "pound"]  # £5 and 5 pounds
            theirs = Node("quantity", theirs.parts, "pound", ours.value)
        if all(units) and units[0] != units[1]:
            return self.no(f"the unit is {units[1]}, not {units[0]}")
        if not all(units):
            return self._one_unit(ours, theirs, units)
        if ours.value == theirs.value:
            return self.compare(ours.parts[0], theirs.parts[0])
        amounts = [product(number(n.value or 1), n.parts[0]) for n in (ours, theirs)]
        return self.compare(amounts[0], amounts[1])

    def _one_unit(self, ours: Node, theirs: Node, units: Sequence[str]) -> bool | None:
        """Compare two amounts of which one has a unit, or neither."""
        # `8 h` may be a product, if nothing else shows that it has a unit.
        maybe_product = ours if units[0] else theirs
        other = theirs if units[0] else ours
        if len(maybe_product.parts) == 2 and any(n.kind == "name" for n in other.walk()):
            return self.compare(*(n.parts[1] if n is maybe_product else n for n in (ours, theirs)))
        amounts = [n.parts[0] if n.kind == "quantity" else n for n in (ours, theirs)]
        if "degree" not in units:
            return self.compare(amounts[0], amounts[1])
        angles = [in_radians(n) for n in (ours, theirs)]
        return any_true((self.compare(*amounts), self.compare(*angles)))

    def _percentages(self, ours: Node, theirs: Node, units: Sequence[str]) -> bool | None:
        amounts = [n.parts[0] if n.kind == "quantity" else n for n in (ours, theirs)]
        if {*units} - {"", "percent"}:
            return self.no(f"the unit is {units[1]}, not {units[0]}")
        if self.percent == "hundredths":
            pairs = zip(amounts, units, strict=True)
            amounts = [hundredth(a) if unit else a for a, unit in pairs]
        elif not units[0]:
            # 0.5 % for 0.5: a reference between -1 and 1 is a share more often than a percentage.
            size = constant(amounts[0])
            if size is None or 0 < abs(size) <= 1:
                return self.no("a percentage for what may be a share; percent: hundredths compares the two")
        return self.compare(amounts[0], amounts[1])

    # ---- parts

    def _compare_in_order(self, ours: Node, theirs: Node) -> bool | None:
        """Compare two structures of one kind whose parts have an order."""
        if (ours.text, ours.value) != (theirs.text, theirs.value):
            return self.no("other brackets, another base or another shape")
        return self._in_order(ours.parts, theirs.parts)

    def _in_order(self, ours: Sequence[Node], theirs: Sequence[Node]) -> bool | None:
        if len(ours) != len(theirs):
            return self.no(f"{len(theirs)} values, not {len(ours)}")
        return all_true([self.compare(a, b) for a, b in zip(ours, theirs, strict=True)])

    def _in_any_order(self, ours: Sequence[Node], theirs: Sequence[Node]) -> bool | None:
        """Return whether every element has an equal on the other side."""
        verdict: bool | None
        if ours and theirs:
            table = [[self.compare(a, b) for b in theirs] for a in ours]
            columns = zip(*table, strict=True)
            verdict = all_true([any_true(row) for row in (*table, *columns)])
        else:
            verdict = not ours and not theirs
        self.reason = "" if verdict else "other values"
        return verdict

    def _ratios(self, ours: Node, theirs: Node) -> bool | None:
        """Compare ratios: as fractions 2:4 is 1:2, and 4:3 is 4/3."""
        if self.ratio == "exact":
            verdict = ours.kind == theirs.kind and self._in_order(ours.parts, theirs.parts)
            self.reason = "" if verdict else "another ratio; ratio: fraction compares 2:4 with 1:2"
            return verdict
        if ours.kind == theirs.kind:
            first = ours.parts[0], theirs.parts[0]
            if len(ours.parts) != len(theirs.parts):
                return self.no("ratios of different lengths")
            pairs = zip(ours.parts[1:], theirs.parts[1:], strict=True)
            return all_true([self.compare(product(a, first[1]), product(b, first[0])) for a, b in pairs])
        ratio, quantity = (ours, theirs) if ours.kind == "ratio" else (theirs, ours)
        if len(ratio.parts) != 2 or quantity.kind in STRUCTURES:
            return self.no("a ratio of several terms is not a number")
        value = quotient(*ratio.parts)
        return self.compare(value, quantity) if ratio is ours else self.compare(quantity, value)

    def _congruent(self, ours: Node, theirs: Node) -> bool | None:
        """Compare classes modulo a number: 3 is 10 modulo 7."""
        our_value, our_modulus = (constant(part) for part in ours.parts)
        their_value, their_modulus = (constant(part) for part in theirs.parts)
        if our_modulus != their_modulus:
            return self.no("another modulus")
        if our_value is None or their_value is None or not our_modulus:
            return self._in_order(ours.parts, theirs.parts)
        quotient = (our_value - their_value) / our_modulus
        return quotient.denominator == 1 or self.no("not congruent")

    def _cases(self, ours: Node, theirs: Node) -> bool | None:
        """Compare functions by cases: each condition holds for the same numbers and has the same value."""
        if len(ours.parts) != len(theirs.parts):
            return self.no("another number of cases")
        our_cases, their_cases = (
            list(zip(n.parts[::2], _conditions(n), strict=True)) for n in (ours, theirs)
        )
        rows = []
        for our_value, our_condition in our_cases:
            verdicts = [
                all_true([self._conditions_agree(our_condition, condition), self.compare(our_value, value)])
                for value, condition in their_cases
            ]
            rows.append(any_true(verdicts))
        return all_true(rows)

    def _conditions_agree(self, ours: Node | Region, theirs: Node | Region) -> bool | None:
        if isinstance(ours, Region) and isinstance(theirs, Region):
            return self._ends_agree(ours, theirs)
        if isinstance(ours, Node) and isinstance(theirs, Node):
            return self.compare(ours, theirs)
        return False

    def _ends_agree(self, ours: Region, theirs: Region) -> bool | None:
        if ours.variable and theirs.variable and ours.variable != theirs.variable:
            return self.no(f"about {theirs.variable}, not {ours.variable}")
        if ours.cells != theirs.cells:
            return self.no("another set of numbers")
        return self._in_order(ours.ends, theirs.ends)

    # ---- relations

    def _consistent(self, answer: Node, values: Sequence[tuple[Node, str]]) -> bool | None:
        """Return whether all relations of a chain hold for its value: they do not in `x = 2 = 3`."""
        exactly = [v for v, mark in values if mark == "="]
        results = [self.compare(v, answer) or self.compare(answer, v) for v in exactly if v != answer]
        results += [is_approximation(answer, value) for value, mark in values if mark == "≈"]
        self.reason = "a member of the chain is false" if False in results else ""
        return all_true(results)

    def _against_chain(self, ours: Node, theirs: Node) -> bool | None:
        """Compare a value or a set with a chain of relations."""
        if theirs.kind == "chain":
            values = chain_values(theirs, named=True)
            if values is None:
                return self.no("a relation for a value")
            value = main_value(values)
            return all_true([self._consistent(value, values), self.compare(ours, value)])
        values = chain_values(ours, named=False)
        return self.compare(main_value(values), theirs) if values else self.no("a value for a relation")

    def _chains(self, ours: Node, theirs: Node) -> bool | None:
        values = chain_values(ours, named=False), chain_values(theirs, named=False)
        if values[0] and values[1] and assigned_name(ours) == assigned_name(theirs):
            value = main_value(values[1])
            return all_true([self._consistent(value, values[1]), self.compare(main_value(values[0]), value)])
        # `1 < x` says the same as `x > 1`.
        marks = tuple(FLIPPED.get(mark, mark) for mark in reversed(theirs.marks))
        backwards = Node("chain", theirs.parts[::-1], marks=marks)
        results = [self._in_order(ours.parts, t.parts) for t in (theirs, backwards) if t.marks == ours.marks]
        if True in results:
            return True
        if len(ours.marks) == len(theirs.marks) == 1 and not _sides(ours, theirs) & STRUCTURES:
            return self._relations(ours, theirs)
        return None if None in results else self.no("another relation")

    def _relations(self, ours: Node, theirs: Node) -> bool | None:
        """Return whether relations are equivalent: b - a < 0, d - c < 0 if one difference is a multiple."""
        if ours.marks[0] not in "=≠<>≤≥" or theirs.marks[0] not in "=≠<>≤≥":
            return self.no("another relation")
        apart = [Node("sum", (n.parts[0], negative(n.parts[1]))) for n in (ours, theirs)]
        if ours.marks[0] in "=≠" or theirs.marks[0] in "=≠":
            if ours.marks != theirs.marks:
                return self.no("another relation")
            verdict = self.leaf(apart[0], apart[1], True)
            return verdict if verdict is not False else self.no("another relation")
        factor = proportional(apart[0], apart[1])
        if factor is None or not factor:
            return self.no("another relation, or a relation that is not rational")
        mark = theirs.marks[0] if factor > 0 else FLIPPED[theirs.marks[0]]
        return mark == ours.marks[0] or self.no("another relation")


def components(node: Node) -> tuple[Node, ...] | None:
    """Return the three components of a sum of multiples of the unit vectors i, j and k, or None.

    A multiple of i alone, without an accent, is a complex number.
    """
    sums = [number(0)] * 3
    names = set[str]()
    for term in node.parts if node.kind == "sum" else (node,):
        factors = term.parts if term.kind == "product" else (term,)
        vectors = [f for f in factors if f.kind == "name" and f.text.rpartition(" ")[2] in VECTORS]
        if len(vectors) != 1:
            return None
        names.add(vectors[0].text)
        index = VECTORS.index(vectors[0].text.rpartition(" ")[2]) % 3
        others = [f for f in factors if f is not vectors[0]]
        sums[index] = Node("sum", (sums[index], product(*others) if others else number(1)))
    return None if names == {"i"} else tuple(sums)


def hundredth(node: Node) -> Node:
    """Return a percentage as a number."""
    return number(node.value / 100) if node.value is not None else quotient(node, number(100))


def all_true(results: Sequence[bool | None]) -> bool | None:
    """Return whether all are true; None if that is not known."""
    if False in results:
        return False
    return None if None in results else True


def any_true(results: Sequence[bool | None]) -> bool | None:
    """Return whether some result is true; None if that is not known."""
    if True in results:
        return True
    return None if None in results else False


def fold_words(text: str) -> str:
    """Return words without the differences that do not matter."""
    words = " ".join(text.casefold().strip(" .()").split())
    return STATEMENTS.get(words, words.removesuffix("s") if words.startswith("no ") else words)


def _title(node: Node) -> str:
    return node.kind if node.kind in STRUCTURES else "number or formula"


def _sides(*chains: Node) -> set[str]:
    return {part.kind for chain in chains for part in chain.parts}


def _set_like(node: Node) -> bool:
    """Return whether a node is a set of numbers that has several forms."""
    if node.kind in ("union", "intersection", "difference", "builder") or node == name("ℝ"):
        return True
    return inequality(node) or (node.kind == "chain" and node.marks == ("∈",))


def as_regions(ours: Node, theirs: Node) -> tuple[Region, Region] | None:
    """Return two nodes as sets of real numbers; None if they are not both such sets."""
    try:
        return region(ours), region(theirs)
    except NoRegion:
        return None


def _system(node: Node) -> Node:
    """Return (x, y) = (1, 2) as the system x = 1, y = 2, and a union of finite sets as one set."""
    if node.kind == "chain" and node.marks == ("=",):
        left, right = node.parts
        both_tuples = left.kind == right.kind == "tuple" and len(left.parts) == len(right.parts)
        if both_tuples and all(map(is_name, left.parts)):
            pairs = zip(left.parts, right.parts, strict=True)
            return Node("list", tuple(Node("chain", pair, marks=("=",)) for pair in pairs), "and")
    if node.kind == "chain" and node.marks == ("∈",):
        variable, values = node.parts
        if values.kind == "set" and values.parts and is_name(variable):
            equations = tuple(Node("chain", (variable, value), marks=("=",)) for value in values.parts)
            return Node("list", equations, "or") if len(equations) > 1 else equations[0]
    if node.kind == "union" and all(part.kind == "set" for part in node.parts):
        return Node("set", tuple(element for part in node.parts for element in part.parts))
    return node


def _clock(node: Node) -> Node:
    """Return 15:30, which was read as a ratio, as the time of day."""
    if node.kind != "ratio" or not all(p.kind == "number" and p.text.isdigit() for p in node.parts):
        return node
    hour, minute, *second = (p.text for p in node.parts)
    return Node("text", text=f"clock {int(hour)}:{minute}:{''.join(second) or '00'}")


def _conditions(cases: Node) -> list[Node | Region]:
    """Return the conditions of a function by cases as sets of numbers, if all of them are."""
    conditions = cases.parts[1::2]
    try:
        regions = [region(c) for c in conditions if c.text != "otherwise"]
        if len(regions) < len(conditions) - 1:
            raise NoRegion
        nothing = Region((), (False,))
        rest = complement(combine_regions("union", [nothing, *regions]))
        return [rest if c.text == "otherwise" else region(c) for c in conditions]
    except NoRegion:
        return list(conditions)
