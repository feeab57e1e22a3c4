"""Right answers in all their forms are paid, wrong ones never, bombs end, nothing is evaluated."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from answer_pairs import DIFFERENT, EQUAL, pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from covey_verify.mathematics import answers
from covey_verify.mathematics.answers import bad_references, empty_references, exact_answer, math_answer
from covey_verify.once import Once
from covey_verify.sandbox.base import Outcome
from covey_verify.sandbox.confine import Limits

pytest.importorskip("sympy")

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
    "|9^9|!": "too_large",
    r"\sum_{a=1}^{9999}\sum_{b=1}^{9999}\sin(ab)": "timeout",
}


INERT = ("__import__('os').system('touch {}')", "[open('{}','w')]", "().__class__.__base__.__subclasses__()")


def boxed(answer: str, gold: str, **settings):
    return math_answer(f"<think>hm</think>So it is \\boxed{{{answer}}}.", gold, **settings)


@pytest.mark.parametrize(("mechanism", "reference", "answer"), pairs(EQUAL))
def test_a_right_answer_is_paid(mechanism: str, reference: str, answer: str) -> None:
    assert boxed(answer, reference).value == 1.0
    assert boxed(reference, reference).value == 1.0
    if "both ways" in mechanism:
        assert boxed(reference, answer).value == 1.0


@pytest.mark.parametrize(("mechanism", "reference", "answer"), pairs(DIFFERENT))
def test_a_wrong_answer_is_not(mechanism: str, reference: str, answer: str) -> None:
    score = boxed(answer, reference)
    assert score.value == 0.0
    assert score.detail or (answer.isdigit() and reference.isdigit())
    if "both ways" in mechanism:
        assert boxed(reference, answer).value == 0.0


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("-2", r"\sqrt[3]{-8}"),
        (r"\ln\frac ab", r"\ln a-\ln b"),
        (r"2\ln x", r"\ln x^2"),
        (r"\sqrt{xy}", r"\sqrt x\sqrt y"),
        ("x^{1/3}", r"\sqrt[3]{x}"),
        ("4", "(-8)^{2/3}"),
        ("x^{2/3}", r"\sqrt[3]{x^2}"),
        (r"-\sqrt[3]{x}", r"\sqrt[3]{-x}"),
    ],
)
def test_a_real_reading_is_declared_by_a_setting_or_by_the_row(reference: str, answer: str) -> None:
    assert boxed(answer, reference, reading="real").value == 1.0
    if "x^{1/3}" not in reference:
        assert boxed(answer, reference).value == 0.0
    for other, wrong in (("x", r"\sqrt{x^2}"), ("-2", "2"), ("1", r"\sqrt{-1}"), (r"\sqrt x", r"\sqrt{-x}")):
        assert boxed(wrong, other, reading="real").value == 0.0
    rows = [{"answer": reference, "reading": reading} for reading in ("real", "complex", None, "Real")]
    assert ["reading" in str(fault) for fault in bad_references(rows)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("reference", "answer", "fraction"),
    [("1:2", "2:4", 1.0), ("4:3", r"\frac43", 1.0), (r"\frac43", "8:6", 1.0), ("1:2:3", "2:4:6", 1.0),
     ("1:2", "2:1", 0.0), ("1:2:3", "1:3:2", 0.0), ("4:3", r"\frac34", 0.0)],
)  # fmt: skip
def test_ratios_mean_what_the_setting_says(reference: str, answer: str, fraction: float) -> None:
    assert boxed(answer, reference).value == 0.0
    assert boxed(answer, reference, ratio="fraction").value == fraction


def test_a_refusal_says_why() -> None:
    asked = {
        ("5 m", r"5\text{ s}"): "the unit is s, not m",
        ("5", r"2 = 3 = 5"): "a member of the chain is false",
        (r"\sqrt{x^2}", "x"): "they differ at x = ",
        (r"\ln x^2", r"2\ln x"): "only one of the formulas is real at x = ",
        ("x", r"\frac{a}{b}/cd"): "a/bc may mean (a/b)c or a/(bc)",
        ("0.5", r"0.5\%"): "percent: hundredths",
        ("(1,2)", r"\{1,2\}"): "a set for a tuple",
    }
    for (reference, answer), reason in asked.items():
        assert reason in boxed(answer, reference).detail, reference


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda b: b[:25])
def test_a_bomb_ends_within_its_limit(bomb: str, impatient: Limits) -> None:
    for gold in ("2", r"\sqrt{2}") if BOMBS[bomb] == "too_large" else ("2",):
        score = boxed(bomb, gold) if "(((" not in bomb else math_answer(f"\\boxed{{{bomb}}}", gold)
        assert (score.value, score.status) == (0.0, BOMBS[bomb])


def test_a_bomb_in_a_thread_is_ended_as_well_and_costs_only_itself(impatient: Limits) -> None:
    found = {}

    def judge(name: str, answer: str) -> None:
        found[name] = boxed(answer, r"\sqrt{2}")

    asked = {
        "bomb": r"\sum_{a=1}^{9999}\sum_{b=1}^{9999}\sin(ab)",
        "right": r"2/\sqrt{2}",
        "wrong": r"\sqrt{3}",
    }
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


def test_what_cannot_be_read_costs_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("4 4", "6"), ("4+", "1/2"), ("\ufffd6", "1"), ("5\x121", "x"), ("3 = ", "3"), ("1.2.3", "0.5")]
    monkeypatch.setattr(answers, "verifier_server", None)
    scores = [boxed(text, gold) for text, gold in pairs]
    assert {s.value for s in scores} == {0.0} and all(s.detail for s in scores)
    assert {s.status for s in scores[:4]} == {"unparsable"}


def test_numbers_and_rational_functions_cost_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "verifier_server", None)
    for reference, answer in (
        (r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("2i", r"\sqrt{-4}"),
    ):
        assert boxed(answer, reference).value == 1.0
        assert boxed(answer + "+1", reference).value == 0.0


def test_equal_answers_to_a_problem_cost_one_child(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Server:
        def call(self, function: str, *pair: str, **_: object) -> Outcome:
            calls.append(pair)
            time.sleep(0.05)  # so that the others ask while it is asked
            return Outcome("lost" if "lost" in pair[1] else "timeout")

    monkeypatch.setattr(answers, "verifier_server", lambda _: Server())
    monkeypatch.setattr(answers, "OUTCOMES", Once(10, keeps=answers.OUTCOMES.keeps))
    with ThreadPoolExecutor(16) as pool:
        scores = list(pool.map(lambda _: boxed(r"\sin 17", r"\sin 18"), range(64)))
    assert {s.status for s in scores} == {"timeout"} and len(calls) == 1
    assert [boxed(r"\sin l_{lost}", r"\sin 18").value for _ in range(2)] == [None, None]
    assert len(calls) == 3  # what the machine lost is asked again


def test_a_question_that_raises_is_asked_again() -> None:
    once: Once[int] = Once(2, keeps=lambda _: True)
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
    assert value("10³", "103") == 0.0
    assert value("10³ m²", "10^3 m^2") == 1.0


@pytest.mark.parametrize("reference", ["", " \n", None])
def test_a_row_without_a_reference_pays_no_text(reference: object) -> None:
    for text in ("", "<answer>None</answer>", "Paris"):
        score = exact_answer(text, reference)  # type: ignore[arg-type]
        assert (score.value, score.status) == (None, "bad_reference")
    rows = [{"answer": reference}, {"answer": "x"}]
    assert empty_references(rows) == ["the reference answer is empty", None]


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


def test_without_sympy_only_what_needs_it_is_left_unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "has_algebra", lambda: False)
    references = ["42", r"\frac{\sqrt2}{2}", "x^2-1", r"\{1, 2\}", r"\ln 2", r"\sqrt[3]{2}"]
    assert ["SymPy" in str(f) for f in bad_references([{"answer": r} for r in references])] == [False] * 4 + [
        True
    ] * 2
    assert boxed("(x-1)(x+1)", "x^2-1").value == 1.0
    assert boxed(r"\frac{\ln 4}{2}", r"\ln 2").status == "not_applicable"
