"""How far a function's argument goes: pairs written down before the rule was, and none paid wrongly."""

from __future__ import annotations

import pytest

pytest.importorskip("latex2sympy2_extended")

from covey_verify.mathematics.symbolic import equal

EQUAL = r"""
3\ln 2 | \ln 2 \cdot 3
\ln 8 | \ln 2 \cdot 3
4x | \ln e \cdot 4x
2\sin x | \sin x \cdot 2
2\sin x | \sin{x} \cdot 2
8 | \log_2 4 \cdot 4
8 | \log_{2}4\times 4
1 | \sin 30^\circ \cdot 2
1 | \sin{30^\circ} \cdot 2
1 | 2\sin 30^\circ
x\sin x | \sin{x}\cdot x
x\sin x | \sin x \cdot x
x\sin x | \sin{x}x
\ln 2\ln 3 | \ln 2 \cdot \ln 3
\ln 2\ln 3 | \ln 3\ln 2
\ln 2\ln 3 | (\ln 2)(\ln 3)
\sin 2x | 2\sin x\cos x
\sin(2x) | \sin 2x
\sin 2x | 2 \sin x \cdot \cos x
\sin^2 x | (\sin x)^2
\sin^2 x | \sin x \cdot \sin x
\sin^2 x | \sin^{2}(x)
\sin^2 2x | \sin(2x)^2
\cos^2 x \cdot x | x\cos^2 x
\sin x^2 | \sin(x^2)
\sin{x^2} | \sin(x^2)
\sin^{-1} x | \arcsin x
\tan^{-1} x \cdot 2 | 2\arctan(x)
\arctan x \cdot 2 | 2\arctan(x)
\arcsin \frac12 \cdot 6 | \pi
\exp x \cdot x | xe^x
\exp{x}\cdot x | xe^x
\exp(2x) | \exp 2x
\sinh x \cdot 2 | e^x - e^{-x}
\cosh x + \sinh x | e^x
\coth x | \frac{\cosh x}{\sinh x}
\operatorname{csch} x | \frac{1}{\sinh x}
\sinh^{-1} x | \operatorname{arsinh} x
\operatorname{arcsinh} x \cdot 3 | 3\operatorname{arsinh}(x)
\operatorname{sech}^2 x | \frac{1}{\cosh^2 x}
\log_{10} 100 \cdot 3 | 6
\lg 100 \cdot 3 | 6
\lg 1000 | 3
\log_28 | 3
\log_2 8 | 3
\log_2^2 8 | 9
\log^{2}_2 8 | 9
\log_{10}x | \log_10 x
\log_2 x^3 | \log_2(x^3)
\ln x^2 | \ln(x^2)
\ln x + 1 | 1 + \ln(x)
\ln x - 1 | -1 + \ln x
\frac{\ln x}{2} | \ln x / 2
\frac{\ln 6}{2} | \ln 6 / 2
\frac{\sin x}{x} | \sin x / x
\tan x | \sin x / \cos x
\ln 2 + \ln 3 | \ln 6
\ln\frac{a}{b} \cdot 2 | 2\ln\frac{a}{b}
\ln\sqrt{2} \cdot 2 | \ln 2
\ln\ln x | \ln(\ln x)
\ln \sin x \cdot 2 | 2\ln(\sin x)
\sin x(1+\cos x) | (1+\cos x)\sin x
\sin x(1+\cos x) | \sin x + \sin x\cos x
\cos 2(x+1) | \cos(2x+2)
\ln(2)(3) | 3\ln 2
\ln(x+1)\cdot x | x\ln(x+1)
\ln|x| \cdot 2 | 2\ln|x|
\ln|x+1| + C | C + \ln|1+x|
\frac{1}{\ln 2 \cdot 3} | \frac{1}{3\ln 2}
e^{\ln 2 \cdot 3} | 8
2^{\log_2 3 \cdot 2} | 9
\sqrt{\sin x \cdot 4} | 2\sqrt{\sin x}
\cos \pi/3 | \frac12
\sin\frac{\pi}{6} \cdot 4 | 2
\cos\theta \cdot r | r\cos\theta
\cos\theta+i\sin\theta | e^{i\theta}
\cos(-x) | \cos -x
\sin -x | -\sin x
g\sin\theta | \sin\theta \cdot g
f\cos x | \cos x \cdot f
5\sin 3t \cdot 2 | 10\sin(3t)
\tan 45^\circ \cdot 7 | 7
\int \sin x \, dx | \int \sin(x) dx
\sec x \cdot \cos x | 1
\csc x \sin x | 1
\cot x \cdot \tan x | 1
"""
DIFFERENT = r"""
\ln 6 | \ln 2 \cdot 3
\ln 6 | \ln{2} \cdot 3
\ln 6 | \ln 2 \times 3
\ln 6 | \ln 2 * 3
\ln 6 | \ln{2}3
\sin 2x | \sin x \cdot 2
\sin 2x | \sin{x} \cdot 2
\sin 2x | \sin{x}2
4 | \log_2 4 \cdot 4
4 | \log_{2}{4} \times 4
\sin 60^\circ | \sin 30^\circ \cdot 2
\sin 60^\circ | \sin{30^\circ} \cdot 2
\sin x^2 | \sin x \cdot x
\sin x^2 | \sin^2 x
\sin x^2 | (\sin x)^2
\ln 2\ln 3 | \ln(2 \ln 3)
\cos 6x | \cos 2x \cdot 3
\cos 6x | \cos{2x} \cdot 3
\tan xy | \tan x \cdot y
\arctan 2x | \arctan x \cdot 2
\sin^{-1} 2x | \sin^{-1} x \cdot 2
e^{2x} | \exp x \cdot 2
\exp(2x) | \exp{x}\cdot 2
\sinh 2x | \sinh x \cdot 2
\operatorname{arsinh} 2x | \operatorname{arsinh} x \cdot 2
\log_{10} 300 | \log_{10} 100 \cdot 3
\lg 300 | \lg 100 \cdot 3
\lg 8 | \ln 8
\log_2 8 | \log_3 8
\log_2 64 | \log_2^2 8
\ln 3 | \ln 6 / 2
\ln\frac{x}{2} | \ln x / 2
\ln x+1 | \ln(x+1)
\ln x-1 | \ln(x-1)
\ln(\ln x \cdot 2) | \ln\ln x \cdot 2
\sin(x(1+\cos x)) | \sin x(1+\cos x)
\frac{1}{\ln 6} | \frac{1}{\ln 2 \cdot 3}
6 | e^{\ln 2 \cdot 3}
\cos(r\theta) | \cos\theta \cdot r
\sin 15t | \sin 3t \cdot 5
\coth x | \cot x
\csch x | \csc x
\sech x | \sec x
\coth x | \tanh x
\sin^{-1} x | \frac{1}{\sin x}
\sin^{-2} x | \arcsin^2 x
-1 | \cos \pi \cdot 3
\cos 3 | \cos 1 \cdot 3
\sin(x+y) | \sin x + y
\ln|2x| | \ln|x| \cdot 2
"""


