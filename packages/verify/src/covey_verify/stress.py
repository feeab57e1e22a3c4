"""Attacks on reward functions before training, which find texts that they pay by mistake.

They need no model and take seconds. Every function has to pay a correct completion in full and nothing for
the battery: empty and junk texts, answers of other rows, incorrect answers made from the correct one,
templates without content, bombs, injections, a correct answer in a place that does not count, programs that
manipulate their tests. A user's function is attacked in a process of its own: an attack that ends, hangs or
breaks it is a finding.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from covey_verify.attacks import BOMBS, INJECTIONS, incorrect_texts, junk_texts
from covey_verify.contract import RewardFunction, canaries
from covey_verify.errors import ConfigError, DataError, RewardError
from covey_verify.extract import FORMS
from covey_verify.hosting import UserCode, call_limits
from covey_verify.loading import load
from covey_verify.machine import available_cpus
from covey_verify.mathematics.answers import reference_of
from covey_verify.scoring import check, scores_of
from covey_verify.types import Row, Score, Status

ROWS = 3
"""Number of problems on which each function is attacked."""
SECONDS = 10.0
"""Seconds after which an attack counts as a hang, unless the function declares its own timeout."""
STUCK = ("infra_error", "timeout", "crashed")
"""Statuses of a user's function that did not end by itself."""
STATUS_OF_END: Mapping[str, Status] = {"timeout": "timeout", "crashed": "crashed", "flood": "crashed"}
"""The end of a process -> the status of a score; any other end is the machinery's."""


Judge = Callable[[Sequence[str]], list[Score]]
"""Returns a function's scores of texts, each judged alone."""
FindingKind = Literal["paid", "unpaid", "failed", "unscored"]
"""An attack that was paid; a correct completion that was not paid in full; a text on which the function or
the environment failed; a function that gave no text a score, so that the attacks tested nothing."""


@dataclass(frozen=True)
class StressFinding:
    """A mistake of a reward function, with the text that shows it."""

    reward: str
    kind: FindingKind
    attack: str
    """The name of the attack, or the expectation that was not met."""
    problem: str
    value: float | None
    status: str
    text: str
    detail: str = ""

    def __str__(self) -> str:
        if self.kind == "unscored":
            return f"{self.reward}: {self.attack}: {self.detail}"
        shown = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        paid = "no score" if self.value is None else f"paid {round(self.value, 6)}"  # .3 / 3 has 17 digits
        # "paid 1.0 (ok)" would read as if the payment were in order.
        reason = "" if self.status == "ok" else f" ({': '.join(filter(None, (self.status, self.detail)))})"
        return f"{self.reward}: {self.attack} on {self.problem}: {paid}{reason} for {shown!r}"


@dataclass(frozen=True)
class Report:
    """The result of a stress test."""

    tried: int
    findings: tuple[StressFinding, ...]
    notes: tuple[str, ...]
    """Notes on things that could not be tested."""
    judged: bool = True
    """Whether the function gave any text a score, or failed on one."""

    @property
    def summary(self) -> str:
        """The number of findings of each kind."""
        count = Counter(finding.kind for finding in self.findings)
        parts = [f"{count['paid']} of {self.tried} attacks were paid"]
        if count["unpaid"]:
            parts.append(f"{count['unpaid']} correct answers were not paid in full")
        if count["failed"]:
            parts.append(f"{count['failed']} made the function or the environment fail")
        if count["unscored"]:
            parts.append(f"{count['unscored']} functions gave no text a score, so nothing tested them")
        return "; ".join(parts)


class Correct(NamedTuple):
    """A completion that has to be paid, and the form of its answer; None if unknown."""

    text: str | None = None
    form: str | None = None


