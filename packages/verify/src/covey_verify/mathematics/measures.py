r"""The reader of amounts: units with their powers, smaller units after larger units, minutes of arc."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from covey_verify.mathematics import units
from covey_verify.mathematics.functions import Functions
from covey_verify.mathematics.tokens import Token, value_of
from covey_verify.mathematics.tree import Node, Unreadable, name, number, product
from covey_verify.mathematics.vocabulary import FRACTIONS, KNOWN, is_letters


class Measures(Functions):
    """Reads the units after amounts."""

    def unit_begins(self, factors: Sequence[Node]) -> bool:
        """Return whether the words after a product are its unit."""
        token = self.peek()
        if token.kind == "command" and token.text in FRACTIONS and self.peek(2).kind == "word":
            return True
        if token.kind not in ("word", "letters") or self.peek(1).text == "(" or self.is_to():
            return False
        amount = all(is_numeric(f) for f in factors)
        text = token.text
        if token.kind == "word":
            return len(text) > 1 or ((amount or token.gap) and text in units.LETTERS)
        ends = [self.peek(k).kind in ("end of text", "separator") for k in (1, 3)]
        if not amount or (text in KNOWN and not (units.is_unit(text) and ends[0])):  # 15 min
            return False
        if len(text) == 1:
            power = self.is_sign("^", 1) and self.peek(2).kind == "number" and ends[1]
            last = ends[0] or power or self.is_sign("/", 1)
            return token.gap and text in units.LETTERS and last and factors[-1].kind == "number"
        if units.is_unit(text):
            return token.gap or len(text) > 3 or text in units.SYMBOLS or text.casefold() in units.SYMBOLS
        return token.gap and not is_letters(text)

    def quantity(self, amount: Node) -> Node:
        r"""Read the unit of an amount, with its powers: `m/s^2`, `\text{m}\cdot\text{s}^{-1}`."""
        pieces: list[tuple[str, int]] = []
        letter = self.peek().text if self.peek().kind == "letters" and len(self.peek().text) == 1 else ""
        fraction = self.peek().kind == "command"
        if fraction:
            self.take()
        self._pieces(pieces, 1)
        if fraction:
            self._pieces(pieces, -1)
        size, factor, unit = units.measure(pieces)
        if size != 1:
            sized = amount.kind == "number" and amount.value is not None
            amount = number(amount.value * size) if sized and amount.value else product(number(size), amount)
        if not unit:
            return amount
        if letter and len(pieces) == 1:  # `8 h` may be a product
            raised = Node("power", (name(letter), number(pieces[0][1])))
            return Node("quantity", (amount, product(amount, raised)), unit, factor)
        return Node("quantity", (amount,), unit, factor)

    def with_smaller(self, larger: Node) -> Node:
        """Read what follows in a smaller unit: `2 hours 15 minutes`, `5 feet and 3 inches`."""
        before = list(self.remaining)
        # Of other units, `and` joins two answers: 2 m and 5 cm.
        joined = larger.text == "s" or larger.value == units.KNOWN["foot"][0]
        if joined and self.peek() == Token("separator", "and", self.peek().gap):
            self.take()
        if larger.kind == "quantity" and self.peek().kind == "number":
            smaller = self.term()
            fits = smaller.kind == "quantity" and smaller.text == larger.text
            if fits and (smaller.value or 0) < (larger.value or 0):
                amounts = [product(number(n.value or 1), n.parts[0]) for n in (larger, smaller)]
                return Node("quantity", (Node("sum", tuple(amounts)),), larger.text, Fraction(1))
        self.remaining = before
        return larger

    def minutes(self, degrees: Node) -> Node:
        """Read minutes and seconds of arc after degrees: 22° 30' 15''."""
        total = degrees
        for signs in (1, 2):
            marks = "".join(self.peek(k).text for k in range(1, 1 + signs))
            if self.peek().kind != "number" or marks != "'" * signs:
                break
            part = number(value_of(self.take().text) / 60**signs)
            for _ in marks:
                self.take()
            total = Node("sum", (total, part))
        return total

    def _pieces(self, pieces: list[tuple[str, int]], power: int) -> None:
        """Read units that are multiplied or divided, into (words, power)."""
        braced = self.take_sign("{")
        while self.peek().kind in ("word", "letters"):
            words = [self.take().text]
            # `m s` is a product of units, `square feet` a unit of two words.
            while self.peek().kind in ("word", "letters") and not (
                units.is_unit(words[-1]) and units.is_unit(self.peek().text)
            ):
                words.append(self.take().text)
            exponent = Fraction(1)
            if self.take_sign("^"):
                raised = self.script()
                exponent = Fraction(0) if raised.value is None else raised.value
            if exponent.denominator > 1 or not exponent or abs(exponent) > 9:
                raise Unreadable("the power of a unit that is not a small integer")
            above, stroke, below = " ".join(words).rpartition("/")
            if stroke and exponent != 1:  # m/s^2
                pieces += [(above, power), (below, -power * int(exponent))]
            else:
                pieces.append((" ".join(words), power * int(exponent)))
            if self.peek().kind in ("word", "letters"):
                continue
            if not self.is_sign("*/×") or self.peek(1).kind not in ("word", "letters"):
                break
            power = -abs(power) if self.take().text == "/" else power
        if braced:
            self.expect("}")


def is_numeric(node: Node) -> bool:
    """Return whether there is no variable in an expression."""
    return all(part.kind != "name" or part.text in ("π", "e") for part in node.walk())
