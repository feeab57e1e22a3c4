"""Rewards for final answers: mathematics and plain text, compared with the reference in column `answer`."""

from __future__ import annotations

import importlib.util
import re
import unicodedata
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Literal, NamedTuple, get_args

from covey_verify.contract import reward, score_without_result
from covey_verify.errors import ConfigError
from covey_verify.extract import FORMS, Rule, TextOrMessages, Turns, extract, hash4
from covey_verify.mathematics.compare import STATEMENTS, Comparison, Percent, Ratio, Reading, fold_words
from covey_verify.mathematics.exact import decidable
from covey_verify.mathematics.reader import read_answer
from covey_verify.mathematics.tree import Node, TooLarge, Unreadable
from covey_verify.mathematics.units import HEDGES, NO_NOUNS, UNKNOWN
from covey_verify.once import Once
from covey_verify.sandbox.base import Outcome
from covey_verify.sandbox.client import verifier_server
from covey_verify.sandbox.confine import Limits
from covey_verify.types import Fraction, Score, Status

SYMBOLIC_LIMITS = Limits(wall=6.0, cpu=2, memory=2 << 30)
SYMBOLIC = "covey_verify.mathematics.symbolic"
NEEDS_ALGEBRA = "comparing it needs SymPy: pip install 'covey-verify[math]'"
OUTCOMES: Once[Outcome] = Once(2048, keeps=lambda result: result.kind != "lost")
"""Outcomes of subprocesses, timeouts included: equal answers to a problem cost one subprocess."""
NO_ANSWER = frozenset(
    """nan|none|null|n/a|n.a|nil|tbd|tba|unknown|unspecified|varies|answers vary|answer varies|not available
    |not applicable|no answer|see solution|see figure|see above""".replace("\n    ", "").split("|")
)
"""The words of data sets for a missing answer."""


GLUED = re.compile(r"[A-Za-z] ?\^ ?\d\d")
"""A power of a letter with several digits and no braces, of which TeX raises the first."""


def reference_of(answer: object) -> str:
    """Return the reference answer of a row: the number after `####`, if it is a worked solution."""
    text = str(answer)
    return hash4(text) or text.strip()


def _example(row: Mapping[str, object], rule: Rule = "boxed", **_: object) -> str:
    """Return a completion with the correct answer."""
    return FORMS[rule].format(reference_of(row["answer"]))


def bad_references(
    rows: Sequence[Mapping[str, object]], reading: Reading | None = None, **_: object
) -> list[str | None]:
    """Return the fault of each row's reference, such as being empty, a sentence or unreadable, or None."""
    return [_fault(row, reading) for row in rows]


def _fault(row: Mapping[str, object], reading: Reading | None) -> str | None:
    declared = reading or row.get("reading")
    if declared not in (None, *get_args(Reading)):
        return f"column 'reading' has to be real or complex, not {declared!r}"
    node = _read_reference(reference_of(row["answer"]))
    if isinstance(node, ReferenceFault):
        return node.text
    return None if has_algebra() or decidable(node) else f"the reference answer is a formula; {NEEDS_ALGEBRA}"


class ReferenceFault(NamedTuple):
    """The reason why no answer can be compared with a reference answer."""

    text: str
    unreadable: bool = False
    """Whether the reader does not understand it; an answer with the same words is right all the same."""


@lru_cache(4096)
def _read_reference(reference: str) -> Node | ReferenceFault:
    """Return a reference answer's tree, or its fault."""
    shown = repr(reference[:60])
    if not reference:
        return ReferenceFault("the reference answer is empty")
    if reference == "NA" or reference.casefold().strip(" .?!") in NO_ANSWER:
        return ReferenceFault(f"the reference answer is no answer: {shown}")
    try:
        node = read_answer(reference)
    except TooLarge as error:
        return ReferenceFault(f"the reference answer is too large: {shown} ({error})")
    except Unreadable as error:
        return ReferenceFault(f"the reference answer cannot be read: {shown} ({error})", unreadable=True)
    if node.text.casefold().strip(" .?!") in NO_ANSWER:
        return ReferenceFault(f"the reference answer is no answer: {shown}")
    if any(map(_is_sentence, _texts(node))):
        return ReferenceFault(f"the reference answer is a sentence, no answer: {shown}")
    return node