def attack(functions: Sequence[RewardFunction], rows: Sequence[Row]) -> Report:
    """Attack functions on a few rows. Raises DataError or ConfigError if a function cannot judge any row."""
    chosen = different(rows)
    tried = 0
    findings = list[StressFinding]()
    notes = list[str]()
    for function in functions:
        for row in chosen:
            complaint = check(function, list(row.columns))
            if complaint:
                kind = DataError if "column" in complaint else ConfigError
                raise kind(f"{row.id}: reward {function.name} {complaint}")
        reason = unavailable(function)
        if reason:
            notes.append(f"{function.name} was not attacked: {reason}")
            continue
        call = _in_process(function) if not function.ours else partial(_here, function)
        reports = []
        for row in chosen:
            judge = partial(_each, call, row)
            correct = correct_completion(function, row, judge)
            reports.append(battery(function, row, chosen, judge, correct))
        tried += sum(report.tried for report in reports)
        findings += findings_of(function, chosen, reports)
        notes += [note for report in reports for note in report.notes]
    return Report(tried, tuple(findings), tuple(dict.fromkeys(notes)))


def findings_of(
    function: RewardFunction, rows: Sequence[Row], reports: Sequence[Report]
) -> list[StressFinding]:
    """Return the findings of one function's reports, one per row; only one if it judged no row."""
    if rows and not any(report.judged for report in reports):
        names = ", ".join(row.id for row in rows)
        reason = f"it returned None for every text on {names}; attack it with rows that it judges"
        score = Score(None, "not_applicable", detail=reason)
        return [_make_finding(function, rows[0], "unscored", "no text gets a score", "", score)]
    return [finding for report in reports for finding in report.findings]


def unavailable(function: RewardFunction) -> str:
    """Return why a function's server does not answer; "" if it does, or the function has none."""
    ask = function.options.unavailable
    return "" if ask is None else ask(**function.plain_settings)


def different(rows: Sequence[Row]) -> list[Row]:
    """Return a few rows with different reference answers."""
    # Read backwards, so that of several rows with the same answer the first row stays.
    by_answer = {json.dumps(r.columns.get("answer", r.id), default=str): r for r in reversed(rows)}
    return list(by_answer.values())[::-1][:ROWS]


def battery(
    function: RewardFunction,
    row: Row,
    rows: Sequence[Row],
    judge: Judge,
    correct: Correct,
    gated: bool = False,
) -> Report:
    """Run all attacks by texts on one function with one of ``rows``.

    ``gated``: its pay depends on another function, so a correct completion alone may get nothing.
    """
    attacks = list(junk_texts(row))
    examples = dict(canaries(function, row.columns))
    if "incorrect" in examples:
        attacks.append(("its counterexample", examples["incorrect"]))
    judges_other_things = judges_something_else(function)
    if judges_other_things:
        attacks += [("an injection", text) for text in INJECTIONS]
    elif not function.options.format_only:
        bombs = BOMBS if row is rows[0] else ()  # each may take seconds
        attacks += incorrect_texts(row, rows, correct.text, correct.form, bombs)
    scores = judge([text for _, text in attacks])
    judged = any(score.value is not None or score.status in STUCK for score in scores)
    findings = list(find_paid_attacks(function, row, attacks, scores))
    notes = list[str]()
    if judges_other_things:
        notes.append(
            f"{function.name} does not say what is correct, so incorrect answers were not tried: "
            "`verdict: true` tries them"
        )
    elif correct.text is None:
        notes.append(f"{function.name} on {row.id}: no completion is known that it has to pay")
    elif not gated:
        (score,) = judge([correct.text])
        judged = judged or score.value is not None or score.status in STUCK
        if (score.value or 0.0) < 1.0:
            all_tried = correct.form and function.options.example is None and not score.value
            forms = f" in any of {len(FORMS)} forms" if all_tried else ""
            expectation = f"the correct answer is not paid{forms}"
            findings.append(_make_finding(function, row, "unpaid", expectation, correct.text, score))
    return Report(len(attacks), tuple(findings), tuple(notes), judged)


