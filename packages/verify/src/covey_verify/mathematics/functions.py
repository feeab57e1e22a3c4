r"""The reader of commands and functions, by the rules of TeX and of printed mathematics.

A function's argument in parentheses or braces ends with them; any other ends at an operator, at a relation,
at another function, and at parentheses after a name: `\ln 2 \cdot 3` is 3 ln 2, `\sin x(1+\cos x)` is
a product.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from covey_verify.mathematics.cursor import END, Cursor, format_token
from covey_verify.mathematics.tokens import Token
from covey_verify.mathematics.tree import (
    INFINITY,
    PI,
    Node,
    Unreadable,
    combine_parts,
    conjugate,
    determinant_of,
    in_radians,
    name,
    negative,
    number,
    quotient,
)
from covey_verify.mathematics.vocabulary import (
    ACCENTS,
    BIG,
    BINOMIALS,
    CIRCULAR,
    DOMAINS,
    FRACTIONS,
    FUNCTIONS,
    INVERSE,
    LETTERS,
    PREFIXES,
    SEVERAL,
    SYNONYMS,
)


class Functions(Cursor):
    """Reads commands and functions."""

    def command(self) -> Node:
        """Read a TeX command with its arguments."""
        command = self.take().text
        if command in FRACTIONS:
            return self._fraction()
        if command in BINOMIALS:
            above = self.argument()
            return Node("call", (above, self.argument()), "binomial")
        if command == "sqrt":
            return self._root()
        if command in FUNCTIONS:
            return self.function(command)
        if command == "Gamma" and self.is_sign("("):
            return Node("call", (Node("sum", (self.atom(), number(-1))),), "factorial")
        if command in LETTERS:
            return self.read_name(command)
        if command in ("lfloor", "lceil"):
            inner = self.sum()
            self._close("r" + command[1:])
            return Node("call", (inner,), {"lfloor": "floor", "lceil": "ceil"}[command])
        if command in BIG:
            return self._big(command)
        if command in DOMAINS:
            return self._domain(command)
        if command in ACCENTS:
            return self._accent(command)
        if command == "det":
            return determinant_of(self.factor())
        raise Unreadable(f"\\{command} is unknown")

    def _accent(self, command: str) -> Node:
        """Read a name with an accent, a set of numbers, or the conjugate of a number."""
        if command in ("overline", "bar") and self._is_complex():
            self.take()
            return conjugate(self.group())
        letters = self._read_accented(command)
        is_domain = command == "mathbb" and letters in DOMAINS
        return self._domain(letters) if is_domain else self.read_name(f"{command} {letters}")

    def _is_complex(self) -> bool:
        """Return whether braces follow with a sum of i in them, and no name such as AB."""
        inside = [token.text for token in reversed(self.remaining)]
        inside = inside[: inside.index("}")] if self.is_sign("{") and "}" in inside else []
        return "i" in inside and bool({"+", "-"} & set(inside))

    def _domain(self, letter: str) -> Node:
        """Return a set of numbers; with a sign after ℝ only the numbers that have this sign."""
        if letter == "R" and self.is_sign("^_"):
            ahead = "".join(self.peek(k).text for k in range(4))
            for written in ("^+", "^{+}", "_+", "_{+}", "^-", "^{-}"):
                if ahead.startswith(written):
                    for _ in written:
                        self.take()
                    positive = (number(0), INFINITY)
                    negatives = (negative(INFINITY), number(0))
                    return Node("tuple", positive if "+" in written else negatives, "()")
        return name(DOMAINS[letter])

    def _close(self, command: str) -> None:
        if self.take().text != command:
            raise Unreadable(f"\\{command} is missing")

    def _read_accented(self, command: str) -> str:
        """Take the letters that get an accent, or all letters after an angle or a triangle."""
        if self.is_sign("{"):
            return self.index()
        token = self.take() if command in PREFIXES else self.first()
        if token.kind not in ("letters", "command", "number", "word"):
            raise Unreadable(f"\\{command} without a letter")
        return token.text

    def _fraction(self) -> Node:
        # dy/dx of an unknown y is a name.
        ahead = "".join(self.peek(k).text for k in range(6))
        if match := re.fullmatch(r"\{(d[a-zA-Z])\}\{(d[a-zA-Z])\}", ahead):
            for _ in range(6):
                self.take()
            return name(f"{match[1]}/{match[2]}")
        above = self.argument()
        return quotient(above, self.argument())

    def _root(self) -> Node:
        degree = number(2)
        if self.take_sign("["):
            degree = self.sum()
            self.expect("]")
        argument = self.atom() if self.is_sign("(") else self.argument()
        return Node("call", (argument, degree), "root")

    def _big(self, kind: str) -> Node:
        """Read a sum, a product, an integral or a limit with its bounds."""
        low = high = None
        for _ in range(2):
            if self.is_sign("_") and low is None:
                self.take()
                low = self._read_bound(kind)
            elif self.is_sign("^") and high is None:
                self.take()
                high = self.script()
        if kind == "int":
            return self._integral(low, high)
        if (
            low is None
            or low.kind != "chain"
            or low.parts[0].kind != "name"
            or (high is None) != (kind == "lim")
        ):
            raise Unreadable(f"\\{kind} without a variable and its bounds")
        variable, start = low.parts
        body = rename_bound(self.term(), variable.text)
        return Node("big", (name("#"), start, *(() if high is None else (high,)), body), kind)

    def _read_bound(self, kind: str) -> Node:
        """Read the lower bound of a sum (k = 1), a limit (x to 0) or an integral (0)."""
        if kind == "int":
            return self.argument()
        self.expect("{")
        variable = self.factor()
        if self.take().text not in (("to", "rightarrow") if kind == "lim" else ("=",)):
            raise Unreadable(f"\\{kind} without a variable and its bounds")
        node = Node("chain", (variable, self.sum()))
        self.expect("}")
        return node

    def _integral(self, low: Node | None, high: Node | None) -> Node:
        r"""Read an integrand up to its differential, which may be glued to it: `\int xdx`."""
        inside: list[Token] = []
        differential = re.compile(r"([a-ce-zA-Z]*)d([a-zA-Z]?)")
        while self.peek() != END and not differential.fullmatch(self.peek().text):
            inside.append(self.take())
        match = differential.fullmatch(self.take().text)
        if match is None:
            raise Unreadable("an integral without a differential")
        inside += [Token("letters", match[1])] if match[1] else []
        variable = name(match[2] or self.take().text)
        reader = type(self)(inside or [Token("number", "1")], self.sign, self.level)
        body = reader.sum()
        if reader.peek() != END:
            raise Unreadable(f"unexpected {format_token(reader.peek())}")
        bounds = () if low is None or high is None else (low, high)
        if not bounds:  # an antiderivative is a function of its variable
            return Node("big", (name("#"), variable, rename_bound(body, variable.text)), "int")
        return Node("big", (name("#"), *bounds, rename_bound(body, variable.text)), "int")

    # ---- functions

    def function(self, written: str) -> Node:
        """Read a function's base, power and argument, and return the call."""
        title = SYNONYMS.get(written, written)
        base: Node | None = None
        power: Node | None = None
        for _ in range(2):  # `\log_2^3 x` and `\log^3_2 x`
            if self.is_sign("_") and base is None:
                self.take()
                base = self._base()
            elif self.is_sign("^") and power is None:
                self.take()
                power = self.script()
        if base is not None and title != "log":
            raise Unreadable(f"\\{written} with an index")
        arguments = self.function_argument(title)
        if power == number(-1, "1") and title in INVERSE:
            title = INVERSE[title]
            power = None
        if title in ("lg", "log"):
            # The base of a logarithm without an index is unknown: 10, e or 2.
            arguments += (number(10) if title == "lg" else base or name("base of log"),)
            title = "log"
        call = Node("call", arguments, title)
        if title == "exp":
            call = Node("power", (name("e"), *arguments))
        return call if power is None else Node("power", (call, power))

    def _base(self) -> Node:
        """Read a logarithm's base: several digits only where the first makes no sense, such as in log_10."""
        token = self.peek()
        if token.kind != "number" or token.text.startswith("1") or self.is_sign("(", 1):
            return (
                self.atom() if token.kind in ("number", "command") or self.is_sign("{") else self.argument()
            )
        return self.argument()

    def function_argument(self, title: str) -> tuple[Node, ...]:
        """Read the arguments of a function."""
        self.deeper()
        if self.is_sign("(["):
            inside = self.bracket(self.take().text)
            several = inside.kind == "tuple" and (len(inside.parts) > 1 or inside.text == "[]")
            arguments = inside.parts if several else (inside,)
        elif title in SEVERAL:
            inside = self.atom()
            arguments = inside.parts if inside.kind in ("set", "list") else (inside,)
        else:
            arguments = (self._open_argument(title),)
        if not arguments:
            raise Unreadable(f"\\{title} of nothing")
        if len(arguments) > 1 and title not in SEVERAL:
            raise Unreadable(f"\\{title} of several arguments")
        self.level -= 1
        return tuple(in_radians(f) if title in CIRCULAR else f for f in arguments)

    def _open_argument(self, title: str) -> Node:
        """Read an argument without parentheses."""
        if self.is_sign("{|") or self.peek().text in ("lfloor", "lceil"):
            return self.factor()
        minus = self.is_sign("+-") and self.take().text == "-"
        if self.peek().kind == "command" and self.peek().text in FUNCTIONS:
            node = self.factor()
        else:
            factors: list[Node] = []
            while self.starts_factor() and not self._argument_ends(factors):
                if factors and self.peek().kind == "number" and factors[-1].kind in ("number", "name"):
                    raise Unreadable("a number directly after another factor")
                if self.peek().kind == "word" and factors:
                    break
                factors.append(self.factor())
            if not factors:
                raise Unreadable(f"\\{title} without an argument")
            # `\sin \pi/6` never means a sixth of sin(pi).
            angle = title in CIRCULAR and factors[-1] == PI and all(f.kind == "number" for f in factors[:-1])
            if angle and self.is_sign("/") and self.peek(1).kind == "number":
                self.take()
                factors.append(Node("inverse", (self.atom(),)))
            node = combine_parts("product", factors)
        return negative(node) if minus else node

    def _argument_ends(self, factors: Sequence[Node]) -> bool:
        """Return whether the next token ends an argument with these factors."""
        token = self.peek()
        if token.text in FUNCTIONS or (token.kind in ("begin", "word") and bool(factors)):
            return True
        if token.text != "(" or not factors:
            return False
        # `\sin x(1+y)` ends before the parentheses, `\sin 2(x+y)` does not.
        return factors[-1].kind != "number"


def rename_bound(body: Node, variable: str) -> Node:
    """Return a body whose bound variable has the name #, and ## within another, whatever it was."""
    if body.kind == "name":
        if body.text == variable or body.text[0] == "#":
            return name("#" + body.text.removeprefix(variable))
        stem, _, index = body.text.partition("_")
        return name(f"{stem}_#") if index == variable else body
    return body.with_parts(tuple(rename_bound(part, variable) for part in body.parts))
