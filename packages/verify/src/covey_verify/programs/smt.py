"""The reward for formulas, judged by Z3 in a killable subprocess: equivalence, or a witness."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from covey_verify.contract import LIMITS, reward, score_without_result
from covey_verify.extract import FORMS, Rule, TextOrMessages, Turns, extract
from covey_verify.sandbox.client import verifier_server
from covey_verify.types import Score, Status

HERE = "covey_verify.programs.smt"
PER_PROCESS = 50
"""Number of rows that one subprocess checks before a run."""
BOOLEANS = {"true": True, "false": False}
Ask = Literal["equivalent", "witness"]
SCORES: Mapping[str, tuple[float | None, Status]] = {
    "yes": (1.0, "ok"), "no": (0.0, "ok"), "unreadable": (0.0, "unparsable"),
    "undecided": (0.0, "timeout"), "bad reference": (None, "bad_reference"),
}  # fmt: skip
# `name = value` with a truth, an integer, a fraction or a decimal, up to a separator or the end.
ASSIGNMENT = re.compile(
    r"\s*([A-Za-z_]\w*)\s*=\s*(true|false|-?\d{1,300}(?:/[1-9]\d*|\.\d+)?)\s*(?:[,;\n]|$)"
)


def _example(row: Mapping[str, object], ask: Ask = "equivalent", rule: Rule = "answer_tag") -> str | None:
    return FORMS[rule].format(row["formula"]) if ask == "equivalent" else None


def bad_formulas(
    rows: Sequence[Mapping[str, object]], ask: Ask = "equivalent", **_: object
) -> list[str | None]:
    """Return the fault of each row whose formula no answer can satisfy; None for the others."""
    if importlib.util.find_spec("z3") is None:
        return [None] * len(rows)  # the reward's `requires` reports that
    complaints: list[str | None] = []
    for start in range(0, len(rows), PER_PROCESS):
        chunk = [[row.get("declarations"), row.get("formula")] for row in rows[start : start + PER_PROCESS]]
        result = verifier_server("z3", HERE).call(f"{HERE}:faults", chunk, ask, limits=LIMITS)
        complaints += result.value if result.kind == "ok" else [None] * len(chunk)
    return complaints


def faults(formulas: Sequence[tuple[str, str]], ask: Ask) -> list[str | None]:
    """Return the fault of each (declarations, formula) or None; called in a subprocess."""
    import z3

    complaints: list[str | None] = []
    for declarations, formula in formulas:
        term = _term(str(declarations), str(formula))
        constants = z3.z3util.get_vars(term) if term is not None and ask == "witness" else []
        odd = [c for c in constants if not (z3.is_arith(c) or z3.is_bool(c))]
        if term is None:
            complaints.append(f"Z3 cannot read the formula: {str(formula)[:60]!r}")
        elif odd:
            complaints.append(
                f"ask: witness gives values to numbers and truths; {odd[0]} is a {odd[0].sort()}"
            )
        else:
            complaints.append(None)
    return complaints


@reward(
    concurrent=True,
    verdict=True,
    requires=("z3",),
    check_references=bad_formulas,
    example=_example,
    counterexample=lambda row, rule="answer_tag", **_: FORMS[rule].format(f"(not {row['formula']})"),
)
def smt(
    completion: TextOrMessages,
    declarations: str,
    formula: str,
    turns: Turns = (),
    *,
    ask: Ask = "equivalent",
    rule: Rule = "answer_tag",
) -> Score:
    """Return 1 if the answer is equivalent to ``formula``, or makes it true, else 0; both in SMT-LIB.

    `equivalent`: the answer is one formula over the same ``declarations``. `witness`: it gives each of their
    constants a value, `x = 3, y = -1/2, p = true`. The score is 0 if Z3 cannot decide in time.
    """
    extracted = extract(completion, rule, turns)
    if extracted is None:
        return Score(0.0, "no_answer")
    server = verifier_server("z3", HERE)
    result = server.call(f"{HERE}:z3_verdict", declarations, formula, extracted, ask, limits=LIMITS)
    if result.kind != "ok":
        return score_without_result(result, extracted[:500])
    return Score(*SCORES[result.value], extracted[:500])


def z3_verdict(declarations: str, formula: str, answer: str, ask: Ask) -> str:
    """Return Z3's verdict, a key of SCORES; called in a subprocess."""
    import z3

    expected = _term(declarations, formula)
    if expected is None:
        return "bad reference"
    if ask == "equivalent":
        theirs = _term(declarations, answer) if is_one_term(answer) else None
        if theirs is None:
            return "unreadable"
        claim = expected == theirs
    else:
        assignments = ASSIGNMENT.findall(answer)
        values = dict(assignments)
        constants = {str(c): c for c in z3.z3util.get_vars(expected) if z3.is_arith(c) or z3.is_bool(c)}
        rest = ASSIGNMENT.sub("", answer).strip()
        # Unreadable: text between the assignments, a name twice, or a constant without a value.
        if rest or len(values) < len(assignments) or not constants.keys() <= values.keys():
            return "unreadable"
        pairs = []
        for name, constant in constants.items():
            value = BOOLEANS.get(values[name], values[name])
            try:
                pairs.append((constant, constant.sort().cast(value)))
            except z3.Z3Exception:
                return "unreadable"  # a fraction for a whole number
        claim = z3.substitute(expected, *pairs)
    solver = z3.Solver()
    # The claim always holds if its negation has no model.
    solver.add(z3.Not(claim))
    return {"unsat": "yes", "sat": "no"}.get(str(solver.check()), "undecided")


def _term(declarations: str, text: str) -> object:
    """Return a formula over declared constants; None if it cannot be parsed."""
    import z3

    try:
        (term,) = z3.parse_smt2_string(f"{declarations}(assert {text})")
    except (z3.Z3Exception, ValueError):
        return None
    return term


def is_one_term(text: str) -> bool:
    """Return whether a text is one word or one balanced pair, so it cannot close the assert around it.

    >>> is_one_term("(and p (not q))"), is_one_term("p"), is_one_term("true) (assert false")
    (True, True, False)
    """
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0 or character in '|";':
            return False
        if depth == 0 and index < len(text) - 1 and text[0] == "(":
            return False  # the first pair is closed, and text follows it
    return depth == 0 and (text.startswith("(") or text.isidentifier())
