r"""The reader of answers: from a text to a typed tree. Nothing here evaluates anything.

This module reads what is around formulas: lists, relations, sets, intervals, matrices, cases, words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from covey_verify.mathematics.cursor import END, format_token
from covey_verify.mathematics.formulas import Formulas
from covey_verify.mathematics.magnitude import approximate
from covey_verify.mathematics.phrases import moment, value_of_word
from covey_verify.mathematics.rational import constant
from covey_verify.mathematics.tokens import Token, currency, tokens
from covey_verify.mathematics.tree import (
    MAX_DIGITS,
    RELATIONS,
    STRUCTURES,
    Node,
    TooLarge,
    Unreadable,
    determinant_of,
    name,
    number,
    product,
    quotient,
    too_large,
)
from covey_verify.mathematics.vocabulary import KNOWN, is_letters, is_product

CODE = re.compile(r"\d+(?:(?:-\d+){2,}|(?:/\d+){2,}|(?:\.\d+){2,})")
"""A date, a telephone number, an address or a version, none of which is a calculation."""
DIFFERENCE = re.compile(r"\d+-\d+")
"""As a reference answer this is a range, a score or a telephone number, never a subtraction left to do."""
BASED = re.compile(r"\(?([0-9A-Fa-f]*\d[0-9A-Fa-f]*|\d+)\)?_\{?(\d+|[a-z]+)\}?")
"""A number with its base: 1011_2, 2F_{16}, (1011)_{two}."""
OPTION = re.compile(r"\(?([A-Z])\)")
MATRICES = frozenset({*(f"{bracket}matrix" for bracket in ("", *"pbBvV", "small")), "array"})
SYSTEMS = frozenset({"cases", "dcases", "rcases", "aligned", "align", "gathered", "gather", "split", "array"})
CONDITION = re.compile(r"(?:if|for|when|where|wenn|falls|当|若) ?")
OTHERWISE = re.compile(
    r"(?:otherwise|else|in all other cases|for all other \w+|sonst|其他|其它)\.?", re.IGNORECASE
)


@lru_cache(4096)
def read_answer(text: str) -> Node:
    r"""Return the tree of an answer. Raises Unreadable, TooLarge.

    >>> read_answer(r"\{1, 2\}").kind, read_answer("[0, 1)").text
    ('set', '[)')
    >>> read_answer("x = 3").marks, read_answer(r"\frac12 \text{ cm}").text
    (('=',), 'm')
    """
    if too_large(text):
        raise TooLarge("longer, deeper or with longer numbers than any answer")
    sequence = tokens(text)
    if not sequence:
        raise Unreadable("there is nothing")
    node = _code("".join(t.text for t in sequence)) or Reader(sequence).whole()
    money = currency(text)
    if money and node.kind not in (*STRUCTURES, "quantity"):
        node = Node("quantity", (node,), money, Fraction(1))
    approximate(node)  # raises TooLarge
    below = [part.parts[0] for part in node.walk() if part.kind == "inverse"]
    if any(approximate(part) == 0 == constant(part) for part in below):
        raise Unreadable("a division by zero")
    return node


def plain_number(text: str) -> Fraction | None:
    r"""Return the exact value of a number as people write it, or None.

    >>> [str(plain_number(t)) for t in ("1,000", "$6.00", "0.5", r"\frac12", "-3", "42.", "3 apples", "1+1")]
    ['1000', '6', '1/2', '1/2', '-3', '42', 'None', 'None']
    """
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return Fraction(int(text))
    try:
        node = read_answer(text)
    except (Unreadable, TooLarge):
        return None
    if node.kind == "quantity" and node.text in ("percent", currency(text)):
        node = node.parts[0]
    numerals = all(part.kind in ("number", "inverse", "product") for part in node.walk())
    return constant(node) if numerals and len(node.parts) < 3 else None


class Reader(Formulas):
    """Reads tokens into the tree of an answer."""

    def elements(self, allowed: Sequence[str]) -> Node:
        """Read a list: one element, or several with separators between."""
        self.deeper()
        parts: list[Node] = []
        words: set[str] = set()
        while not self._closes() or (not parts and self.is_sign("]")):
            element = self.element()
            # \pm 1, \pm 2 are four values; a list in a list is flat.
            parts += element.parts if element.kind == "list" and not element.text else [element]
            if self.peek().kind not in ("separator", "row"):
                break
            while self.peek().kind in ("separator", "row"):
                word = self.take().text
                if word not in (*allowed, "row"):
                    raise Unreadable(f"{word!r} inside brackets")
                words |= {word} & {"and", "or"}
        self.level -= 1
        if not parts:
            raise Unreadable("there is nothing")
        if len(words) > 1:
            raise Unreadable("both 'and' and 'or'")
        node = parts[0] if len(parts) == 1 and not words else Node("list", tuple(parts), "".join(words))
        if self.peek().kind == "command" and self.peek().text in ("choose", "over"):
            choose = self.take().text == "choose"
            below = self.elements(allowed=())
            node = Node("call", (node, below), "binomial") if choose else quotient(node, below)
        return node

    def _closes(self) -> bool:
        token = self.peek()
        return token.kind == "end of text" or token.text in (")", "]", "}", r"\}", "⟩")

    # ---- one element: words, or a chain of relations

    def element(self) -> Node:
        """Read one element between separators."""
        node = self.statement()
        if self.peek().kind == "word":
            raise Unreadable(f"{self.peek().text!r} after the answer")
        return node

    def _words(self) -> Node | None:
        """Read a side that has only words; None if it is a formula."""
        count = 0
        while self.peek(count).kind in ("letters", "word") or (count and self.is_sign(".'-", count)):
            count += 1
        after = self.peek(count)
        ends = after.kind in ("end of text", "separator", "row") or after.text in (*RELATIONS, *"})]&", r"\}")
        node = _text([self.peek(k) for k in range(count)]) if count and ends else None
        if node is not None:
            self.remaining = self.remaining[: len(self.remaining) - count]
        return node

    def statement(self) -> Node:
        """Read a chain of relations, or one side alone."""
        sides = [self._named_function() or self._words() or self.side()]
        marks: list[str] = []
        while self.peek().kind == "sign" and self.peek().text in RELATIONS:
            marks.append(self.take().text)
            sides.append(self._words() or self.side())
        if self.peek() == Token("command", "notin", self.peek().gap):
            raise Unreadable("what is not in a set")
        node = sides[0] if not marks else Node("chain", tuple(sides), marks=tuple(marks))
        modulus = self._modulus()
        return node if modulus is None else Node("modulo", (sides[-1], modulus))

    def _named_function(self) -> Node | None:
        """Read f(x), or the name of a probability, if nothing else comes before `=`."""
        token = self.peek()
        depth = 0
        # f^{-1}(x) is a name too.
        begin = 6 if "".join(self.peek(k).text for k in range(1, 6)) == "^{-1}" else 1
        if token.kind not in ("letters", "command") or len(token.text) > 1 or not self.is_sign("(", begin):
            return None
        for k in range(begin, len(self.remaining)):
            text = self.peek(k).text
            depth += (text in ("(", r"\{")) - (text in (")", r"\}"))
            if depth == 0:
                if not self.is_sign("=", k + 1):
                    return None
                written = "".join(self.take().text for _ in range(k + 1))
                return Node("apply", (name(written),), written)
        return None

    def _modulus(self) -> Node | None:
        r"""Read `\pmod n`, `\mod n` or `(mod n)` after a number or a congruence."""
        token = self.peek()
        if token.kind == "command" and token.text in ("pmod", "mod"):
            self.take()
            return self.argument() if self.is_sign("{") else self.factor()
        inside = self.peek(1)
        if (
            token.text == "("
            and inside.text in ("mod", "bmod")
            and inside.kind in ("letters", "command", "word")
        ):
            self.take()
            self.take()
            node = self.sum()
            self.expect(")")
            return node
        return None

    def side(self) -> Node:
        """Read one side of a relation, with both values of a ±."""
        start = list(self.remaining)
        outer = self.sign
        doubled, self.doubled = self.doubled, False
        node = self.union()
        if self.doubled and self.level <= self.outermost + 2:
            outer_tokens = self.remaining
            self.remaining = start
            self.sign = -outer
            other = self.union()
            self.remaining = outer_tokens
            self.sign = outer
            node = Node("list", (node, other))
        self.doubled |= doubled
        return node

    def union(self) -> Node:
        """Read sets that are joined."""
        node = self.ratio()
        kinds = {"∪": "union", "∩": "intersection", "∖": "difference", "-": "difference"}
        while self.peek().kind == "sign" and self.peek().text in kinds:
            kind = kinds[self.take().text]
            parts = node.parts if node.kind == kind != "difference" else (node,)
            if node.kind in kinds.values() and node.kind != kind:
                raise Unreadable("different operations on sets without parentheses")
            node = Node(kind, (*parts, self.ratio()))
        return node

    def ratio(self) -> Node:
        """Read a ratio, or one term."""
        terms = [self.sum()]
        while (self.is_sign(":") and ":" not in self.until) or self.is_to():
            self.take()
            terms.append(self.sum())
        return terms[0] if len(terms) == 1 else Node("ratio", tuple(terms))

    # ---- brackets

    def group(self) -> Node:
        """Read the contents of TeX's braces."""
        until, self.until = self.until, frozenset()
        node = self.elements(allowed=(",", ";", "and", "or"))
        self.until = until
        self.expect("}")
        return as_product(node)

    def bracket(self, opening: str) -> Node:
        """Read a group, a tuple or an interval, up to its closing bracket."""
        until, self.until = self.until, frozenset()
        bars, self.bars = self.bars, 0
        node = self.elements(allowed=(",", ";", "and"))
        self.until = until
        self.bars = bars
        closing = self.take().text
        if closing not in ((")", "]", "[") if opening != "⟨" else ("⟩",)):
            raise Unreadable(f"{opening} is not closed")
        if node.kind != "list":
            if (opening, closing) == ("(", ")") or node.kind == "matrix":
                return as_product(node)
            return Node("tuple", (node,), opening + closing)
        return Node("tuple", node.parts, ("[" if opening == "[" else "(") + ("]" if closing == "]" else ")"))

    def braces(self) -> Node:
        r"""Read a set: its elements, or its builder, or the system after `\left\{`."""
        if self.take_sign(r"\}"):
            return Node("set")
        if self.peek().kind == "begin":
            system = self.environment(system=True)
            self.take_sign(r"\}")
            return system
        until, self.until = self.until, frozenset({"|", ":", "∣"})
        doubled = self.doubled
        outermost, self.outermost = self.outermost, self.level
        node = self.elements(allowed=(",", ";", "and"))
        self.doubled = doubled
        self.outermost = outermost
        if self.peek().text in ("|", ":", "∣"):
            self.take()
            self.until = frozenset()
            condition = self.elements(allowed=(",", ";", "and", "or"))
            node = Node("builder", (node, condition))
        elif node.kind == "list":
            node = Node("set", node.parts)
        else:
            node = Node("set", (node,))
        self.until = until
        self.expect(r"\}")
        return node

    # ---- matrices and cases

    def environment(self, *, system: bool = False) -> Node:
        """Read a matrix, a system or a function by cases."""
        kind = self.take().text
        if kind == "array" and self.take_sign("{"):
            while self.peek() != END and not self.take_sign("}"):
                self.take()
        rows = self._rows(kind)
        if kind in SYSTEMS and (kind != "array" or system):
            return _system(rows, self.level)
        if kind not in MATRICES:
            raise Unreadable(f"the environment {kind} is unknown")
        cells = tuple(type(self)(cell, level=self.level).whole() for row in rows for cell in row)
        if not rows or any(len(row) != len(rows[0]) for row in rows):
            raise Unreadable("a matrix with rows of different lengths")
        matrix = Node("matrix", cells, "V" if kind[0] == "V" else "", Fraction(len(rows)))
        return determinant_of(matrix) if kind == "vmatrix" else matrix

    def _rows(self, kind: str) -> list[list[list[Token]]]:
        """Take the tokens of each cell of each row, up to the end of the environment."""
        rows: list[list[list[Token]]] = [[[]]]
        depth = 0
        while True:
            token = self.take()
            if token == END:
                raise Unreadable(f"the environment {kind} does not end")
            if token.kind == "end" and depth == 0:
                break
            depth += (token.kind == "begin") - (token.kind == "end")
            if token.kind == "row" and depth == 0:
                rows.append([[]])
            elif token.text == "&" and depth == 0:
                rows[-1].append([])
            else:
                rows[-1][-1].append(token)
        return [row for row in rows if any(row)]

    def whole(self) -> Node:
        """Read all tokens as one answer."""
        if len(self.remaining) == 1:
            return Node("opaque")
        node = self.elements(allowed=(",", ";", "and", "or"))
        if self.peek() != END:
            raise Unreadable(f"unexpected {format_token(self.peek())}")
        return node


