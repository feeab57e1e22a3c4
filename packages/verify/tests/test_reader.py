"""The reader of answers under random formulas and random tokens."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey_verify.mathematics.compare import Comparison
from covey_verify.mathematics.rational import same
from covey_verify.mathematics.reader import plain_number, read_answer
from covey_verify.mathematics.tree import Node, TooLarge, Unreadable, name, number, product, quotient

TOKENS = r"""
" \frac \sqrt \binom \ln \sin \log \cos ^ _ { } ( ) [ ] \{ \} | \cup \cap \setminus = < \le \ne \in
\approx \equiv \pmod \bmod \text{cm} \text{m} \text{or} \text{if} , ; and or + - * / \cdot \times ! ' %
\% ° ^\circ 1 2 12 0.5 .5 1,000 x y abc dog cm m h pi e i \pi \infty \pm \mp \mathbb R \begin{pmatrix}
\end{pmatrix} \begin{cases} \end{cases} & \\ \sum_{k=1}^{n} \int dx \lim_{x\to0} \lfloor \rfloor \left
\right \color{red} \mathbf \overline \dot \vec \ldots ... $ ~ \, \quad : \mid \langle \rangle f( f^{-1}(
\choose \over √ ½ ² ₅ ≤ 。 \text{ \operatorname{lcm} \mathrm{ } 1e5 9^9 \dfrac3 \lg \max \gcd \emptyset
0.\dot3 0.(3) 2024-01-02 A) \boxed{ \phantom{2} \underline{ " ** ` 1_2 \hline \| \prime \degree
\Rightarrow \mod
"""
SAMPLE = TOKENS.split()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(SAMPLE), min_size=1, max_size=40), st.sampled_from(["", " "]))
def test_any_tokens_are_read_or_refused(pieces: list[str], between: str) -> None:
    try:
        found = read_answer(between.join(pieces))
    except (Unreadable, TooLarge) as error:
        assert str(error)
    else:
        assert Comparison().compare(found, found) is True


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read_answer(text)
    except (Unreadable, TooLarge) as error:
        assert str(error)


HOSTILE = [
    "(" * 39 + "1" + ")" * 39,
    r"\sin" * 100 + "x",
    "+".join(["x"] * 1900),
    "*".join(["(x+1)"] * 600),
    "2^" * 1900 + "2",
    r"\frac1" * 600,
    "-" * 3000 + "1",
    "{" * 35 + "1+" * 500 + "1" + "}" * 35,
    "1," * 1999 + "1",
    "x|" * 1900,
    r"(\pm 1)" * 300,
    "(((x+1)^9+1)^9+1)^9",
    "(a+b+c+d+x+y+z)^{60}",
    "(x+9^{9999})^{64}",
    r"\gcd(10^{9999},x)",
    "+".join(["(x+1)^{64}"] * 300),
    "1/" * 1500 + "x",
    "5" + "!" * 1000,
    r"\begin{pmatrix}" * 130 + "1" + r"\end{pmatrix}" * 130,
    "x<" * 1500 + "x",
    r"\sin(x)" * 500,
    r"\text{" * 39 + "a" + "}" * 39,
    r"\cup".join(["[1,2]"] * 500),
    "²" * 2000,
    "x" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20])
def test_hostile_texts_are_bounded(text: str) -> None:
    try:
        assert Comparison().compare(read_answer("x+1"), read_answer(text)) is not True
    except (Unreadable, TooLarge) as error:
        assert str(error)


# ---- random formulas, in several styles of writing

NAMES = ["x", "y", "a", "n", "alpha"]
NUMBERS = st.fractions(min_value=-20, max_value=20, max_denominator=12).map(number)
LEAVES = st.sampled_from(NAMES).map(name) | NUMBERS
POLYNOMIALS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Node("sum", tuple(parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: product(*parts)),
    ),
    max_leaves=7,
)
FORMULAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Node("sum", tuple(parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: product(*parts)),
        st.tuples(inner, st.integers(1, 9)).map(lambda pair: quotient(pair[0], number(pair[1]))),
        st.tuples(inner, st.integers(2, 3)).map(lambda pair: Node("power", (pair[0], number(pair[1])))),
        inner.map(lambda argument: Node("call", (argument,), "sin")),
    ),
    max_leaves=7,
)


class Writer:
    """Writes a tree as TeX, choosing a style at each place."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def any(self, *choices: str) -> str:
        """Return one of the texts."""
        return self.random.choice(choices)

    def write(self, node: Node) -> str:
        """Return a text."""
        if node.kind == "number":
            return self.number(node.value or Fraction(0))
        if node.kind == "name":
            return r"\alpha " if node.text == "alpha" else node.text
        if node.kind == "sum":
            return self.any("+", " + ", r"\, + ").join(map(self.atom, self.order(node.parts)))
        if node.kind == "product":
            below = [p.parts[0] for p in node.parts if p.kind == "inverse"]
            above = [self.atom(p) for p in self.order(node.parts) if p.kind != "inverse"]
            text = self.any(r" \cdot ", "*", r"\times ").join(above)
            for divisor in below:
                text = self.fraction(text, self.write(divisor))
            return text
        if node.kind == "power":
            return self.atom(node.parts[0]) + "^" + self.any("{%s}", "{ %s }") % self.write(node.parts[1])
        return self.any(r"\sin(%s)", r"\sin\left(%s\right)", r"\sin{(%s)}") % self.write(node.parts[0])

    def order(self, parts: tuple[Node, ...]) -> list[Node]:
        """Return parts in another order."""
        return self.random.sample(parts, len(parts))

    def atom(self, node: Node) -> str:
        """Return a text that can stand in a sum or product."""
        text = self.write(node)
        if node.kind == "name" or text.isdigit():
            return text
        return self.any("(%s)", r"\left(%s\right)", "{(%s)}") % text

    def number(self, value: Fraction) -> str:
        """Return a number's text."""
        sign, size = "-" if value < 0 else "", abs(value)
        if size.denominator == 1:
            return sign + str(size)
        above, below = str(size.numerator), str(size.denominator)
        if len(above) == len(below) == 1:
            return sign + self.any(rf"\frac{above}{below}", rf"\dfrac{{{above}}}{below}", f"{above}/{below}")
        return sign + self.fraction(above, below)

    def fraction(self, above: str, below: str) -> str:
        """Return a fraction's text."""
        return self.any(r"\frac{%s}{%s}", r"\dfrac{%s}{%s}", r"\tfrac{%s} {%s}", "((%s)/(%s))") % (
            above,
            below,
        )


@settings(max_examples=300, deadline=None)
@given(FORMULAS, st.integers(), st.integers())
def test_a_formula_is_read_back_from_any_style(formula: Node, first: int, second: int) -> None:
    texts = [Writer(seed).write(formula) for seed in (first, second)]
    assert same(read_answer(texts[0]), formula) is True, texts[0]
    assert Comparison().compare(read_answer(texts[0]), read_answer(texts[1])) is True, texts


@settings(max_examples=300, deadline=None)
@given(FORMULAS, st.integers(), st.fractions(max_denominator=30).filter(bool))
def test_a_formula_that_is_a_little_off_is_never_equal(formula: Node, seed: int, off: Fraction) -> None:
    other = Node("sum", (formula, number(off)))
    found = Comparison().compare(
        read_answer(Writer(seed).write(formula)), read_answer(Writer(seed + 1).write(other))
    )
    assert found is not True


@settings(max_examples=100, deadline=None)
@given(POLYNOMIALS, st.integers(), st.fractions(max_denominator=30).filter(bool))
def test_polynomials_that_differ_are_decided_without_algebra(
    polynomial: Node, seed: int, off: Fraction
) -> None:
    other = Node("sum", (polynomial, number(off)))
    texts = Writer(seed).write(polynomial), Writer(seed + 1).write(other)
    assert Comparison().compare(*map(read_answer, texts)) is False, texts


@given(st.integers(-(10**30), 10**30))
def test_integers_are_read_in_every_way_they_are_written(n: int) -> None:
    for text in (f"{n}", f"{n:,}", f"{n}.0", f"{n}.", rf"\text{{{n}}}", f"${n}$"):
        assert plain_number(text) == n, text


@given(st.fractions(max_denominator=10**6))
def test_fractions_are_exact(f: Fraction) -> None:
    assert plain_number(f"{f.numerator}/{f.denominator}") == f
    sign = "-" if f < 0 else ""
    assert plain_number(rf"{sign}\frac{{{abs(f.numerator)}}}{{{f.denominator}}}") == f


@given(st.integers(0, 999), st.text("0123456789", max_size=4), st.text("0123456789", min_size=1, max_size=4))
def test_repeating_decimals_are_exact(whole: int, fixed: str, period: str) -> None:
    value = (int(f"{whole}{fixed}{period}") - int(f"{whole}{fixed}")) / Fraction(
        10 ** len(fixed) * (10 ** len(period) - 1)
    )
    dots = rf"\dot{period[0]}" + (rf"{period[1:-1]}\dot{{{period[-1]}}}" if len(period) > 1 else "")
    for text in (rf"{whole}.{fixed}\overline{{{period}}}", f"{whole}.{fixed}{dots}"):
        assert plain_number(text) == value, text
