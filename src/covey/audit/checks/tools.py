"""A check of tools: each call must get its own answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from covey.audit.checks.check import Fault
from covey.audit.record import AuditRecord

MIN_REPEATED = 3
"""Fewest calls that must repeat an earlier one word for word."""
MAX_LAG = 16
"""Most calls by which answers may come too late or too early."""
MAX_CHANCE = 0.02
"""Largest probability that answers fit other calls by chance."""


class _Call(NamedTuple):
    """A call of a tool: the ids that the model wrote before the answer, and the ids of the answer."""

    text: tuple[int, ...]
    answer: tuple[int, ...]
    step: int
    completion: int


def _calls(record: AuditRecord) -> Iterator[_Call]:
    for step, n, sample in record.samples:
        parts = groupby(zip(sample.inserted or (), sample.ids or (), strict=False), key=lambda pair: pair[0])
        text: tuple[int, ...] = ()
        for is_inserted, pairs in parts:
            ids = tuple(token for _, token in pairs)
            if is_inserted and text:
                yield _Call(text, ids, step, n)
            text = ids


def _repeated(calls: Sequence[_Call], lag: int) -> list[bool]:
    """Return for each repeated call whether its answer, ``lag`` calls later, equals the first call's."""
    first: dict[tuple[int, ...], tuple[int, ...]] = {}
    same = []
    for n, call in enumerate(calls):
        if 0 <= n + lag < len(calls):
            answer = calls[n + lag].answer
            same += [first[call.text] == answer] if call.text in first else []
            first.setdefault(call.text, answer)
    return same


def answers_are_of_other_calls(record: AuditRecord) -> Fault | None:
    """At least three repeated calls of a tool got other answers than the first calls did, but all answers
    would be equal if each call took the answer of a call some places later or earlier. By chance this happens
    less than once in fifty.
    """
    calls = list(_calls(record))
    lags = [lag for lag in range(-MAX_LAG, MAX_LAG + 1) if lag]
    by_lag = {lag: _repeated(calls, lag) for lag in lags}
    fitting = [lag for lag, same in by_lag.items() if len(same) >= MIN_REPEATED and all(same)]
    if sum(not same for same in _repeated(calls, 0)) < MIN_REPEATED or len(fitting) != 1:
        return None
    others = [same for lag, repeated in by_lag.items() if lag not in fitting for same in repeated]
    by_chance = len(lags) * (sum(others) / max(len(others), 1)) ** len(by_lag[fitting[0]])
    if by_chance > MAX_CHANCE:
        return None
    lag = fitting[0]
    where = f"{abs(lag)} calls {'later' if lag > 0 else 'earlier'}"
    sentence = (
        f"equal calls of a tool have different answers, but equal ones if each takes the answer {where}"
    )
    return Fault(sentence, calls[0].step, {"completion": calls[0].completion})


CHECKS = {"tool_order": answers_are_of_other_calls}