def as_product(node: Node) -> Node:
    r"""Return letters in brackets, such as AB in |AB|, as the product of these letters."""
    if node.kind == "word":
        return node.parts[0]
    letters = node.text if node.kind == "text" and node.text.isascii() and node.text.isalpha() else ""
    if (letters.isupper() and len(letters) < 4) or (len(letters) < 5 and not set(letters) & set("aeiou")):
        return product(*map(name, letters)) if letters else node  # GMm
    return node


def _system(rows: Sequence[Sequence[list[Token]]], level: int) -> Node:
    """Return the relations of a system, all of which hold, or a function by cases."""
    if not rows:
        raise Unreadable("cases without a row")
    cases = [_case(row, level) for row in rows]
    parts = tuple(part for case in cases for part in case)
    if all(len(case) == 1 for case in cases):
        return Node("list", parts, "and") if len(parts) > 1 else parts[0]
    if any(len(case) == 1 for case in cases):
        raise Unreadable("cases with and without conditions")
    return Node("piecewise", parts)


def _case(row: Sequence[list[Token]], level: int) -> list[Node]:
    """Return a row as its value and its condition, or as one node if it has no condition."""
    cells = [cell for cell in row if cell]
    first = cells[0]
    second = cells[1] if len(cells) > 1 else []
    # A second cell that begins with a relation continues the first: `x &= 2`.
    aligned = bool(second) and second[0].text in RELATIONS
    if second and not aligned:
        condition = [token for cell in cells[1:] for token in cell]
        return [Reader(_without_comma(first), level=level).whole(), _condition(condition, level)]
    split = next((k for k, token in enumerate(first) if k and _is_condition(token)), None)
    if split is not None and not aligned:
        value = _without_comma(first[:split])
        return [Reader(value, level=level).whole(), _condition(first[split:], level)]
    tokens = [token for cell in cells for token in cell]
    return [Reader(_without_comma(tokens), level=level).whole()]


