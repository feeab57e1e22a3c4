"""What spaces, units and parentheses say in an answer: where they change it, and where they do not."""

from __future__ import annotations

import pytest
from test_math import boxed, rows

from covey_verify.mathematics.answers import bad_references

EQUAL = r"""
2.5 | 2 1/2
-1.5 | -1 1/2
5/2 | 2\ 1/2
2.5 \text{ cups} | 2 1/2 cups
2.5 \text{ cups} | 2\frac{1}{2} cups
1000000 | 1\,000\,000
1234.5 | 1 234.5
12 | 12cm
60 \text{ mph} | 60mi/h
5\text{ cm}^2 | 5cm^2
3 | f(2) = 3
f(2) = 3 | 3
0.3 | P(X=2)=0.3
5 | d((0,0),(3,4)) = 5
2,1,-1,-2 | \pm 1, \pm 2
\{-2,-1,1,2\} | x = \pm 1, \pm 2
1/2 | \cos 60^\circ
\sin 40^\circ | \cos(50^\circ)
30 | \arcsin(1/2) = 30^\circ
3 | \log_2 8
x<1 \text{ or } x>3 | (-\infty,1)\cup(3,\infty)
x<1 or x>3 | x>3, x<1
x>1 and x<3 | 1<x<3
(1,3) | x<3 \text{ and } x>1
2024-01-02 | 2024-1-2
3-2 | 3–2
1.2.3 | 1.2.3
3{,}14 | 3.14
12000 | 12{,}000
2^T | 2^{T}
10^-3 | 0.001
x^2+2x+1 | x**2+2*x+1
2\sqrt{3} | 2*sqrt(3)
\sqrt{2} | 2^(1/2)
2\pi | 2*pi
\ln 2 | ln(2)
{5 \choose 2} | 10
10 | 5 \choose 2
10 | \binom52
1080 | 1,080 dollars
1080 | x = 1,080
1080 | \text{Total} = 1,080 dollars
1000\pi | 1,000\pi
2, 1080 | 1,080 and 2
(1,080) | (1, 80)
\frac{1}{3} | 0.\bar3
1080 | \$1,080.00 dollars
1080 \text{ km} | 1,080 km
42 | **42**
42 | `42`
42 | \bm{42}
42 | US$42
A | A)
no | No
5 m/s | 5 \text{ m/s}
9.8 m/s^2 | 9.8
5 \times 10^3 \text{ m} | 5000
5\text{ m}/\text{s} | 5 m/s
f^{-1}(x)=x-1 | x-1
\frac{1}{n} | \frac1n
\frac{x}{2} | \frac x2
\frac{n}{2} | \frac n{2}
\frac{n}{2} | \frac{n}2
\frac{\pi}{4} | \frac\pi4
\frac{\alpha}{2} | \frac\alpha2
\frac{a}{b} | \frac ab
\frac{3\pi}{4} | \frac{3\pi}4
\binom{n}{2} | \binom n2
\frac{1}{\sqrt{2}} | \sqrt\frac12
\sqrt{x} | x^\frac12
\frac{1}{2} | \frac12
2\frac12 | 2.5
\frac{\sqrt{3}}{2} | \frac{\sqrt3}2
\sqrt{\pi} | \sqrt\pi
42 | \color{red}{42}
42 | \color{red}42
42 | \textcolor{blue}{42}
42 | \underline{42}
42 | \mathbf{\text{42}}
42 | \large 42
42 | {\bf 42}
42 | \bf 42
42 | 42。
0.5 | \frac12 = 0.5
\frac12 | \frac12 \approx 0.5
\frac12 | \frac24 = \frac12 \approx 0.5
5 | 2+3=5
60\text{ km/h} | 60\text{ kmph}
\frac13 | 0.\dot3
\frac13 | 0.\dot{3}
\frac{41}{333} | 0.\dot{1}2\dot{3}
\frac{7}{30} | 0.2\dot3
"""
DIFFERENT = r"""
12 | 1 2
100 | 1 00
21/2 | 2 1/2
12, 3 | 1 2, 3
f(2) = 3 | f(3) = 3
12cm | 12km
\cos 60^\circ | \cos 60
x<1 or x>3 | x<1 and x>3
x>1 and x<3 | x>1 or x<3
x \neq 1 \text{ and } x \neq 2 | x \neq 1 \text{ or } x \neq 2
x=1, y=2 | x=1 or y=2
(1,3) | x<1 \text{ or } x>3
2024-01-02 | 2021
2024-01-02 | 2024-02-01
3-2 | 1
192.168.0.1 | 192.168.0.2
314 | 3{,}14
12 | 1{,}2
80 | 1,080 dollars
80 | x = 1,080
1080 | (1,080)
1080 | x = 1, 080
1, 80 \text{ dollars} | 1,080 dollars
2 | 2^T
P(1+r)^T | P(1+r)
A^TB | AB
\frac{dy}{dx} = 2x | \frac{dx}{dy} = 2x
5\text{ m} | 5\text{ s}
no | on
f^{-1}(x)=x-1 | f(x)=x-1
\frac{1}{n} | \frac n1
\frac{1}{12} | \frac112
\frac{x}{2} | \frac 2x
\frac{a}{bc} | \frac abc
\frac{\pi}{45} | \frac\pi45
\binom{n}{2} | \binom 2n
\frac{1}{2} | \sqrt\frac12
x^{\frac{1}{23}} | x^\frac123
42 | \color{red}{43}
42 | \color{42}{43}
42 | \textcolor{blue}{24}
42 | \underline{4}2\underline{2}
42 | \large 43
43 | 42。
0.5 | \frac12 = 0.6
0.5 | \frac13 = 0.5
0.5 | 0.6 = 0.6
\frac12 | \frac13 \approx 0.5
5 | 2=3=5
60\text{ km/h} | 60\text{ mph}
\frac13 | 0.\dot4
\frac{1}{3} | 0.3\dot{0}
\frac{41}{333} | 0.\dot{1}3\dot{2}
3 | \dot3
"""


@pytest.mark.parametrize(("gold", "answer"), rows(EQUAL))
def test_another_way_of_writing_an_answer_is_paid(gold: str, answer: str) -> None:
    assert boxed(answer, gold).value == 1.0


@pytest.mark.parametrize(("gold", "answer"), rows(DIFFERENT))
def test_what_only_looks_alike_is_not(gold: str, answer: str) -> None:
    assert boxed(answer, gold).value == 0.0


def test_a_product_of_vectors_is_none_of_numbers() -> None:
    (refused,) = bad_references([{"answer": r"\vec{a} \times \vec{b}"}])
    assert "cannot be read" in str(refused)
    assert boxed(r"\vec{a} \times \vec{b}", r"\vec{a} \times \vec{b}").value == 1.0
    for other in (r"\vec{b} \times \vec{a}", r"\vec{a} \cdot \vec{b}"):
        assert boxed(other, r"\vec{a} \times \vec{b}").value != 1.0


def test_numbers_side_by_side_are_no_reference() -> None:
    refused, *read = bad_references([{"answer": a} for a in ("1 2", "1 200", "1 1/2")])
    assert "cannot be read" in str(refused)
    assert read == [None, None]