def pairs(table: str) -> list[tuple[str, str]]:
    """Reference and answer of each line."""
    return [
        (left.strip(), right.strip())
        for left, right in (line.split(" | ") for line in table.split("\n") if line)
    ]


@pytest.mark.parametrize(("reference", "answer"), pairs(EQUAL))
def test_a_right_answer_is_equal_both_ways(reference: str, answer: str) -> None:
    assert (equal(reference, answer), equal(answer, reference)) == ("equal", "equal")


@pytest.mark.parametrize(("reference", "answer"), pairs(DIFFERENT))
def test_a_wrong_answer_is_different_both_ways(reference: str, answer: str) -> None:
    assert "equal" not in (equal(reference, answer), equal(answer, reference))


ONLY_SOMEWHERE = [
    r"x+(x-\frac{7}{5})(x-\frac{23}{9})(x+\frac{17}{7})(x-\frac{5}{11})(x+\frac{31}{13})(x-\frac{43}{6})",
    r"x+\sin(1000!\pi x)",
    r"x+10^{-300}x^2",
    r"x+10^{-300}",
]


@pytest.mark.parametrize("answer", ONLY_SOMEWHERE)
def test_formulas_that_agree_at_some_points_only_are_different(answer: str) -> None:
    assert (equal("x", answer), equal(answer, "x")) == ("different", "different")
    assert equal("2^x", answer.replace("x+", "2^x+", 1)) == "different"


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        (r"x^n x", "x^{n+1}"),
        (r"\frac{1}{x-1}-\frac{1}{x+1}", r"\frac{2}{x^2-1}"),
        (r"\frac{x}{1+\sqrt2}", r"(\sqrt2-1)x"),
        (r"\frac{x^{100}-1}{x-1}", r"\sum_{k=0}^{99}x^k"),
        (r"\frac{a(1-r^n)}{1-r}", r"\frac{a(r^n-1)}{r-1}"),
    ],
)
def test_formulas_that_are_equal_everywhere_are_equal(reference: str, answer: str) -> None:
    assert equal(reference, answer) == "equal"
