"""The position in a list of tokens, and the methods that each part of the reader asks of the others."""

from __future__ import annotations

from collections.abc import Sequence

from covey_verify.mathematics.tokens import Token
from covey_verify.mathematics.tree import Node, TooLarge, Unreadable

MAX_LEVEL = 48
"""Levels of brackets, signs and arguments within each other."""
END = Token("end of text", "")


class Cursor:
    """Reads tokens: a method takes a part's tokens and returns its node. Raises Unreadable, TooLarge."""

    def __init__(self, tokens: Sequence[Token], sign: int = 1, level: int = 0) -> None:
        # Reversed, so that the next token is the last one, and a part of a token can be put back.
        self.remaining = [END, *reversed(tokens)]
        self.sign = sign
        self.doubled = False
        self.level = level
        self.bars = 0
        self.until = frozenset[str]()
        """Signs that end a factor here, such as the bar of a set {x | x > 2}."""
        self.outermost = 0
        """The level of the answer, or of the set, whose elements may have two signs."""

    def peek(self, ahead: int = 0) -> Token:
        """Return the next token, or a token after it, without taking it."""
        return self.remaining[-1 - ahead] if ahead < len(self.remaining) else END

    def take(self) -> Token:
        """Take the next token."""
        return self.remaining.pop() if len(self.remaining) > 1 else END

    def is_sign(self, signs: str, ahead: int = 0) -> bool:
        """Return whether a token is one of these characters."""
        token = self.peek(ahead)
        return token.kind == "sign" and token.text in signs and len(token.text) == 1

    def is_to(self) -> bool:
        """Return whether the next token is the word of a ratio, such as `to` in `3 to 5`."""
        token = self.peek()
        return token.kind in ("word", "letters") and token.text == "to" and self.peek(1).kind == "number"

    def take_sign(self, sign: str) -> bool:
        """Take the next token if it is this sign; return whether it was."""
        matches = self.peek().kind in ("sign", "separator") and self.peek().text == sign
        if matches:
            self.take()
        return matches

    def expect(self, sign: str) -> None:
        """Take the next token, which has to be this sign."""
        if not self.take_sign(sign):
            raise Unreadable(f"{sign} is missing before {format_token(self.peek())}")

    def deeper(self) -> None:
        """Count a level; the caller counts it back."""
        self.level += 1
        if self.level > MAX_LEVEL:
            raise TooLarge("nested too deeply")

    def first(self) -> Token:
        """Take the first character of a number or of letters, or a whole command, as TeX does."""
        token = self.take()
        if token.kind not in ("number", "letters"):
            return token
        if len(token.text) > 1:
            if token.kind == "number" and not token.text.isdigit():
                raise Unreadable(f"an argument before {token.text!r}")
            self.remaining.append(Token(token.kind, token.text[1:]))
        return Token(token.kind, token.text[0], token.gap)

    # ---- parts that one module reads and another asks for

    def sum(self) -> Node:
        """Read a sum."""
        raise NotImplementedError

    def term(self) -> Node:
        """Read a product, with the unit after it."""
        raise NotImplementedError

    def factor(self) -> Node:
        """Read an atom with its powers, factorials and degree signs."""
        raise NotImplementedError

    def starts_factor(self) -> bool:
        """Return whether the next token begins a factor."""
        raise NotImplementedError

    def atom(self) -> Node:
        """Read the smallest complete part."""
        raise NotImplementedError

    def argument(self) -> Node:
        """Read an argument of a TeX command: a group, one digit, one letter or one command."""
        raise NotImplementedError

    def script(self) -> Node:
        """Read a superscript: a group, a number, a letter or a command, with its sign."""
        raise NotImplementedError

    def read_name(self, text: str) -> Node:
        """Return a name with its index and primes."""
        raise NotImplementedError

    def index(self) -> str:
        """Read an index as a text."""
        raise NotImplementedError

    def command(self) -> Node:
        """Read a TeX command with its arguments."""
        raise NotImplementedError

    def function(self, written: str) -> Node:
        """Read a function's base, power and argument, and return the call."""
        raise NotImplementedError

    def group(self) -> Node:
        """Read the contents of TeX's braces."""
        raise NotImplementedError

    def bracket(self, opening: str) -> Node:
        """Read a group, a tuple or an interval, up to its closing bracket."""
        raise NotImplementedError

    def braces(self) -> Node:
        """Read a set."""
        raise NotImplementedError

    def environment(self) -> Node:
        """Read a matrix or cases."""
        raise NotImplementedError


def format_token(token: Token) -> str:
    """Return a token as messages show it."""
    return "the end" if token == END else repr(token.text)
