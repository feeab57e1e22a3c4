"""Rewards for final answers: mathematics and plain text, compared with the gold in column `answer`."""

from __future__ import annotations

import importlib.util
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from covey.rewards.compare import compare, exact
from covey.rewards.contract import fault, reward
from covey.rewards.extract import Completion, Rule, extract, hash4
from covey.rewards.notation import SENTENCE, Node, clean, parse, too_large, value
from covey.sandbox.client import verifier_server
from covey.sandbox.confine import Limits
from covey.types import Score, Status

LIMITS = Limits(wall=6.0, cpu=2, memory=2 << 30)
SYMBOLIC = "covey.rewards.symbolic"
AT_ONCE = 50
"""Golds that one child checks."""
FORMS = {
    "boxed": "The answer is \\boxed{{{}}}.",
    "answer_tag": "<answer>{}</answer>",
    "hash4": "So it is.\n#### {}",
    "last_number": "The answer is {}",
    "choice": "({})",
    "whole": "{}",
}
"""How a right completion ends under each rule."""


def gold_of(answer: Any) -> str:
    """The gold of a row; a worked solution that ends in `#### number` counts as that number."""
    text = str(answer)
    return hash4(text) or text.strip()


def example(row: Mapping[str, Any], rule: Rule = "boxed", **_: Any) -> str:
    """A completion with the right answer."""
    return FORMS[rule].format(gold_of(row["answer"]))


def bad_golds(rows: Sequence[Mapping[str, Any]], **_: Any) -> list[str | None]:
    """Golds that no answer can equal: empty, or neither number nor word nor formula."""
    golds = [gold_of(row["answer"]) for row in rows]
    wrong: list[str | None] = [None] * len(golds)
    formulas = []
    for i, gold in enumerate(golds):
        if not gold:
            wrong[i] = "the gold is empty"
        elif too_large(gold):
            wrong[i] = f"the gold is too large: {gold[:60]!r}"
        elif SENTENCE.fullmatch(gold):
            wrong[i] = f"the gold is a sentence, no answer: {gold[:60]!r}"
        elif not _is_plain(parse(clean(gold))):
            formulas.append(i)
    if formulas and not has_algebra():
        needs = "the gold is a formula; comparing it needs SymPy: pip install 'covey[math]'"
        return [needs if i in formulas else w for i, w in enumerate(wrong)]
    for start in range(0, len(formulas), AT_ONCE):
        some = formulas[start : start + AT_ONCE]
        for i, readable in zip(some, _readable([golds[i] for i in some]), strict=True):
            wrong[i] = None if readable else f"the gold cannot be read: {golds[i][:60]!r}"
    return wrong


def _readable(golds: list[str]) -> list[bool]:
    """Whether each can be parsed; one that takes its child down is found by asking one by one."""
    limits = Limits(LIMITS.wall * len(golds), LIMITS.cpu * len(golds), LIMITS.memory)
    result = verifier_server(SYMBOLIC).call(f"{SYMBOLIC}:readable", golds, limits=limits)
    if result.kind == "ok":
        return list(result.value)
    return [False] if len(golds) == 1 else [r for gold in golds for r in _readable([gold])]


def wrong(_: Mapping[str, Any], rule: Rule = "boxed", **__: Any) -> str:
    """A completion whose answer is none."""
    return FORMS[rule].format("canary")


@reward(concurrent=True, check_golds=bad_golds, example=example, wrong=wrong)
def math_answer(completion: Completion, answer: Any, *, rule: Rule = "boxed", second: float = 0.0) -> Score:
    """1 if the answer that ``rule`` finds equals the gold, else 0; None if the gold is no answer.

    Numbers are compared exactly, and tuples, sets, intervals, matrices and relations part by part;
    what is left is algebra, done by SymPy in a killable child. Of the share ``second`` of all answers
    math-verify is asked as well; how often it disagrees is logged, its opinion never paid.
    """
    gold = gold_of(answer)
    score = _judged(gold, extract(completion, rule))
    found = score.extracted
    asked = found is not None and score.value is not None and score.status in ("ok", "unparsable")
    if not asked or zlib.crc32(f"{gold}\0{found}".encode(errors="replace")) >= second * 2**32:
        return score
    other = verifier_server(SYMBOLIC).call(f"{SYMBOLIC}:second_opinion", gold, found, limits=LIMITS)
    if other.kind != "ok":
        return score
    return replace(score, parts={"second_disagrees": float(other.value != (score.value == 1.0))})


def _judged(gold: str, found: str | None) -> Score:
    """What an extracted answer is worth."""
    if found is None:
        return Score(0.0, "no_answer")
    if found.isascii() and found.isdigit() and gold.isascii() and gold.isdigit() and len(found) <= 400:
        return Score(float(int(found) == int(gold)), extracted=found)
    if too_large(found):
        return Score(0.0, "too_large", found[:200])
    if not gold or too_large(gold) or SENTENCE.fullmatch(gold):
        return Score(None, "bad_gold", found)
    ours, theirs = parse(clean(gold)), parse(clean(found))
    equal = compare(ours, theirs, exact)
    if equal is None:
        return _by_algebra(gold, found, ours)
    several = theirs.kind in ("list", "set") and ours.kind in ("leaf", "text") and not equal
    return Score(float(equal), "ambiguous" if several else "ok", found)


def _by_algebra(gold: str, found: str, ours: Node) -> Score:
    if not has_algebra():
        if _is_plain(ours):
            return Score(0.0, "unparsable", found, detail="only covey[math] could read it")
        return Score(None, "not_applicable", found, detail="the gold needs covey[math]")
    result = verifier_server(SYMBOLIC).call(f"{SYMBOLIC}:equal", gold, found, limits=LIMITS)
    if result.kind != "ok":
        return Score(None if result.kind == "lost" else 0.0, fault(result), found, detail=result.text)
    verdicts: dict[Any, tuple[float, Status]] = {
        "equal": (1.0, "ok"),
        "different": (0.0, "ok"),
        "answer": (0.0, "unparsable"),
    }
    if result.value not in verdicts:
        return Score(None, "bad_gold", found)
    return Score(*verdicts[result.value], found)


def _is_plain(node: Node) -> bool:
    """Whether the exact comparison knows all about it: numbers, words and what is made of them."""
    if node.parts:
        return all(map(_is_plain, node.parts))
    return node.kind == "text" or value(node.text) is not None or len(node.text) == 1


@cache
def has_algebra() -> bool:
    """Whether the `math` extra is installed."""
    return importlib.util.find_spec("latex2sympy2_extended") is not None


@reward(
    concurrent=True,
    example=lambda row, rule="answer_tag", **_: FORMS[rule].format(row["answer"]),
    wrong=lambda row, rule="answer_tag", **_: wrong(row, rule),
)
def exact_answer(
    completion: Completion, answer: Any, *, rule: Rule = "answer_tag", fold: Literal["case", "none"] = "case"
) -> Score:
    """1 if the extracted text equals the gold up to width, spaces and (unless ``fold`` is none) case."""
    found = extract(completion, rule)
    if found is None:
        return Score(0.0, "no_answer")
    return Score(float(_folded(found, fold) == _folded(str(answer), fold)), extracted=found[:500])


def _folded(text: str, fold: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    return " ".join((text.casefold() if fold == "case" else text).split())
