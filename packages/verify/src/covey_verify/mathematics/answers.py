"""Rewards for final answers: mathematics and plain text, compared with the reference in column `answer`."""

from __future__ import annotations

import importlib.util
import re
import unicodedata
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Literal

from covey_verify.contract import reward, unfinished
from covey_verify.extract import FORMS, Rule, TextOrMessages, Turns, extract, hash4
from covey_verify.mathematics.compare import compare, exact, no_formula
from covey_verify.mathematics.magnitude import monstrous
from covey_verify.mathematics.notation import Node, Percent, clean, parse, too_large, value
from covey_verify.mathematics.units import HEDGES, NO_NOUNS
from covey_verify.once import Once
from covey_verify.sandbox.base import Outcome
from covey_verify.sandbox.client import verifier_server
from covey_verify.sandbox.confine import Limits
from covey_verify.types import Score, Share, Status

SYMBOLIC_LIMITS = Limits(wall=6.0, cpu=2, memory=2 << 30)
SYMBOLIC = "covey_verify.mathematics.symbolic"
PER_PROCESS = 50
"""Number of reference answers that one subprocess checks, in twice the time of a single one."""
ASKED: Once[Outcome] = Once(2048, kept=lambda result: result.kind != "lost")
"""Outcomes of subprocesses, timeouts included: equal answers to a problem cost one subprocess."""
NO_ANSWER = frozenset(
    """nan|none|null|n/a|n.a|nil|tbd|tba|unknown|unspecified|varies|answers vary|answer varies|not available
    |not applicable|no answer|see solution|see figure|see above""".replace("\n    ", "").split("|")
)
"""The words of data sets for a missing answer."""


def reference_of(answer: object) -> str:
    """Return the reference answer of a row: the number after `####`, if it is a worked solution."""
    text = str(answer)
    return hash4(text) or text.strip()


def _example(row: Mapping[str, object], rule: Rule = "boxed", **_: object) -> str:
    """Return a completion with the correct answer."""
    return FORMS[rule].format(reference_of(row["answer"]))


def bad_references(
    rows: Sequence[Mapping[str, object]], percent: Percent = "ignored", **_: object
) -> list[str | None]:
    """Return for each row why no answer can equal its reference: it is empty, a sentence or unreadable."""
    references = [reference_of(row["answer"]) for row in rows]
    read = [_read_reference(reference, percent) for reference in references]
    wrong = [found if isinstance(found, str) else None for found in read]
    # Only formulas need SymPy, so only they are sent to a subprocess.
    formulas = [i for i, found in enumerate(read) if isinstance(found, Node) and not _is_plain(found)]
    if formulas and not has_algebra():
        needs = (
            "the reference answer is a formula; comparing it needs SymPy: pip install 'covey-verify[math]'"
        )
        return [needs if i in formulas else w for i, w in enumerate(wrong)]
    for start in range(0, len(formulas), PER_PROCESS):
        some = formulas[start : start + PER_PROCESS]
        for i, readable in zip(some, _readable([references[i] for i in some]), strict=True):
            wrong[i] = None if readable else f"the reference answer cannot be read: {references[i][:60]!r}"
    return wrong


@lru_cache(4096)
def _read_reference(reference: str, percent: Percent) -> Node | str:
    """Return a reference answer's structure, or its fault as a text."""
    shown = repr(reference[:60])
    if not reference:
        return "the reference answer is empty"
    if too_large(reference) or monstrous(cleaned := clean(reference, percent)):
        return f"the reference answer is too large: {shown}"
    node = parse(cleaned)
    if reference == "NA" or node.text.casefold().strip(" .?!") in NO_ANSWER:
        return f"the reference answer is no answer: {shown}"
    if any(map(_is_sentence, _texts(node))):
        return f"the reference answer is a sentence, no answer: {shown}"
    return node


def _texts(node: Node) -> Iterator[str]:
    """Yield the words in a structure: its texts, and its unknown units."""
    if node.kind == "text":
        yield node.text
    # ``units.measure`` marks words that are no unit by "? ".
    if node.kind == "leaf" and node.marks and node.marks[0].startswith("? "):
        yield node.marks[0]
    for part in node.parts:
        yield from _texts(part)


def _is_sentence(text: str) -> bool:
    """Return whether a text has three words or more, or behind a number a word that is no noun."""
    words = re.findall(r"[^\W\d_]+", text)
    if text.startswith("? "):
        return any(word in NO_NOUNS for word in words)
    return len(words) > 2 and sum(len(word) > 1 for word in words) > 1


