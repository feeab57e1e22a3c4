"""Checks of rewards against the answers of their rows, which need no further call of a reward function.

A text is correct by a simple rule: it is the answer of its row, ends with it, or its last number is the
answer. The reward function may have another rule, so a fault is reported only if a rule explains all rewards
of other texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from covey.audit.checks.check import Fault
from covey.audit.checks.groups import groups_of, tensor_of
from covey.audit.probes import ANSWERS
from covey.audit.record import AuditRecord, Rollout, Sample

MIN_UNLIKE = 4
"""Fewest completions that must show a fault."""
MIN_ROLLOUTS = 4
"""Fewest rollouts that must have as many correct texts as highest rewards."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
"""A number as people write it."""


def number_of(text: str) -> float | None:
    """Return the number that a text is, with commas or without."""
    match = NUMBER.fullmatch(text.strip())
    return None if match is None else float(text.replace(",", ""))


def last_number(text: str) -> str:
    """Return the last number in a text; '' without one."""
    return next(reversed(NUMBER.findall(text)), "").rstrip(",")


RULES: tuple[Callable[[str, str], bool], ...] = (
    lambda text, answer: text.strip() == answer,
    lambda text, answer: text.rstrip().endswith(answer),
    lambda text, answer: last_number(text) == answer,
)
"""Text, answer -> whether the text is correct."""


class FunctionRewards(NamedTuple):
    """The completions of a rollout, with the rewards of one function."""

    name: str
    rollout: Rollout
    best: list[bool]
    """Whether each completion has the function's highest reward of the run."""


def answer_of(sample: Sample) -> str:
    """Return the answer of a completion's row; '' if it has none or a long one."""
    answers = (sample.row[name] for name in ANSWERS if name in sample.row)
    answer = next((a for a in answers if isinstance(a, str | int | float)), "")
    return str(answer).strip()


def scores_of_functions(record: AuditRecord) -> Iterator[list[FunctionRewards]]:
    """Yield the rollouts of each function whose scores are known and differ, with answers and texts."""
    if any(s.text is None or not answer_of(s) for _, _, s in record.samples):
        return
    for name in record.functions:
        by_rollout = [[s.rewards.get(name) for s in r.completions] for r in record.rollouts]
        values = tensor_of([score for scores in by_rollout for score in scores])
        if len(values) and not values.isnan().any() and values.min() < values.max():
            best = float(values.max()) - 1e-6
            rows = zip(record.rollouts, by_rollout, strict=True)
            yield [FunctionRewards(name, r, [float(s or 0.0) >= best for s in scores]) for r, scores in rows]


def _correct(
    record: AuditRecord, rollout: Rollout, rule: Callable[[str, str], bool], ends: bool
) -> list[bool]:
    """Return whether each text is correct by a rule. ``ends``: only if it has its end token, where known."""
    eos = record.header.tokens.eos
    return [
        rule(s.text or "", answer_of(s)) and not (ends and s.ids and eos and s.ids[-1] not in eos)
        for s in rollout.completions
    ]


def rewards_of_other_texts(record: AuditRecord) -> Fault | None:
    """The completions with the largest reward are those whose neighbour, always at the same distance, has a
    correct text; or each rollout has as many of them as correct texts, but not the same ones.
    """
    for function, rule, ends in product(scores_of_functions(record), RULES, (False, True)):
        correct = [_correct(record, batch.rollout, rule, ends) for batch in function]
        best = [batch.best for batch in function]
        unlike = list(_unlike(best, correct, 0))
        if len(unlike) < MIN_UNLIKE or sum(map(sum, correct)) < MIN_UNLIKE:
            continue
        number, i = unlike[0]
        sentence = f"the rewards of {function[0].name} do not fit the texts of {len(unlike)} of"
        sentence += f" {sum(map(len, best))} completions"
        evidence = {"completion": i}
        step = function[number].rollout.step
        for lag in _lags(function):
            # A group that is the whole rollout has no neighbour.
            compared = sum(max(0, len(row) - abs(lag)) for row in best)
            if 2 * compared >= sum(map(len, best)) and not list(_unlike(best, correct, lag)):
                where = f"{abs(lag)} {'before' if lag > 0 else 'after'}"
                return Fault(f"{sentence}: each fits the completion {where}", step, evidence)
        if _is_another_order(best, correct, len(unlike)):
            return Fault(f"{sentence}: they fit in another order of each rollout", step, evidence)
    return None