def judges_something_else(function: RewardFunction) -> bool:
    """Return whether it may pay an incorrect answer: a judge's criteria can be about anything."""
    return function.options.unavailable is not None and not function.may_be_verdict


def find_paid_attacks(
    function: RewardFunction, row: Row, attacks: Sequence[tuple[str, str]], scores: Sequence[Score]
) -> Iterator[StressFinding]:
    """Yield a finding for each attack (name, text) that a function paid, or on which it failed."""
    for (name, text), score in zip(attacks, scores, strict=True):
        # A built-in reward may report a timeout or a crash: its subprocess is made for that.
        if score.status in (STUCK[:1] if function.ours else STUCK):
            yield _make_finding(function, row, "failed", f"{name} (the function failed)", text, score)
        elif (score.value or 0.0) > 0:
            yield _make_finding(function, row, "paid", name, text, score)


def correct_completion(function: RewardFunction, row: Row, judge: Judge) -> Correct:
    """Return a completion that has to be paid, and the form of its answer.

    It is the function's own example. Without an example it is the reference answer in the form that the
    function pays best, or the worked answer if it pays no form.
    """
    if judges_something_else(function):
        return Correct()
    form = FORMS.get(str(function.settings.get("rule")))
    if function.options.example is not None:
        parameter = function.parameters.get("rule")
        form = form or (FORMS.get(str(parameter.default)) if parameter else None)
        return Correct(dict(canaries(function, row.columns)).get("correct"), form)
    if "answer" not in row.columns or function.options.format_only:
        return Correct()
    form_of_text = {f.format(reference_of(row.columns["answer"])): f for f in FORMS.values()}
    texts = list(form_of_text)
    values = [score.value or 0.0 for score in judge(texts)]
    worked_answer = row.columns.get("completion")
    if max(values) <= 0 and isinstance(worked_answer, str):
        return Correct(worked_answer)
    best = texts[values.index(max(values))]
    return Correct(best, form_of_text[best])


def _make_finding(
    function: RewardFunction, row: Row, kind: FindingKind, attack: str, text: str, score: Score
) -> StressFinding:
    return StressFinding(function.name, kind, attack, row.id, score.value, score.status, text, score.detail)


def _each(call: Callable[[Row, str], Score], row: Row, texts: Sequence[str]) -> list[Score]:
    with ThreadPoolExecutor(available_cpus()) as pool:
        return list(pool.map(partial(call, row), texts))


def _here(function: RewardFunction, row: Row, text: str) -> Score:
    """Return a built-in verifier's score, in this process, because its dangerous work is in subprocesses."""
    (score,) = scores_of(function, row, [text])
    return score


def _in_process(function: RewardFunction) -> Callable[[Row, str], Score]:
    """Return a caller of a user's function that makes each call in a process of its own."""
    file = str(Path(function.file).resolve())
    spec = f"{file}:{function.function.__name__}"
    server = UserCode(__name__, [file]).limited_server()
    limits = call_limits(function.options.timeout or SECONDS)

    def call(row: Row, text: str) -> Score:
        settings = dict(function.plain_settings)
        arguments = (spec, settings, row.id, row.prompt, dict(row.columns), text)
        result = server.call(f"{__name__}:scored_there", *arguments, limits=limits)
        if result.kind == "ok":
            return Score(**result.value)
        return Score(None, STATUS_OF_END.get(result.kind, "infra_error"), detail=result.text)

    return call


def scored_there(
    spec: str, settings: dict[str, Any], row: str, prompt: Any, columns: dict[str, Any], text: str
) -> dict[str, object]:
    """Return a user's function's score of a text as plain values. Runs in the function's process."""
    function = load(spec, settings)
    try:
        score = _here(function, Row(row, prompt, columns), text)
    except RewardError as error:  # an invalid return value
        score = Score(None, "infra_error", detail=str(error))
    return {"value": score.value, "status": score.status, "detail": score.detail}
