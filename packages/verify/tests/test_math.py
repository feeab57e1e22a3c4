"""Right answers in all their forms are paid, wrong ones never, bombs end, nothing is evaluated."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey_verify.mathematics import answers
from covey_verify.mathematics.answers import bad_references, exact_answer, math_answer
from covey_verify.mathematics.notation import number
from covey_verify.mathematics.symbolic import equal
from covey_verify.once import Once
from covey_verify.sandbox.base import Outcome
from covey_verify.sandbox.confine import Limits

pytest.importorskip("latex2sympy2_extended")

EQUAL = r"""
42 | 42.
42 | 42.0
42 | $42$
42 | \text{42}
42 | ４２
007 | 7
1000 | 1,000
1000 | 1{,}000
1000 | 1\,000
1000 | \$1000
-3 | −3
1/2 | 0.5
\frac{1}{2} | \dfrac12
\frac{1}{2} | 2/4
\frac{-1}{2} | -\frac{1}{2}
\frac{7}{3} | 2\frac13
0.\overline{3} | 1/3
3.14 | 3.1416
50\% | 50
90^\circ | 90
\sqrt{2} | \sqrt2
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt{2}}
2\sqrt{3} | \sqrt{12}
x^2-1 | (x-1)(x+1)
\frac{\pi}{4} | 0.25\pi
\binom{5}{2} | 10
5! | 120
e^{i\pi} | -1
\log_2 8 | 3
\sin^2 x+\cos^2 x | 1
10^{-20} | 1\times 10^{-20}
\emptyset | \varnothing
(1,2) | \left(1, 2\right)
\{1,2,3\} | \{3,1,2\}
\{1,2\} | 2, 1
\pm 3 | 3,-3
[0,1) | \left[0,1\right)
(-\infty,3] | x \le 3
x \in (1,2) | 1<x<2
(-\infty, 2) \cup (3, \infty) | (3,\infty)\cup(-\infty,2)
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
x=5 | 5
5 | x=5
5 | x = 2+3 = 5
3x+4y=7 | 6x+8y=14
y=2x+1 | 2x-y+1=0
5 \text{ cm} | 5\,\mathrm{cm}
5 \text{ cm} | 5
204_5 | 204_{5}
\text{(A)} | A
\text{Monday} | monday
3000 | 3\text{ thousand}
3000000 \text{ dollars} | 3 million
36 | 3 dozen eggs
60 \text{ mph} | 60 \text{ miles}/\text{hour}
5\text{ packs of gum} | 5
5\text{ packs of gum} | 5\text{ packs of gum}
5\text{ cm}^2 | 5 square centimeters
5 | \text{5 apples}
3_{10} | 3
(1,2,3) | (1, 2, and 3)
\text{Monday and Tuesday} | Tuesday and Monday
8 | 2³
2.5 | 2½
204_5 | 204₅
1e-05 | 0.00001
1e308 | 10^{308}
x = 1 or x = 2 | 2, 1
x = 1 or x = 2 | x=2, x=1
x = 1 or x = 2 | \{1,2\}
x = 1, 2 | 2, 1
x=1, y=2 | y=2, x=1
1,2,3,... | 1,2,3,\ldots
12 | 3(4)
12 | (3)(4)
1 | \sin^2(1)+\cos^2(1)
2.5x | \frac{5x}{2}
2^{2025} | 2\cdot 2^{2024}
\binom{100}{50} | \frac{100!}{50!50!}
"""
DIFFERENT = r"""
1-1/e | 1
1 | 1+1/e
2^{-99} | 2^{-98}
10^{-20} | 10^{-30}
0.5 | 0.46
1/3 | 0.33
\sqrt{2} | 1.41
6 | 600
9 | 900
50\% | 0.5
12 | 1,2
-5 | 5
x^2 | x^3
\frac{1}{2} | \frac{2}{1}
204_5 | 204_7
5 \text{ m} | 5 \text{ cm}
(1,2) | \{1,2\}
(1,2) | (2,1)
\{1,2\} | \{1,2,3\}
[0,1] | (0,1]
x>3 | x \ge 3
x>3 | x<3
x+z=1 | 1
y=2x+1 | y=2x-1
3x+4y+14=0 | 3x-y+13=0
1,2,\ldots,n | 1,3,5,\ldots,2n-1
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix}
1:2 | 2:1
A | A, B
5 | 5 or 6
5 | 5, 6
5 | 2=3=5
5 | five apples and 6
\text{yes} | yes or no
3 | 3\text{ or 4}
3 | 3 \text{ is wrong, it is 4}
3 | 3 \text{ thousand}
3 | 3 billion
3 | 3 \text{ not}
3 | 3\text{ halves}
3 | 3\text{ probably}
3 | 3\text{或者四}
3 | 3_4
3 | 3_{16}
3 | 3_{four}
3 | 3⟨4⟩
34 | 3\%4
204_5 | 204
2045 | 204₅
A | A_1
yes | yes \text{ or no}
x=1 | x=1\text{ or 2}
(1,2) | (1\text{ or 3},2)
(1,2,3) | (1 or 2, 3)
23 | 2³
10.5 | 2½
7 | 3(4)
42 | 42...
1,2,3 | 1,2,3,...
1,2,3 | 1,2,3,\dots
1 | 1+10^{-41}
1 | 1+0.00000000000000000000000000000000000000001
x^2+1 | x^2+1+10^{-45}
\sqrt{2} | \sqrt{2}(1+10^{-300})
x = 1 or x = 2 | (1,2)
x = 1 or x = 2 | y=1, y=2
x = 1, 2 | (1,2)
1 or 2 | (1,2)
x=1, y=2 | 2, 1
"""
BOMBS = {
    "9^{9^{9^9}}": "too_large",
    "100000000!": "too_large",
    "9999!": "too_large",
    "9" * 401: "too_large",
    "(" * 3000: "too_large",
    r"\binom{10^9}{500000000}": "too_large",
    r"\sum_{k=1}^{1000000000} k^k": "too_large",
    r"\frac{1}{" * 300 + "1" + "}" * 300: "too_large",
    ",".join(map(str, range(2000))): "too_large",
    r"\prod_{k=1}^{10^8} k": "too_large",
    r"2^{10^{10}}": "too_large",
    r"((9!)!)!": "too_large",
    r"{10^9 \choose 5\cdot 10^8}": "too_large",
    r"(9^{9})^{9^{9}}": "too_large",
    r"\Gamma(10^9)": "too_large",
    r"\sqrt{9^{9^9}}": "too_large",
    "2^" * 1900 + "2": "too_large",
    "1e9999": "too_large",
    "|9^9|!": "timeout",
}


INERT = ("__import__('os').system('touch {}')", "[open('{}','w')]", "().__class__.__base__.__subclasses__()")


def rows(table: str) -> list[tuple[str, str]]:
    return [
        (gold, answer) for gold, _, answer in (line.partition(" | ") for line in table.strip().split("\n"))
    ]


def boxed(answer: str, gold: str, **settings):
    return math_answer(f"<think>hm</think>So it is \\boxed{{{answer}}}.", gold, **settings)


@pytest.mark.parametrize(("gold", "answer"), rows(EQUAL))
def test_a_right_answer_is_paid(gold: str, answer: str) -> None:
    assert boxed(answer, gold).value == 1.0
    assert boxed(gold, gold).value == 1.0


@pytest.mark.parametrize(("gold", "answer"), rows(DIFFERENT))
def test_a_wrong_answer_is_not(gold: str, answer: str) -> None:
    assert boxed(answer, gold).value == 0.0


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda b: b[:25])
def test_a_bomb_ends_within_its_limit(bomb: str, impatient: Limits) -> None:
    for gold in ("2", r"\sqrt{2}") if BOMBS[bomb] == "too_large" else ("2",):
        score = boxed(bomb, gold) if "(((" not in bomb else math_answer(f"\\boxed{{{bomb}}}", gold)
        assert (score.value, score.status) == (0.0, BOMBS[bomb])


def test_a_bomb_in_a_thread_is_ended_as_well_and_costs_only_itself(impatient: Limits) -> None:
    found = {}

    def judge(name: str, answer: str) -> None:
        found[name] = boxed(answer, r"\sqrt{2}")

    asked = {"bomb": "|9^9|! + 1", "right": r"2/\sqrt{2}", "wrong": r"\sqrt{3}"}
    threads = [threading.Thread(target=judge, args=pair) for pair in asked.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * impatient.wall)
    assert {n: s.value for n, s in found.items()} == {"bomb": 0.0, "right": 1.0, "wrong": 0.0}


@pytest.mark.parametrize("text", INERT)
def test_nothing_an_answer_says_is_evaluated(text: str, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    for gold in ("2", r"\sqrt{2}"):
        assert boxed(text.format(witness), gold).value == 0.0
    assert not witness.exists()


@pytest.mark.parametrize(
    ("text", "value", "status"),
    [
        ("", 0.0, "no_answer"),
        (" \n", 0.0, "no_answer"),
        ("it is 42", 0.0, "no_answer"),
        (r"\boxed{", 0.0, "no_answer"),
        (r"\boxed{}", 0.0, "no_answer"),
        (r"<think>\boxed{42}", 0.0, "no_answer"),
        (r"<think>\boxed{42}</think>", 0.0, "no_answer"),
        (r"\boxed{7} no wait \boxed{42}", 1.0, "ok"),
        (r"\boxed{42} no wait \boxed{7}", 0.0, "ok"),
        (r"\boxed{\boxed{42}}", 1.0, "ok"),
        (r"\fbox{42}", 1.0, "ok"),
        (r"\boxed{42 or 43}", 0.0, "ambiguous"),
        ("\\boxed{4\u200b2}", 1.0, "ok"),
        ("\\boxed{42\0\ud800}", 0.0, "unparsable"),
    ],
)
def test_every_end_has_its_status(text: str, value: float, status: str) -> None:
    score = math_answer(text, "42")
    assert (score.value, score.status) == (value, status)


@pytest.mark.parametrize(
    ("rule", "text", "gold", "value"),
    [
        ("answer_tag", "<answer>1/2</answer>", "0.5", 1.0),
        ("answer_tag", r"\boxed{1/2}", "0.5", 0.0),
        ("hash4", "so\n#### 1,000", "1000", 1.0),
        ("hash4", "1000", "1000", 0.0),
        ("last_number", "4 or 5, it is $5.00 then", "5", 1.0),
        ("choice", "so (B).", "B", 1.0),
        ("choice", "A, B and so C", "B", 0.0),
        ("choice", r"\boxed{A, B}", "B", 0.0),
        ("whole", "42", "42", 1.0),
    ],
)
def test_one_declared_rule_finds_the_answer(rule: str, text: str, gold: str, value: float) -> None:
    assert math_answer(text, gold, rule=rule).value == value


def test_a_worked_solution_is_a_gold() -> None:
    assert math_answer(r"\boxed{72}", "48/2 = <<48/2=24>>24\n48+24=72\n#### 72").value == 1.0


def test_a_gold_that_is_no_answer_judges_nobody() -> None:
    for gold in ("", "see the figure on the left"):
        score = boxed("4", gold)
        assert (score.value, score.status) == (None, "bad_reference")


def test_a_bomb_that_is_seen_costs_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "verifier_server", None)
    for bomb in (r"9^{9^{9^{9}}}", r"((9!)!)!", r"\binom{10^9}{5\cdot10^8}"):
        assert boxed(bomb, r"\sqrt{2}").status == "too_large"


def test_garbage_costs_no_child_and_is_judged_as_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("4 4", "6"), ("4+", "1/2"), ("\ufffd6", "1"), ("5\x121", "x"), ("3 = ", "3"), ("1.2.3", "0.5")]
    by_algebra = [equal(gold, text) for text, gold in pairs[:4]]
    monkeypatch.setattr(answers, "verifier_server", None)
    scores = [boxed(text, gold) for text, gold in pairs]
    assert by_algebra == ["answer"] * 4 and {s.value for s in scores} == {0.0}
    assert {s.status for s in scores[:4]} == {"unparsable"}


def test_equal_answers_to_a_problem_cost_one_child(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Server:
        def call(self, function: str, *pair: str, **_: object) -> Outcome:
            calls.append(pair)
            time.sleep(0.05)  # so that the others ask while it is asked
            return Outcome("lost" if "lost" in pair[1] else "timeout")

    monkeypatch.setattr(answers, "verifier_server", lambda _: Server())
    monkeypatch.setattr(answers, "ASKED", Once(10, kept=answers.ASKED.kept))
    with ThreadPoolExecutor(16) as pool:
        scores = list(pool.map(lambda _: boxed(r"\sqrt{17}", r"\sqrt{18}"), range(64)))
    assert {s.status for s in scores} == {"timeout"} and len(calls) == 1
    assert [boxed(r"\sqrt{lost}", r"\sqrt{18}").value for _ in range(2)] == [None, None]
    assert len(calls) == 3  # what the machine lost is asked again


def test_a_question_that_raises_is_asked_again() -> None:
    once: Once[int] = Once(2, kept=lambda _: True)
    with pytest.raises(ZeroDivisionError):
        once.get("a", lambda: 1 // 0)
    assert [once.get(q, lambda q=q: ord(q)) for q in "abca"] == [97, 98, 99, 97]
    assert once.get("a", lambda: 0) == 97 and once.get("b", lambda: 0) == 0  # two are kept


def test_percent_signs_mean_what_the_setting_says() -> None:
    for gold, answer, ignored, hundredths in (
        (r"50\%", "50", 1.0, 0.0),
        (r"50\%", "0.5", 0.0, 1.0),
        ("0.5", r"50\%", 0.0, 1.0),
        (r"50\%", "50 percent", 1.0, 1.0),
        (r"\frac{1}{\sqrt{2}}", r"50\sqrt{2}\%", 0.0, 1.0),
    ):
        assert boxed(answer, gold).value == ignored
        assert boxed(answer, gold, percent="hundredths").value == hundredths


@pytest.mark.parametrize(
    "answer", [r"3\text{ or 4}", "3 maybe", r"3 \text{ not}", r"\text{not } 3", "{3, 4}"]
)
def test_a_hedged_answer_is_ambiguous(answer: str) -> None:
    assert boxed(answer, "3").status == "ambiguous"


def test_golds_that_are_no_answers_are_found_before_training() -> None:
    golds = [None, math.nan, "null", "N/A", r"\text{None}", "Answers may vary.", r"\text{Answers may vary}"]
    golds += ["see a figure", r"\text{see a figure}", r"5 \text{ answers may vary}", r"9^{9^{9}}"]
    assert [
        g for g, c in zip(golds, bad_references([{"answer": g} for g in golds]), strict=True) if c is None
    ] == []
    for gold in golds:
        assert boxed("5", str(gold)).status == "bad_reference"
    fine = ["no", r"\text{no solution}", "infinity", "undefined", "1e308", r"5\text{ packs of gum}", "x y z"]
    fine += [r"\text{Alice, Bob, and Carol}", "New York", r"\text{(B)}", "1e-05"]
    assert bad_references([{"answer": g} for g in fine]) == [None] * len(fine)


def test_a_gold_that_hangs_takes_its_own_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    granted = []

    class Server:
        def call(self, function: str, golds: list[str], limits: Limits) -> Outcome:
            hangs = "x+7" in golds
            granted.append(limits.cpu if hangs else 0)
            return Outcome("timeout") if hangs else Outcome("ok", [True] * len(golds))

    monkeypatch.setattr(answers, "verifier_server", lambda _: Server())
    complaints = bad_references([{"answer": f"x+{n}"} for n in range(50)])
    assert [n for n, c in enumerate(complaints) if c] == [7]
    assert sum(granted) <= 3 * answers.SYMBOLIC_LIMITS.cpu


def test_bad_references_are_found_before_training() -> None:
    golds = ["42", r"\frac{1}{2}", "", "see the figure on the left", "9" * 500, r"\frac{1", "x+1", "yes"]
    complaints = bad_references([{"answer": g} for g in golds])
    assert [c is not None for c in complaints] == [False, False, True, True, True, True, False, False]
    assert "empty" in str(complaints[2])
    assert "sentence" in str(complaints[3])


def test_a_second_opinion_is_logged_and_never_paid() -> None:
    pytest.importorskip("math_verify")
    assert boxed("1/2", "0.5", second=1.0).metrics == {"second_disagrees": 0.0}
    score = boxed("2^{-98}", "2^{-99}", second=1.0)  # math-verify rounds
    assert (score.value, score.metrics) == (0.0, {"second_disagrees": 1.0})
    assert boxed("1/2", "0.5").metrics == {}
    asked = [bool(boxed(str(n), "7", second=0.25).metrics) for n in range(40)]
    assert 2 < sum(asked) < 20
    assert asked == [bool(boxed(str(n), "7", second=0.25).metrics) for n in range(40)]


def test_exact_answers_are_folded_but_never_numbers_made_equal() -> None:
    def value(text: str, gold: str, **settings) -> float | None:
        return exact_answer(f"<answer>{text}</answer>", gold, **settings).value

    assert value("  Paris\n", "paris") == 1.0
    assert value("Ｐaris", "Paris") == 1.0
    assert value("paris", "Paris", fold="none") == 0.0
    assert value("5", "-5") == 0.0
    assert value("7", "007") == 0.0


@given(st.integers(-(10**30), 10**30))
def test_integers_are_read_in_every_way_they_are_written(n: int) -> None:
    for text in (f"{n}", f"{n:,}", f"{n}.0", f"{n}.", rf"\text{{{n}}}", f"${n}$"):
        assert number(text) == n, text


@given(st.fractions(max_denominator=10**6))
def test_fractions_are_exact(f: Fraction) -> None:
    assert number(f"{f.numerator}/{f.denominator}") == f
    sign = "-" if f < 0 else ""
    assert number(rf"{sign}\frac{{{abs(f.numerator)}}}{{{f.denominator}}}") == f


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_two_integers_are_equal_only_if_they_are(a: int, b: int) -> None:
    assert boxed(str(a), str(b)).value == float(a == b)


@settings(max_examples=40, deadline=None)
@given(
    st.text(
        st.sampled_from("0123456789aXx,.;:±%$^_-+*/=<>!(){}[]|\\~ \n½²√∞∪π") | st.characters(), max_size=20
    )
)
def test_no_text_raises(text: str) -> None:
    assert math_answer(text, "42", rule="whole").value in (0.0, 1.0)
