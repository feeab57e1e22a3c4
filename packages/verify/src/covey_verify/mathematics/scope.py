r"""How far the argument of a function goes: `\ln 2 \cdot 3` is 3 ln 2, `\sin 2x` is sin(2x).

The grammar behind ``symbolic`` lets an argument without parentheses swallow every factor that follows,
also across an operator, so every argument gets its parentheses before. The rule is the one of print: an
argument in parentheses or braces ends with them; any other ends at an operator, at a relation, at
another function, and at parentheses behind a name, as in `\sin x(1+\cos x)`.
"""

from __future__ import annotations

import re

TOKEN = re.compile(r"\\[a-zA-Z]+|\d+(?:\.\d+)?|\.\d+|\s+|.", re.DOTALL)
CIRCULAR = ["sin", "cos", "tan", "cot", "sec", "csc"]
HYPERBOLIC = ["sinh", "cosh", "tanh", "coth", "sech", "csch"]
INVERSE = {
    **{name: "arc" + name for name in CIRCULAR},
    **{name: "ar" + name for name in HYPERBOLIC},
}
SYNONYMS = {
    "tg": "tan",
    "ctg": "cot",
    "cotg": "cot",
    "cosec": "csc",
    "arctg": "arctan",
    "arcctg": "arccot",
    "sh": "sinh",
    "ch": "cosh",
    "th": "tanh",
    "cth": "coth",
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "arccosec": "arccsc",
    **{f"arc{name}": f"ar{name}" for name in HYPERBOLIC},
}
"""Other names of functions, in TeX and in `\\operatorname`."""
QUOTIENTS = {
    "sech": r"\frac{{1}}{{\cosh({0})}}",
    "csch": r"\frac{{1}}{{\sinh({0})}}",
    "coth": r"\frac{{\cosh({0})}}{{\sinh({0})}}",
    "arsech": r"\arcosh(\frac{{1}}{{{0}}})",
    "arcsch": r"\arsinh(\frac{{1}}{{{0}}})",
    "arcoth": r"\artanh(\frac{{1}}{{{0}}})",
    "lg": r"\log_{{10}}({0})",
}
"""What the grammar does not know, by what it does: it takes `\\coth` for the cotangent of h."""
FUNCTIONS = frozenset(
    ["\\" + name for name in (*INVERSE, *INVERSE.values(), *SYNONYMS, *QUOTIENTS, "ln", "log", "exp")]
)
GROUPS = {
    "(": ")",
    "[": "]",
    "{": "}",
    "|": "|",
    r"\lfloor": r"\rfloor",
    r"\lceil": r"\rceil",
    r"\lvert": r"\rvert",
    r"\langle": r"\rangle",
}
WORDS = """
    cdot times ast div pm mp leq geq le ge neq ne approx equiv sim to rightarrow Rightarrow in notin cup cap
    circ bmod mod pmod mid lim sum prod int iint oint max min gcd quad qquad rfloor rceil rvert rangle
    end begin ldots
"""
OPERATORS = frozenset("*/+-=<>,;:&|)]}") | {"\\" + word for word in WORDS.split()}
"""What ends an argument that has no parentheses."""
APPLIED = frozenset("fgh")
"""Names of functions in their own right: the parentheses behind them are their argument."""


def scoped(text: str) -> str:
    r"""A clean formula in which every function has its argument in parentheses.

    >>> scoped(r"\ln 2*3"), scoped(r"\sin^2 2x\cos x"), scoped(r"\log_28")
    ('\\ln(2)*3', '{\\sin(2x)}^{2}\\cos(x)', '\\log_{2}(8)')
    """
    if not any(piece in FUNCTIONS for piece in TOKEN.findall(text)):
        return text
    return _Scopes(text).upto("")