def _texts(node: Node) -> Iterator[str]:
    """Yield the words in an answer: its texts, and its unknown units."""
    if node.kind == "text" or node.text.startswith(UNKNOWN):
        yield node.text
    # Conditions of cases may be sentences.
    for part in node.parts[::2] if node.kind == "piecewise" else node.parts:
        yield from _texts(part)


def _is_sentence(text: str) -> bool:
    """Return whether a text has three words or more; if it is an unknown unit, a word that is not a noun."""
    words = re.findall(r"[^\W\d_]+", text)
    if fold_words(text) in STATEMENTS.values():
        return False
    if text.startswith(UNKNOWN):
        return any(word in NO_NOUNS for word in words)
    if text.casefold().startswith("no "):  # no real solutions
        return len(words) > 4
    return len(words) > 2 and sum(len(word) > 1 for word in words) > 1


def _counterexample(_: Mapping[str, object], rule: Rule = "boxed", **__: object) -> str:
    """Return a completion whose answer is always incorrect."""
    return FORMS[rule].format("canary")


@reward(
    concurrent=True,
    verdict=True,
    check_references=bad_references,
    example=_example,
    counterexample=_counterexample,
)
def math_answer(
    completion: TextOrMessages,
    answer: object,
    turns: Turns = (),
    *,
    rule: Rule = "boxed",
    percent: Percent = "ignored",
    ratio: Ratio = "exact",
    reading: Reading | None = None,
    second: Fraction = 0.0,
) -> Score:
    """Return 1 if the answer that ``rule`` finds equals the reference answer, else 0; None without a
    reference.

    Numbers and rational functions are compared exactly, structures (tuples, sets, intervals, matrices,
    relations, cases) part by part, and other formulas in a killable subprocess. With ``percent`` `ignored`
    50% equals 50, with `hundredths` it equals 0.5. With ``ratio`` `fraction` 2:4 equals 1:2 and 1/2.
    ``reading``, a setting or a column, is `complex` (principal values) or `real`: odd roots of negative
    numbers are real, and formulas are compared where both are real. For the fraction ``second`` of all
    answers math-verify is asked as well; the rate of its disagreement is logged and never changes the score.
    """
    if second and not _is_installed("math_verify"):
        raise ConfigError("math_answer: second asks math-verify: pip install 'covey-verify[second]'")
    reference = reference_of(answer)
    score = _score_answer(reference, extract(completion, rule, turns), (percent, ratio, reading or "complex"))
    extracted = score.extracted
    judged = score.value is not None and score.status in ("ok", "unparsable", "ambiguous")
    if extracted is None or not judged:
        return score
    # The hash of both texts chooses the same answers in every process and every run.
    if zlib.crc32(f"{reference}\0{extracted}".encode(errors="replace")) >= second * 2**32:
        return score
    second_verdict = _ask("second_opinion", reference, extracted)
    if second_verdict.kind != "ok":
        return score
    disagrees = second_verdict.value != (score.value == 1.0)
    return replace(score, metrics={"second_disagrees": float(disagrees)})