def _is_condition(token: Token) -> bool:
    if token.kind not in ("word", "letters"):
        return False
    return bool(CONDITION.match(token.text) or OTHERWISE.fullmatch(token.text))


def _without_comma(cell: list[Token]) -> list[Token]:
    while cell and cell[-1].text in (",", ";", "."):
        cell = cell[:-1]
    return cell


def _condition(cell: list[Token], level: int) -> Node:
    """Return the condition of a case; `otherwise` as a text."""
    cell = _without_comma(cell)
    written = " ".join(t.text for t in cell)
    if OTHERWISE.fullmatch(written):
        return Node("text", text="otherwise")
    opening = CONDITION.match(cell[0].text) if cell and cell[0].kind in ("word", "letters") else None
    if opening:
        first, *others = cell
        rest = first.text[opening.end() :]
        cell = [Token(first.kind, rest), *others] if rest else others
    return Reader(cell, level=level).whole()


def _code(plain: str) -> Node | None:
    """Return a date, a number with its base, or an option; None if it is none of them."""
    if option := OPTION.fullmatch(plain):
        return name(option[1])
    if based := BASED.fullmatch(plain):
        base = int(value_of_word(based[2]) or 0) if len(based[2]) < 3 or based[2].isalpha() else 0
        if not 1 < base <= 36 or any(int(digit, 36) >= base for digit in based[1]):
            return None
        return number(int(based[1])) if base == 10 else Node("based", text=based[1], value=Fraction(base))
    if written := moment(plain.casefold()):
        return Node("text", text=written)
    if CODE.fullmatch(plain):
        return Node("text", text=re.sub(r"\b0+(?=\d)", "", plain))
    if DIFFERENCE.fullmatch(plain):
        first, _, second = plain.partition("-")
        return Node("text", (number(int(first) - int(second)),), plain)
    return None


def _text(span: Sequence[Token]) -> Node | None:
    """Return words as a text, a few letters as a word or product, or None: it is a formula."""
    words = [t.text for t in span if t.kind in ("letters", "word")]
    text = "".join((" " if t.gap else "") + t.text for t in span).strip(" .!?")
    if len(span) == 1 and len(words[0]) == 1:
        return None
    if text.casefold() in ("all real numbers", "all reals"):
        return name("ℝ")
    if (value := value_of_word(text.casefold())) is not None:
        return number(value)
    option = OPTION.fullmatch(text) if len(span) == 1 and span[0].kind == "word" else None
    if option:
        return name(option[1])
    if len(words) < len(span) and max(map(len, words)) < 5:
        return None  # x-y, f'
    if all(t.kind in ("letters", "sign") for t in span):
        letters = [len(word) == 1 or is_letters(word) for word in words]
        if all(letters[1:]) and (words[0] in KNOWN or (letters[0] and len(words) > 1)):
            return None
        if len(span) == 1 and is_product(text):
            return Node("word", (product(*map(name, text)),), text)
    return Node("text", text=text)