def _lags(function: Sequence[FunctionRewards]) -> tuple[int, ...]:
    """Return distances at which a neighbour may have got a completion's reward: one place, or a group."""
    groups = groups_of(function[0].rollout.completions)
    size = max(map(groups.count, set(groups)))
    return (1, -1, size, -size)


def _unlike(
    best: Sequence[Sequence[bool]], correct: Sequence[Sequence[bool]], lag: int
) -> Iterator[tuple[int, int]]:
    """Yield (rollout, place) of completions whose reward does not fit the text ``lag`` places before."""
    for n, (of_rewards, of_texts) in enumerate(zip(best, correct, strict=True)):
        for i, is_best in enumerate(of_rewards):
            if 0 <= i - lag < len(of_texts) and is_best != of_texts[i - lag]:
                yield n, i


def _is_another_order(best: Sequence[Sequence[bool]], correct: Sequence[Sequence[bool]], unlike: int) -> bool:
    """Whether each rollout has as many correct texts as completions with the highest reward."""
    pairs = [(sum(of_rewards), sum(of_texts)) for of_rewards, of_texts in zip(best, correct, strict=True)]
    mixed = [(a, len(row)) for (a, _), row in zip(pairs, best, strict=True) if 0 < a < len(row)]
    return all(a == b for a, b in pairs) and len(mixed) >= MIN_ROLLOUTS and unlike > 0.1 * sum(map(len, best))


def texts_are_paid_alike_everywhere(record: AuditRecord) -> Fault | None:
    """At least four texts that are one row's answer and not another's are paid alike for both, some of them
    the most, though nine in ten of the other texts are paid the most exactly if they are their row's answer.
    """
    for function in scores_of_functions(record):
        by_text: dict[str, list[tuple[str, bool, int, int]]] = {}
        for batch in function:
            for i, (sample, best) in enumerate(zip(batch.rollout.completions, batch.best, strict=True)):
                row = (answer_of(sample), best, batch.rollout.step, i)
                by_text.setdefault((sample.text or "").strip(), []).append(row)
        # Texts that are the answer of one row and not of another.
        repeated = [rows for text, rows in by_text.items() if len({a == text for a, *_ in rows}) == 2]
        rewards = [{best for _, best, *_ in rows} for rows in repeated]
        if len(repeated) < MIN_UNLIKE or {True, False} in rewards or {True} not in rewards:
            continue
        others = [(text, rows) for text, rows in by_text.items() if rows not in repeated]
        follows_answer = [best == (a == text) for text, rows in others for a, best, *_ in rows]
        if sum(follows_answer) < 0.9 * len(follows_answer):
            continue
        sentence = f"{function[0].name} gives {len(repeated)} texts the same reward"
        sentence += ", whether or not they answer their row"
        _, _, step, i = repeated[0][0]
        return Fault(f"{sentence}: rewards are cached by the text alone", step, {"completion": i})
    return None


def another_notation_is_not_paid(record: AuditRecord) -> Fault | None:
    """Of the texts whose last number is their row's answer, at least four write it in another notation than
    the row, such as 1,234 for 1234, and none of these gets the highest reward. Of those that write it as the
    row does, at least four, nine in ten get the highest reward.
    """
    for function in scores_of_functions(record):
        same = list[bool]()
        other = list[tuple[bool, int, int, str, str]]()
        for batch in function:
            for i, (sample, best) in enumerate(zip(batch.rollout.completions, batch.best, strict=True)):
                answer = answer_of(sample)
                number = last_number(sample.text or "")
                value = number_of(answer)
                if number == answer:
                    same.append(best)
                elif value is not None and number_of(number) == value:
                    other.append((best, batch.rollout.step, i, number, answer))
        if min(len(other), len(same)) < MIN_UNLIKE or any(best for best, *_ in other):
            continue
        if sum(same) < 0.9 * len(same):
            continue
        _, step, i, number, answer = other[0]
        sentence = f"{function[0].name} does not give its largest reward to {len(other)} correct answers in"
        sentence += f" another notation, {number} for {answer}"
        return Fault(sentence, step, {"completion": i})
    return None


CHECKS = {"notation_unpaid": another_notation_is_not_paid}