def _readable(references: list[str]) -> list[bool]:
    """Return whether each can be parsed.

    If the subprocess ends early, they are asked one by one, which finds the reference that ended it.
    """
    more = min(2, len(references))
    limits = Limits(SYMBOLIC_LIMITS.wall * more, SYMBOLIC_LIMITS.cpu * more, SYMBOLIC_LIMITS.memory)
    result = verifier_server(SYMBOLIC).call(f"{SYMBOLIC}:readable", references, limits=limits)
    if result.kind == "ok":
        return list(result.value)
    return (
        [False] if len(references) == 1 else [r for reference in references for r in _readable([reference])]
    )


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
    second: Share = 0.0,
) -> Score:
    """Return 1 if the answer that ``rule`` finds equals the reference answer, else 0; None without a
    reference.

    Numbers are compared exactly, and tuples, sets, intervals, matrices and relations part by part. Everything
    else is algebra, which SymPy does in a killable subprocess. With ``percent`` `ignored` 50% equals 50, with
    `hundredths` it equals 0.5. For the fraction ``second`` of all answers math-verify is asked as well; the
    rate of its disagreement is logged and never changes the score.
    """
    reference = reference_of(answer)
    score = _judged(reference, extract(completion, rule, turns), percent)
    found = score.extracted
    asked = score.value is not None and score.status in ("ok", "unparsable", "ambiguous")
    # The hash of both texts chooses the same answers in every process and every run.
    if (
        found is None
        or not asked
        or zlib.crc32(f"{reference}\0{found}".encode(errors="replace")) >= second * 2**32
    ):
        return score

    other = _ask("second_opinion", reference, found)
    if other.kind != "ok":
        return score
    return replace(score, metrics={"second_disagrees": float(other.value != (score.value == 1.0))})


def _judged(reference: str, found: str | None, percent: Percent) -> Score:
    """Return the score of an extracted answer, from the cheapest comparison to the dearest."""
    if found is None:
        return Score(0.0, "no_answer")
    if (
        found.isascii()
        and found.isdigit()
        and reference.isascii()
        and reference.isdigit()
        and len(found) <= 400
    ):
        # The most common case, without a parser: both are plain digits.
        return Score(float(int(found) == int(reference)), extracted=found)
    ours = _read_reference(reference, percent)
    if isinstance(ours, str):
        return Score(None, "bad_reference", found, detail=ours)
    if too_large(found) or monstrous(cleaned := clean(found, percent)):
        return Score(0.0, "too_large", found[:200])
    theirs = parse(cleaned)
    # True or False by structure and exact numbers; None: only algebra can tell.
    equal = compare(ours, theirs, exact)
    if equal is not None:
        score = Score(float(equal), extracted=found)
    # The reference is a plain number and the answer cannot be a formula: no need to ask SymPy.
    elif theirs.kind == "leaf" and not ours.parts and _is_plain(ours) and no_formula(theirs.text):
        score = Score(0.0, "unparsable", found)
    else:
        score = _by_algebra(reference, found, ours, percent)
    if score.value == 0.0 and score.status in ("ok", "unparsable") and _hedges(ours, theirs, found):
        return replace(score, status="ambiguous")
    return score


def _hedges(reference: Node, answer: Node, found: str) -> bool:
    """Return whether an incorrect answer gives several values for one, or takes a value back."""
    several = answer.kind in ("list", "set") and reference.kind in ("leaf", "text", "chain")
    return several or any(word in HEDGES for word in re.findall(r"[^\W\d_]+", found.casefold()))


def _ask(function: str, reference: str, found: str, *more: str) -> Outcome:
    """Return the result of a function of ``symbolic`` for a pair. Each pair is asked about once."""
    server = verifier_server(SYMBOLIC)
    question = (function, reference, found, *more)
    return ASKED.get(
        question,
        lambda: server.call(f"{SYMBOLIC}:{function}", reference, found, *more, limits=SYMBOLIC_LIMITS),
    )


def _by_algebra(reference: str, found: str, ours: Node, percent: Percent) -> Score:
    if not has_algebra():
        if _is_plain(ours):
            return Score(0.0, "unparsable", found, detail="only covey-verify[math] could read it")
        return Score(None, "not_applicable", found, detail="the reference answer needs covey-verify[math]")
    result = _ask("equal", reference, found, percent)
    if result.kind != "ok":
        return unfinished(result, found)
    verdicts: dict[object, tuple[float, Status]] = {
        "equal": (1.0, "ok"),
        "different": (0.0, "ok"),
        "answer": (0.0, "unparsable"),
    }
    if result.value not in verdicts:
        return Score(None, "bad_reference", found)
    return Score(*verdicts[result.value], found)


def _is_plain(node: Node) -> bool:
    """Return whether exact comparison suffices: numbers, words, letters, structures of them."""
    if node.parts:
        return all(map(_is_plain, node.parts))
    return node.kind == "text" or value(node.text) is not None or len(node.text) == 1


@cache
def has_algebra() -> bool:
    """Return whether the `math` extra is installed."""
    return importlib.util.find_spec("latex2sympy2_extended") is not None


@reward(
    concurrent=True,
    verdict=True,
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
    """Return 1 if the extracted text equals the reference, else 0.

    Character width, spaces and (unless ``fold`` is none) case are ignored.
    """
    found = extract(completion, rule, turns)
    if found is None:
        return Score(0.0, "no_answer")
    return Score(float(_folded(found, fold) == _folded(str(answer), fold)), extracted=found[:500])


def _folded(text: str, fold: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    return " ".join((text.casefold() if fold == "case" else text).split())
