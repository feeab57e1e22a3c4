r"""The reader of formulas: a recursive descent over tokens, by the rules of TeX and of printed mathematics.

An argument without braces is one digit, one letter or one command, as TeX has it: `\frac1n`, `\sqrt\frac12`.
Whatever may mean two things (`a/bc`) is unreadable, and the reason says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from covey_verify.mathematics.cursor import END, MAX_LEVEL, format_token
from covey_verify.mathematics.measures import Measures
from covey_verify.mathematics.tokens import Token, value_of
from covey_verify.mathematics.tree import (
    INFINITY,
    PI,
    Node,
    TooLarge,
    Unreadable,
    combine_parts,
    matrix_power,
    name,
    negate,
    negative,
    number,
    quotient,
    transpose,
)
from covey_verify.mathematics.vocabulary import (
    APPLIED,
    FRACTIONS,
    INFINITE,
    NO_FACTORS,
    PLAIN,
    SHORT_WORDS,
)


class Formulas(Measures):
    """Reads sums, products, powers, numbers and names."""

    # ---- sums and products

    def sum(self) -> Node:
        """Read a sum."""
        self.deeper()
        terms = [self.read_signed()]
        while self.is_sign("+-±∓") and not (self.is_sign("-") and self.peek(1).text == r"\{"):
            terms.append(self.read_signed())
        self.level -= 1
        return combine_parts("sum", terms)

    def read_signed(self) -> Node:
        """Read a term with the signs before it."""
        minus = False
        for _ in range(3):
            if self.is_sign("±∓"):
                self.doubled = True
                minus ^= (self.take().text == "±") == (self.sign < 0)
            elif self.is_sign("+-"):
                minus ^= self.take().text == "-"
        node = self.term()
        return negate(node) if minus else node

    def term(self) -> Node:
        """Read a product, with the unit after it."""
        factors = [self.factor()]
        while True:
            token = self.peek()
            last = factors[-1]
            if self.is_sign("*/×"):
                self.take()
                factor = self.signed_factor()
                if token.text == "×" and last.text.startswith("vec ") and factor.text.startswith("vec "):
                    raise Unreadable("a product of vectors")
                if token.text == "/":
                    self._no_doubt(factors, factor)
                    factor = Node("inverse", (factor,))
                factors.append(factor)
            elif token.kind == "command" and token.text in ("bmod", "mod"):
                self.take()
                factors = [Node("call", (combine_parts("product", factors), self.signed_factor()), "mod")]
            elif self.is_sign("%"):
                self.take()
                share = combine_parts("product", factors)
                if not self.is_sign("*/×"):
                    return Node("quantity", (share,), "percent")
                factors = [quotient(share, number(100))]  # 50 % of something
            elif self.unit_begins(factors):
                return self.with_smaller(self.quantity(combine_parts("product", factors)))
            elif self.starts_factor():
                if last.kind == "quantity":
                    raise Unreadable(f"{format_token(token)} after {last.text}")
                if token.kind == "number" and last.kind in ("number", "name"):
                    raise Unreadable(f"a number directly after {last.text or 'another'}")
                factors.append(self.factor())
            else:
                return combine_parts("product", factors)

    def _no_doubt(self, before: Sequence[Node], divisor: Node) -> None:
        """Refuse a/bc, which may be (a/b)c or a/(bc), unless a and b are numbers."""
        plain = divisor.kind == "number" and all(f.kind in ("number", "inverse") for f in before)
        if not plain and self.starts_factor() and not self.unit_begins([*before, divisor]):
            raise Unreadable("a/bc may mean (a/b)c or a/(bc)")

    def starts_factor(self) -> bool:
        """Return whether the next token begins a factor."""
        token = self.peek()
        if self.is_to():
            return False
        if token.kind == "command":
            return token.text not in NO_FACTORS
        if token.kind in ("number", "letters", "word", "begin"):
            return True
        if token.text == "[":
            # The second bracket of [0, 1[ ends something.
            after = self.peek(1)
            return after.kind not in ("end of text", "separator") and after.text not in ")]∪∩∖=<>≤≥*/"
        if token.text in self.until or (token.text == "(" and self.peek(1).text in ("mod", "bmod")):
            return False
        return (token.kind == "sign" and token.text in ("(", "{", "⟨", "π", "∞", "∅", "…")) or (
            token.text in ("|", "‖") and not self.bars
        )

    def signed_factor(self) -> Node:
        """Read a factor after an operator, which may have a sign."""
        if self.is_sign("+-"):
            minus = self.take().text == "-"
            node = self.factor()
            return negative(node) if minus else node
        return self.factor()

    # ---- factors

    def factor(self) -> Node:
        """Read an atom with its powers, factorials, percent and degree signs."""
        node = self.atom()
        for _ in range(MAX_LEVEL):
            if self.is_sign("^"):
                self.take()
                node = self._read_power(node)
            elif self.is_sign("!") and node.kind != "chain":
                self.take()
                double = self.take_sign("!")
                node = Node("call", (node,), "double factorial" if double else "factorial")
            elif self.is_sign("°"):
                self.take()
                scale = self.peek()
                if scale.kind in ("letters", "word") and scale.text in ("C", "F", "Celsius", "Fahrenheit"):
                    self.take()
                    node = Node(
                        "quantity", (node,), "celsius" if scale.text[0] == "C" else "fahrenheit", Fraction(1)
                    )
                else:
                    node = Node("quantity", (self.minutes(node),), "degree", Fraction(1))
            else:
                return node
        raise TooLarge("nested too deeply")

    def _read_power(self, base: Node) -> Node:
        if self.is_sign("'"):  # x^\prime
            self.take()
            return name(base.text + "'")
        exponent = self.script()
        if base.kind == "tuple" and base.text == "[]" and len(base.parts) == 1:
            base = base.parts[0]
        if base.kind == "matrix" and exponent == name("T"):
            return transpose(base)
        if base.kind == "matrix" and exponent.value in (-1, 2, 3):
            return matrix_power(base, int(exponent.value))
        return Node("power", (base, exponent))

    def script(self) -> Node:
        """Read a superscript: a group, a number, a letter or a command, with its sign."""
        self.deeper()
        if self.is_sign("+-"):
            minus = self.take().text == "-"
            node = self.script()
            self.level -= 1
            return negative(node) if minus else node
        braced = self.is_sign("{")
        if self.peek().kind == "letters" and self.peek().text not in ("pi", *PLAIN):
            node = name(self.first().text)
        elif self.peek().kind in ("number", "letters", "command", "word") or self.is_sign("{(π∞"):
            node = self.atom()
        else:
            raise Unreadable(f"no exponent before {format_token(self.peek())}")
        if not braced and self.take_sign("^"):
            node = Node("power", (node, self.script()))
        self.level -= 1
        return node

    def argument(self) -> Node:
        """Read an argument of a TeX command: a group, one digit, one letter or one command."""
        self.deeper()
        token = self.peek()
        if token.kind == "number":
            node = number(int(self.first().text))
        elif token.kind == "letters":
            node = name(self.first().text)
        elif token.kind in ("command", "word") or self.is_sign("{π∞"):
            node = self.atom()
        else:
            raise Unreadable(f"no argument before {format_token(token)}")
        self.level -= 1
        return node

    def atom(self) -> Node:
        """Read the smallest complete part."""
        self.deeper()
        token = self.peek()
        if token.kind == "number":
            node = self._number()
        elif token.kind == "letters":
            node = self._letters()
        elif token.kind == "word":
            node = self._word()
        elif token.kind == "command":
            node = self.command()
        elif token.kind == "begin":
            node = self.environment()
        else:
            node = self._signs()
        self.level -= 1
        return node

    def _signs(self) -> Node:
        token = self.take()
        if token.text == "{":
            return self.group()
        if token.text in ("(", "[", "]", "⟨"):
            return self.bracket(token.text)
        if token.text == r"\{":
            return self.braces()
        if token.text in ("|", "‖"):
            self.bars += 1
            inner = self.sum()
            self.bars -= 1
            self.expect(token.text)
            return Node("call", (inner,), "abs" if token.text == "|" else "norm")
        if token.text in ("π", "∞"):
            return PI if token.text == "π" else INFINITY
        if token.text == "∅":
            return Node("set")
        if token.text == "…":
            return Node("opaque", text="…")
        raise Unreadable(f"unexpected {format_token(token)}")

    def _number(self) -> Node:
        token = self.take()
        node = number(value_of(token.text), re.sub(r"\(.*|[eE].*", "", token.text))
        if "(" in token.text or "e" in token.text.casefold():
            node = number(value_of(token.text))
        period = re.search(r"\.\d*?(\d+?)\1{2,}$", token.text) if self.is_sign("…") else None
        if period:  # 0.333...
            self.take()
            fixed = token.text[: period.start(1)]
            return number(value_of(f"{fixed}({period[1]})"))
        if self.is_sign("_"):
            self.take()
            base = self.index()
            if not base.isdigit() or not 1 < int(base) <= 36:
                raise Unreadable(f"a number with the index {base}")
            return node if base == "10" else Node("based", text=token.text, value=Fraction(int(base)))
        return self._read_fraction(node) if token.text.isdigit() else node

    def _read_fraction(self, whole: Node) -> Node:
        r"""Read the fraction of a mixed number, 2 1/2 or 2\frac12."""
        assert whole.value is not None, "it is a number"
        first, stroke, third = (self.peek(k) for k in range(3))
        if first.kind == "number" and first.gap and stroke.text == "/" and third.kind == "number":
            if not (first.text.isdigit() and third.text.isdigit() and int(third.text)):
                raise Unreadable("two numbers side by side")
            above, _, below = self.take(), self.take(), self.take()
            return number(whole.value + Fraction(int(above.text), int(below.text)))
        if first.kind == "command" and first.text in FRACTIONS:
            before = list(self.remaining)
            self.take()
            digits = [self._digits(), self._digits()]
            if all(digits) and int(digits[1]) and not self.is_sign("^"):
                return number(whole.value + Fraction(int(digits[0]), int(digits[1])))
            self.remaining = before
        return whole

    def _digits(self) -> str:
        """Take an argument that has only digits; return "" if it has anything else."""
        if self.take_sign("{"):
            digits = self.take()
            closed = self.take().text == "}"
        else:
            digits = self.peek()
            closed = True
            digits = self.first() if digits.kind == "number" else self.take()
        return digits.text if closed and digits.kind == "number" and digits.text.isdigit() else ""

    def _letters(self) -> Node:
        token = self.peek()
        run = token.text
        if run in PLAIN:
            self.take()
            return self.function(run)
        if run == "sqrt":
            self.take()
            return Node("call", (self._plain_argument(), number(2)), "root")
        if run == "pi" or run in INFINITE:
            self.take()
            return PI if run == "pi" else INFINITY
        if run == "abs" and self.peek(1).text == "(":
            self.take()
            return Node("call", (self.atom(),), "abs")
        function = next((f for f in ("sin", "cos", "tan", "ln") if run == f + run[-1]), "")
        if function:  # sinx
            self.remaining[-1:] = [Token("letters", run[-1]), Token("letters", function)]
            return self._letters()
        if len(run) > 4 or (len(run) > 1 and run in SHORT_WORDS):
            raise Unreadable(f"the word {run!r} in a formula")
        letter = self.first().text
        # C(5,2) may be a number of choices.
        if letter.isupper() and letter not in (*APPLIED, "C") and self._pair_begins():  # the point M(2,3)
            return Node("chain", (name(letter), self.atom()), marks=("=",))
        if letter in APPLIED and (self.is_sign("(") or (self.is_sign("'") and self.is_sign("(", 1))):
            return self._read_arguments(letter)
        return self.read_name(letter)

    def _pair_begins(self) -> bool:
        """Return whether parentheses follow that have a comma of their own."""
        depth = 0
        for token in reversed(self.remaining) if self.is_sign("(") else ():
            depth += (token.text in ("(", "{", r"\{", "[")) - (token.text in (")", "}", r"\}", "]"))
            if depth < 1 or (depth == 1 and token.kind == "separator"):
                return depth == 1
        return False

    def _read_arguments(self, letter: str) -> Node:
        """Read the arguments of an unknown function."""
        if self.take_sign("'"):
            letter += "'"
        inside = self.atom()
        return Node("apply", inside.parts if inside.kind == "tuple" else (inside,), letter)

    def _plain_argument(self) -> Node:
        """Read the argument of a root without a backslash: what is in parentheses, or one number or name."""
        if self.is_sign("({") or self.peek().kind in ("number", "letters"):
            return self.atom()
        raise Unreadable(f"no argument before {format_token(self.peek())}")

    def _word(self) -> Node:
        token = self.take()
        if self.is_sign("(") and len(token.text) > 1:
            raise Unreadable(f"the function {token.text!r} is unknown")
        return self.read_name(token.text)

    def read_name(self, text: str) -> Node:
        """Return a name with its index and primes."""
        while self.is_sign("_'"):
            if self.take().text == "'":
                text += "'"
            else:
                text += "_" + self.index()
        return name(text)

    def index(self) -> str:
        """Read an index as a text."""
        if not self.take_sign("{"):
            several = self.peek().kind == "number"
            token = self.take() if several else self.first()
            if token.kind not in ("number", "letters", "command", "word"):
                raise Unreadable("an index that is not a name")
            return token.text
        depth = 1
        written = ""
        while depth and self.peek() != END:
            token = self.take()
            depth += (token.text == "{") - (token.text == "}")
            written += token.text if depth else ""
        return written
