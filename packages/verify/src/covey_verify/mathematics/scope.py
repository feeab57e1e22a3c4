r"""The extent of a function's argument: `\ln 2 \cdot 3` is 3 ln 2, `\sin 2x` is sin(2x).

The grammar behind ``symbolic`` lets an argument without parentheses include every factor that follows, even
across an operator, so every argument is put in parentheses before. The rule is that of printed mathematics:
an argument in parentheses or braces ends with them; any other ends at an operator, at a relation, at another
function, and at parentheses behind a name, as in `\sin x(1+\cos x)`.
"""

from __future__ import annotations

import re

TOKEN = re.compile(r"\\[a-zA-Z]+|\d+(?:\.\d+)?|\.\d+|\s+|.", re.DOTALL)
CIRCULAR = ["sin", "cos", "tan", "cot", "sec", "csc"]
HYPERBOLIC = ["sinh", "cosh", "tanh", "coth", "sech", "csch"]
# Names for the power -1: \sin^{-1} x is arcsin x.
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
"""Other names of functions, in TeX and in `\\operatorname`, and the names used here."""
QUOTIENTS = {
    "sech": r"\frac{{1}}{{\cosh({0})}}",
    "csch": r"\frac{{1}}{{\sinh({0})}}",
    "coth": r"\frac{{\cosh({0})}}{{\sinh({0})}}",
    "arsech": r"\arcosh(\frac{{1}}{{{0}}})",
    "arcsch": r"\arsinh(\frac{{1}}{{{0}}})",
    "arcoth": r"\artanh(\frac{{1}}{{{0}}})",
    "lg": r"\log_{{10}}({0})",
}
"""Functions that the grammar lacks, as formulas of others: it reads `\\coth` as the cotangent of h."""
FUNCTIONS = frozenset(
    ["\\" + name for name in (*INVERSE, *INVERSE.values(), *SYNONYMS, *QUOTIENTS, "ln", "log", "exp")]
)
# Opening tokens and their closing ones.
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
"""Tokens that end an argument without parentheses."""
APPLIED = frozenset("fgh")
"""Names of unknown functions, whose parentheses contain their argument."""


def scoped(text: str) -> str:
    r"""Return a clean formula in which every function has its argument in parentheses.

    >>> scoped(r"\ln 2*3"), scoped(r"\sin^2 2x\cos x"), scoped(r"\log_28")
    ('\\ln(2)*3', '{\\sin(2x)}^{2}\\cos(x)', '\\log_{2}(8)')
    """
    if not any(piece in FUNCTIONS for piece in TOKEN.findall(text)):
        return text
    return _Scopes(text).upto("")


class _Scopes:
    """A recursive-descent reader of tokens; each method takes tokens and returns them with parentheses."""

    def __init__(self, text: str) -> None:
        # Reversed, so that `pop` takes the next token.
        self.left = TOKEN.findall(text)[::-1]
        self.integral = r"\int" in text

    def next(self) -> str:
        return self.left[-1] if self.left else ""

    def spaces(self) -> str:
        return self.left.pop() if self.next().isspace() else ""

    def upto(self, closing: str) -> str:
        """Read up to a closing bracket, which is taken too; a missing one is no error here."""
        written = ""
        while self.left:
            piece = self.left.pop()
            if piece == closing:
                break
            written += self.thing(piece)
        return written

    def thing(self, piece: str) -> str:
        """Return a token that has been taken, with everything that belongs to it."""
        if piece in FUNCTIONS:
            return self.function(piece[1:])
        if piece in GROUPS and not (piece == "|" and "|" not in self.left):
            closing = GROUPS[piece]
            space = " " if closing[-1].isalpha() else ""
            return f"{piece}{space}{self.upto(closing)}{closing}{space}"
        return piece

    def function(self, written: str) -> str:
        """Read a function's base, power and argument, and return the call."""
        name, scripts = SYNONYMS.get(written, written), {"_": "", "^": ""}
        # `\log_2^3 x` and `\log^3_2 x`, each mark at most once.
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
        """Take `_` or `^` if it is next; else return "" and keep the space before."""
        gap = self.spaces()
        if self.next() in ("_", "^"):
            return self.left.pop()
        if gap:
            self.left.append(gap)
        return ""

    def script(self, mark: str) -> str:
        """Read a superscript or subscript: a group, or one character, as TeX does.

        A base has several digits if a single one would make no sense: no base is 1, as in log_10 x.
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
        """Read a function's argument and return it without its parentheses."""
        self.spaces()
        if self.next() in ("(", "["):
            return self.upto(GROUPS[self.left.pop()])
        if self.next() in GROUPS:
            return self.factor()
        # A sign directly behind the function belongs to the argument: \sin -x.
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
        """Return whether the next token ends an argument whose last factor is ``before``."""
        gap = self.spaces()
        piece, after = self.next(), self.left[-2] if len(self.left) > 1 else ""
        if gap:
            self.left.append(gap)
        if piece in OPERATORS or piece in FUNCTIONS or not piece:
            return True
        # The dx of an integral is no factor of the argument.
        if self.integral and piece == "d" and after.isalpha():
            return True
        # `\sin x(1+y)` ends before the parentheses, `\sin 2(x+y)` and `\sin f(x)` do not.
        named = before[-1:].isalpha() or before[-1:] in "}'"
        return piece == "(" and named and before.strip() not in APPLIED

    def factor(self) -> str:
        """Read a number, a name, a command with its arguments or a group, with powers and factorials."""
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
        r"""Read the rest of an angle like `\pi/6`, since `\sin \pi/6` never means a sixth of sin(pi)."""
        if name not in CIRCULAR or not re.fullmatch(r"[-+]? ?\d* ?\\pi ?", argument) or self.next() != "/":
            return ""
        if len(self.left) < 2 or not self.left[-2].isdigit():
            return ""
        return self.left.pop() + self.left.pop()
