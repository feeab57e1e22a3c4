"""What spaces, units and parentheses say in an answer: where they change it, and where they do not."""

from __future__ import annotations

import pytest
from tests.rewards.test_math import boxed, rows

from covey.rewards.answers import bad_references

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
"""
DIFFERENT = r"""
12 | 1 2
100 | 1 00
21/2 | 2 1/2
12, 3 | 1 2, 3
f(2) = 3 | f(3) = 3
12cm | 12km
\cos 60^\circ | \cos 60
"""


@pytest.mark.parametrize(("gold", "answer"), rows(EQUAL))
def test_another_way_of_writing_an_answer_is_paid(gold: str, answer: str) -> None:
    assert boxed(answer, gold).value == 1.0


@pytest.mark.parametrize(("gold", "answer"), rows(DIFFERENT))
def test_what_only_looks_alike_is_not(gold: str, answer: str) -> None:
    assert boxed(answer, gold).value == 0.0


def test_numbers_side_by_side_are_no_reference() -> None:
    refused, *read = bad_references([{"answer": a} for a in ("1 2", "1 200", "1 1/2")])
    assert "cannot be read" in str(refused)
    assert read == [None, None]