def _score_answer(reference: str, answer: str | None, policies: tuple[Percent, Ratio, Reading]) -> Score:
    """Return the score of an extracted answer; the cheapest comparisons come first."""
    if answer is None:
        return Score(0.0, "no_answer")
    # The most common case needs no parser: both are plain digits.
    if len(answer) <= 400 and all(text.isascii() and text.isdigit() for text in (answer, reference)):
        return Score(float(int(answer) == int(reference)), extracted=answer)
    ours = _read_reference(reference)
    if isinstance(ours, ReferenceFault):
        if ours.unreadable and answer.split() == reference.split():
            return Score(1.0, extracted=answer)
        return Score(None, "bad_reference", answer, detail=ours.text)
    if GLUED.search(answer) and not GLUED.search(reference):
        return Score(0.0, "ambiguous", answer, detail="x^23 is x^2 times 3 in print: write x^{23}")
    try:
        theirs = read_answer(answer)
    except TooLarge as error:
        return Score(0.0, "too_large", answer[:200], detail=str(error))
    except Unreadable as error:
        status: Status = "ambiguous" if _is_hedged(answer) else "unparsable"
        return Score(0.0, status, answer, detail=f"the answer cannot be read: {error}")
    comparison = Comparison(percent=policies[0], ratio=policies[1])
    # True or False by structure and exact numbers; None: only algebra can tell.
    equal = comparison.compare(ours, theirs)
    if equal is None:
        score = _by_algebra(reference, answer, policies)
    else:
        score = Score(float(equal), extracted=answer, detail="" if equal else comparison.reason)
    if score.value == 0.0 and score.status == "ok" and (_several(ours, theirs) or _is_hedged(answer)):
        return replace(score, status="ambiguous")
    return score


def _several(reference: Node, answer: Node) -> bool:
    """Return whether an incorrect answer gives several values for one."""
    return answer.kind in ("list", "set") and reference.kind not in ("list", "set", "tuple", "union")


def _is_hedged(answer: str) -> bool:
    """Return whether an answer takes a value back."""
    return any(word in HEDGES for word in re.findall(r"[^\W\d_]+", answer.casefold()))


def _ask(function: str, reference: str, answer: str, *policies: str) -> Outcome:
    """Return the result of a function of ``symbolic`` for a pair. Each pair is asked about once."""
    server = verifier_server(SYMBOLIC)
    arguments = (reference, answer, *policies)
    ask = partial(server.call, f"{SYMBOLIC}:{function}", *arguments, limits=SYMBOLIC_LIMITS)
    return OUTCOMES.get((function, *arguments), ask)


def _by_algebra(reference: str, answer: str, policies: Sequence[str]) -> Score:
    if not has_algebra():
        return Score(None, "not_applicable", answer, detail=NEEDS_ALGEBRA)
    result = _ask("equal", reference, answer, *policies)
    if result.kind != "ok":
        return score_without_result(result, answer)
    equal, reason = result.value
    return Score(float(equal), extracted=answer, detail=reason)


def has_algebra() -> bool:
    """Return whether the `math` extra is installed."""
    return _is_installed("sympy")


@cache
def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def empty_references(rows: Sequence[Mapping[str, object]], **_: object) -> list[str | None]:
    """Return a complaint for each row without a reference text, which no completion could equal, or None."""
    return ["the reference answer is empty" if _is_empty(row["answer"]) else None for row in rows]


def _is_empty(answer: object) -> bool:
    return answer is None or not str(answer).strip()


@reward(
    concurrent=True,
    verdict=True,
    check_references=empty_references,
    example=lambda row, rule="answer_tag", **_: FORMS[rule].format(row["answer"]),
    counterexample=lambda row, rule="answer_tag", **_: _counterexample(row, rule),
)
def exact_answer(
    completion: TextOrMessages,
    answer: object,
    turns: Turns = (),
    *,
    rule: Rule = "answer_tag",
    fold: Literal["case", "none"] = "case",
) -> Score:
    """Return 1 if the text that ``rule`` finds equals the reference, else 0; None without a reference.

    Character width, spaces and (unless ``fold`` is none) case are ignored.
    """
    if _is_empty(answer):
        return Score(None, "bad_reference", detail="the reference answer is empty")
    extracted = extract(completion, rule, turns)
    if extracted is None:
        return Score(0.0, "no_answer")
    return Score(
        float(_fold_text(extracted, fold) == _fold_text(str(answer), fold)), extracted=extracted[:500]
    )


def _fold_text(text: str, fold: str) -> str:
    # Normalized, a raised digit would join the number before it: 10³ would be 103.
    text = unicodedata.normalize("NFKC", re.sub("[⁰¹²³⁴-⁹⁺⁻]+", r"^\g<0>", text))
    return " ".join((text.casefold() if fold == "case" else text).split())
