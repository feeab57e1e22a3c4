"""Formulas are judged by what they say, and none reaches beyond its place."""

from __future__ import annotations

import pytest

from covey_verify.programs.smt import bad_formulas, smt

pytest.importorskip("z3")
DECLARED = "(declare-const x Int)(declare-const y Int)(declare-const p Bool)"
FORMULA = "(and (> x 2) (< y x) p)"


def judged(answer: str, formula: str = FORMULA, **settings: str) -> tuple[float | None, str]:
    score = smt(f"<answer>{answer}</answer>", DECLARED, formula, **settings)
    return score.value, score.status


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("(and p (>= x 3) (not (>= y x)))", (1.0, "ok")),
        ("(let ((z y)) (and p (>= x 3) (< z x)))", (1.0, "ok")),
        ("(and p (> x 2))", (0.0, "ok")),
        ("p", (0.0, "ok")),
        ("x", (0.0, "unparsable")),
        ("(and p q)", (0.0, "unparsable")),
        ("true)(assert false", (0.0, "unparsable")),
        (f"{FORMULA} (assert false)", (0.0, "unparsable")),
        ("(> x 2)) ; (", (0.0, "unparsable")),
        ('(include "/etc/passwd")', (0.0, "unparsable")),
        ("(" * 9000 + ")" * 9000, (0.0, "unparsable")),
        ("", (0.0, "no_answer")),
    ],
)
def test_a_formula_may_be_written_in_any_way(answer: str, verdict: tuple[float, str]) -> None:
    assert judged(answer) == verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("x = 3, y = -2, p = true", (1.0, "ok")),
        ("p=true\ny=2\nx=3", (1.0, "ok")),
        ("x = 3, y = 3, p = true", (0.0, "ok")),
        ("x = 3, p = true", (0.0, "unparsable")),
        ("x = 3, y = 2, y = 9, p = true", (0.0, "unparsable")),
        ("x = 3, y = 1/2, p = true", (0.0, "unparsable")),
        ("x = 3, y = 2, p = 1", (0.0, "unparsable")),
        ("x = 3, y = 2, p = true, whatever else", (0.0, "unparsable")),
        (FORMULA, (0.0, "unparsable")),
    ],
)
def test_a_witness_makes_the_formula_true(answer: str, verdict: tuple[float, str]) -> None:
    assert judged(answer, ask="witness") == verdict


def test_what_cannot_be_decided_ends_in_time_and_a_broken_gold_is_no_verdict(impatient, monkeypatch) -> None:
    monkeypatch.setattr("covey_verify.programs.smt.LIMITS", impatient)
    cubes = "(= (+ (* x x x) (* y y y)) (+ 33 (* (- 8866128975287528) (* x y))))"
    assert judged("false", cubes)[0] == 0.0
    assert judged("p", "(and p") == (None, "bad_reference")


def test_what_no_witness_can_give_a_value_is_named_before_training() -> None:
    rows = [
        {"declarations": DECLARED, "formula": FORMULA},
        {"declarations": "(declare-const b (_ BitVec 8))", "formula": "(= b #x01)"},
        {"declarations": "(declare-const s String)", "formula": '(= s "a")'},
        {"declarations": "(declare-const a (Array Int Int))", "formula": "(= (select a 0) 1)"},
        {"declarations": DECLARED, "formula": "(and x"},
    ]
    faults = bad_formulas(rows, ask="witness")
    assert faults[0] is None and ["witness" in str(f) for f in faults[1:4]] == [True] * 3
    assert "cannot read" in str(faults[4])
    assert [f is None for f in bad_formulas(rows)] == [True, True, True, True, False]