class _Scopes:
    """Reads tokens from left to right and writes them with parentheses."""

    def __init__(self, text: str) -> None:
        self.left = TOKEN.findall(text)[::-1]
        self.integral = r"\int" in text

    def next(self) -> str:
        return self.left[-1] if self.left else ""

    def spaces(self) -> str:
        return self.left.pop() if self.next().isspace() else ""

    def upto(self, closing: str) -> str:
        """Everything before a closing bracket, which is taken too; a missing one is forgiven here."""
        written = ""
        while self.left:
            piece = self.left.pop()
            if piece == closing:
                break
            written += self.thing(piece)
        return written

    def thing(self, piece: str) -> str:
        """A piece that has been taken, with all that belongs to it."""
        if piece in FUNCTIONS:
            return self.function(piece[1:])
        if piece in GROUPS and not (piece == "|" and "|" not in self.left):
            closing = GROUPS[piece]
            space = " " if closing[-1].isalpha() else ""
            return f"{piece}{space}{self.upto(closing)}{closing}{space}"
        return piece

    def function(self, written: str) -> str:
        """A call, its base and its power where they belong."""
        name, scripts = SYNONYMS.get(written, written), {"_": "", "^": ""}
        while (mark := self._script_mark()) and not scripts[mark]:
            scripts[mark] = self.script(mark)
        base, power = scripts["_"], scripts["^"]
        argument = self.argument(name)
        if not argument.strip() or (base and name != "log"):
            raise ValueError(f"\\{name} without an argument, or with an index")
        if power == "-1" and name in INVERSE:
            name, power = INVERSE[name], ""
        if name in QUOTIENTS:
            call = QUOTIENTS[name].format(argument)
        else:
            call = rf"\{name}{f'_{{{base}}}' if base else ''}({argument})"
        return f"{{{call}}}^{{{power}}}" if power else call

    def _script_mark(self) -> str:
        """`_` or `^` if that comes next, taken."""
        gap = self.spaces()
        if self.next() in ("_", "^"):
            return self.left.pop()
        if gap:
            self.left.append(gap)
        return ""

    def script(self, mark: str) -> str:
        """What is raised or lowered: a group, or one character, as in print.

        A base of several digits is one where print would make no sense: no base is 1.
        """
        self.spaces()
        piece = self.left.pop() if self.left else ""
        if piece == "{":
            return self.upto("}")
        several = mark == "_" and (piece.startswith("1") or self.next() == "(")
        if len(piece) > 1 and piece.isdigit() and not several:
            self.left.append(piece[1:])
            piece = piece[0]
        return piece

    def argument(self, name: str) -> str:
        """What a function is of, without its parentheses."""
        self.spaces()
        if self.next() in ("(", "["):
            return self.upto(GROUPS[self.left.pop()])
        if self.next() in GROUPS:
            return self.factor()
        argument = self.left.pop() if self.next() and self.next() in "+-" else ""
        self.spaces()
        if self.next() in FUNCTIONS:
            return argument + self.factor()
        factor = ""
        while self.next() and not self._ends(factor):
            factor = self.factor()
            argument += factor
        return argument + self._angle(name, argument)

    def _ends(self, before: str) -> bool:
        """Whether the next piece is no more part of an argument whose last factor is ``before``."""
        gap = self.spaces()
        piece, after = self.next(), self.left[-2] if len(self.left) > 1 else ""
        if gap:
            self.left.append(gap)
        if piece in OPERATORS or piece in FUNCTIONS or not piece:
            return True
        if self.integral and piece == "d" and after.isalpha():
            return True
        named = before[-1:].isalpha() or before[-1:] in "}'"
        return piece == "(" and named and before.strip() not in APPLIED

    def factor(self) -> str:
        """A number, a name, a command with its arguments or a group, with powers and factorials."""
        written = self.spaces()
        piece = self.left.pop()
        written += self.thing(piece)
        if piece.startswith("\\") and piece not in FUNCTIONS and piece not in GROUPS:
            written += " " if self.next().isalpha() else ""
            while self.next() in ("{", "["):
                written += self.thing(self.left.pop())
        while self.next() in ("^", "_", "!", "'"):
            mark = self.left.pop()
            written += f"{mark}{{{self.script('')}}}" if mark in "^_" else mark
        return written

    def _angle(self, name: str, argument: str) -> str:
        r"""The rest of an angle like `\pi/6`: nobody asks for the sixth part of a sine of 180 degrees."""
        if name not in CIRCULAR or not re.fullmatch(r"[-+]? ?\d* ?\\pi ?", argument) or self.next() != "/":
            return ""
        if len(self.left) < 2 or not self.left[-2].isdigit():
            return ""
        return self.left.pop() + self.left.pop()
