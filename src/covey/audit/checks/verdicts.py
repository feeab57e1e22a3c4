"""Checks of verdicts against texts: whether a reward looks for the answer where the text has it.

They judge only runs with one reward function, whose rows have answers that are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from covey.audit.checks.check import Fault
from covey.audit.checks.data import text_of_prompt
from covey.audit.checks.row_answers import NUMBER, answer_of, number_of, scores_of_functions
from covey.audit.record import AuditRecord

MIN_TEXTS = 8
"""Texts that must show a fault."""
MIN_PART = 0.1
"""Smallest part of the texts that must show it."""
CHANCE = 4.0
"""A text's last number is its answer if it equals its row's answer this many times as often as another's."""
FORMULA = ("/", "frac", "^", "%")
"""Signs that make one number of several."""


class Verdict(NamedTuple):
    """A text with its reward."""

    step: int
    place: int
    paid: bool
    """Whether it got the largest reward of the run."""
    answer: float
    other: float
    """The answer of another row."""
    numbers: tuple[float, ...]
    """Numbers of the text, in order."""
    text_has: bool
    """Whether the text has the answer's characters."""
    prompt_has: bool
    """Whether the prompt has them."""
    is_plain: bool
    """Whether the text ends without a formula."""

    @property
    def last(self) -> float | None:
        """The last number of the text."""
        return self.numbers[-1] if self.numbers else None


def _verdicts(record: AuditRecord) -> list[Verdict]:
    """Return the texts of a run; none unless it has one function, and a number as each row's answer."""
    functions = list(scores_of_functions(record))
    if len(functions) != 1 or len(record.functions) != 1:
        return []
    answers = [number_of(answer_of(sample)) for _, _, sample in record.samples]
    numbers = [answer for answer in answers if answer is not None]
    if len(numbers) < len(answers):
        return []
    verdicts: list[Verdict] = []
    for batch in functions[0]:
        for index, (sample, paid) in enumerate(zip(batch.rollout.completions, batch.best, strict=True)):
            text = sample.text or ""
            answer = numbers[len(verdicts)]
            values = [number_of(number.rstrip(",")) for number in NUMBER.findall(text)]
            verdicts.append(
                Verdict(
                    batch.rollout.step,
                    index,
                    paid,
                    answer,
                    other=_other(numbers, len(verdicts)),
                    numbers=tuple(value for value in values if value is not None),
                    text_has=answer_of(sample) in text,
                    prompt_has=answer_of(sample) in text_of_prompt(sample),
                    is_plain=not any(sign in text[-20:] for sign in FORMULA),
                )
            )
    return verdicts


def _other(answers: Sequence[float], n: int) -> float:
    """Return the answer of the next row that has another one."""
    following = [*answers[n:], *answers[:n]]
    return next((answer for answer in following if answer != answers[n]), answers[n])


def _answers_by_its_last_number(verdicts: Sequence[Verdict]) -> bool:
    """Whether texts end with their row's answer much more often than with another one's."""
    answered = sum(v.last == v.answer for v in verdicts)
    by_chance = sum(v.last == v.other for v in verdicts)
    return answered >= MIN_PART * len(verdicts) and answered > CHANCE * by_chance


def incorrect_texts_are_paid(record: AuditRecord) -> Fault | None:
    """Of the texts with the largest reward of the only function, at least eight and a tenth have no number
    that is their row's answer, though texts end with their row's answer four times as often as with another
    row's. Or all completions that reach the limit without an end token, at least eight, get the larger one
    of a function's two rewards, and at most half of the others do, of at least eight.
    """
    verdicts = _verdicts(record)
    if not _answers_by_its_last_number(verdicts):
        return _truncated_texts_are_paid(record)
    paid = [v for v in verdicts if v.paid]
    without = [v for v in paid if v.numbers and v.is_plain and v.answer not in v.numbers]
    if len(without) < MIN_TEXTS or len(without) < MIN_PART * len(paid):
        return _truncated_texts_are_paid(record)
    example = without[0]
    sentence = f"{len(without)} of {len(paid)} texts with the largest reward do not have their row's answer"
    numbers = f"{example.last:g} is paid where {example.answer:g} is the answer"
    return Fault(f"{sentence}: {numbers}", example.step, {"completion": example.place})


def _truncated_texts_are_paid(record: AuditRecord) -> Fault | None:
    limit = record.number("max_completion_length", math.inf)
    for function in scores_of_functions(record):
        scored = [
            (batch.rollout.step, index, sample, paid)
            for batch in function
            for index, (sample, paid) in enumerate(zip(batch.rollout.completions, batch.best, strict=True))
            if sample.ids and answer_of(sample)
        ]
        values = {sample.rewards.get(function[0].name) for _, _, sample, _ in scored}
        truncated = [row for row in scored if _is_truncated(record, row[2].ids or [], limit)]
        others = [row[3] for row in scored if not _is_truncated(record, row[2].ids or [], limit)]
        is_paid = len(truncated) >= MIN_TEXTS and all(paid for *_, paid in truncated)
        if len(values) == 2 and is_paid and len(others) >= MIN_TEXTS and sum(others) <= 0.5 * len(others):
            step, index, *_ = truncated[0]
            sentence = f"all {len(truncated)} truncated completions get the largest reward"
            return Fault(
                f"{sentence}, and {sum(others)} of {len(others)} others", step, {"completion": index}
            )
    return None


def verdict_is_of_another_place(record: AuditRecord) -> Fault | None:
    """Rewards are the largest exactly where the first number of a text is the answer, and at least eight
    texts end with it and begin with another number, four times as many as end with another row's. Or of the
    texts without the answer those are paid the most whose prompt has it, at least eight, and no others.
    """
    verdicts = _verdicts(record)
    unlike = [v for v in verdicts if v.numbers and v.last == v.answer != v.numbers[0]]
    by_chance = [v for v in verdicts if v.numbers and v.last == v.other != v.numbers[0]]
    is_first = _explains(verdicts, lambda v: v.numbers[:1] == (v.answer,))
    if len(unlike) >= MIN_TEXTS and len(unlike) > CHANCE * len(by_chance) and is_first:
        sentence = f"the first number of a text is judged, and {len(unlike)} texts end with their answer"
        return Fault(f"{sentence} without reward", unlike[0].step, {"completion": unlike[0].place})
    without = [v for v in verdicts if not v.text_has]
    told = [v for v in without if v.prompt_has]
    if min(len(told), len(without) - len(told)) < MIN_TEXTS or not _explains(without, lambda v: v.prompt_has):
        return None
    sentence = f"{len(told)} texts without their answer are paid because the prompt has it"
    return Fault(sentence, told[0].step, {"completion": told[0].place})


def _explains(verdicts: Sequence[Verdict], rule: Callable[[Verdict], bool]) -> bool:
    """Whether a text is paid the most exactly if a rule says so."""
    return bool(verdicts) and all(v.paid == rule(v) for v in verdicts)


def _is_truncated(record: AuditRecord, ids: Sequence[int], limit: float) -> bool:
    return len(ids) >= limit and ids[-1] not in record.header.tokens.eos


CHECKS = {
    "verdict_elsewhere": verdict_is_of_another_place,
    "pays_incorrect": incorrect_texts_are_paid,
}
