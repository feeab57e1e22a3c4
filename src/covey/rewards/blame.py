"""Blame: whose fault it is that a call of a user's function hangs, ends its process or raises.

A text's own fault costs its completion. The function's fault, or the machine's, leaves a completion unscored.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from covey.rewards.contract import Context
from covey.rewards.worker_process import CallReply
from covey_verify.errors import RewardError
from covey_verify.sandbox.base import Outcome
from covey_verify.types import Score

TEXTS = {"completion", "completions", "solution_str", "turns", "completion_ids", "sampled_ids", "token_ends"}
"""Arguments that hold sampled text, or its tokens."""

TO_BLAME = "a text is to blame, and gets 0"
TRANSIENT = "it was called again, and answered"


class CallFailed(Exception):
    """A reward function raised an exception, or ended its process."""

    def __init__(self, what: str, trace: str = "") -> None:
        super().__init__(what)
        self.trace = trace


class WorkerLost(CallFailed):
    """The machine that a worker ran on is gone; the function did not cause it, so the call is made again."""


class AttemptCall(Protocol):
    """Makes a call within ``wall`` seconds; texts in ``left_out`` are replaced by ``instead``'s, or by ""."""

    def __call__(self, left_out: Collection[int], wall: float, instead: int | None = None) -> Outcome:
        """Return how the call ended, ``ok`` if there is any reply."""


def scores_with_blame(ask: AttemptCall, count: int, context: Context, seconds: float) -> list[Score]:
    """Return the scores of a call; a text that hangs it, ends its process or raises in its own code gets 0.

    A text is to blame if it happens with this text twice, and never without it. Anything else is the
    function's fault or the machine's. Raises CallFailed for these, or RewardError if the function breaks its
    contract.
    """
    outcome = ask((), seconds)
    failure = _ended_by(outcome)
    if failure is None:
        return _scores(outcome, context)
    # The texts of a rehearsal are known to be harmless.
    guilty = None if context.rehearsal else _guilty(ask, count, seconds)
    if guilty is None:
        raise CallFailed(failure.detail, _trace(outcome))
    context.faults.append(f"{failure.detail}; {TO_BLAME if guilty else TRANSIENT}")
    if len(guilty) == count:
        return [guilty[i] for i in range(count)]
    # A function of a group may not accept an empty text: in place of the guilty ones it gets an innocent one.
    innocent = next(i for i in range(count) if i not in guilty)
    outcome = ask(guilty, seconds, innocent)
    if _ended_by(outcome) is not None:
        raise CallFailed(failure.detail, _trace(outcome))
    return [guilty.get(i, score) for i, score in enumerate(_scores(outcome, context))]


def _scores(outcome: Outcome, context: Context) -> list[Score]:
    if outcome.kind != "ok":
        raise CallFailed(outcome.text, outcome.value or "")
    return scores_of_reply(outcome.value, context)


def _trace(outcome: Outcome) -> str:
    return outcome.value if isinstance(outcome.value, str) else str((outcome.value or {}).get("trace", ""))


def _guilty(ask: AttemptCall, count: int, seconds: float) -> dict[int, Score] | None:
    """Return the score of each completion whose text hangs or ends a call in which all others are empty.

    None if the call hangs or ends without any text too. A single text gets its share of the call's seconds,
    in addition to the seconds that the call takes without any text. So the search takes little longer than
    the call, however many texts hang. A function that evaluates texts may not accept an empty text. It gets
    the single text in place of every other, and the seconds of a whole call.
    """
    began = time.monotonic()
    textless = ask(range(count), seconds)
    needs_text = _by_text(textless)
    if _ended_by(textless) is not None and not needs_text:
        return None
    limit = max(1.0, seconds / count) + 2 * (time.monotonic() - began)
    limit = seconds if needs_text else min(seconds, limit)
    others = {i: [j for j in range(count) if j != i] for i in range(count)}
    guilty = dict[int, Score]()
    for i in range(count):
        score = _ended_by(ask(others[i], limit, i if needs_text else None))
        if score is not None:
            guilty[i] = score
    return guilty


def _by_text(outcome: Outcome) -> bool:
    return outcome.kind == "ok" and bool(outcome.value.get("by_text"))


def _ended_by(outcome: Outcome) -> Score | None:
    """Return the score of a text that hung, ended the process (an exit, a crash, memory) or raised itself."""
    if outcome.kind == "timeout" or (outcome.kind == "ok" and "late" in outcome.value):
        return Score(0.0, "timeout", detail=outcome.text or "no answer in time")
    if outcome.kind == "crashed":
        return Score(0.0, "crashed", detail=outcome.text)
    raised = str(outcome.value.get("raised", "")) if outcome.kind == "ok" else outcome.text
    ended_itself = raised.startswith(("SystemExit", "MemoryError", "KeyboardInterrupt"))
    return Score(0.0, "crashed", detail=raised) if ended_itself or _by_text(outcome) else None


def with_texts(
    arguments: Mapping[str, object], left_out: Collection[int], instead: int | None, per_sample: bool
) -> dict[str, object]:
    """Return the arguments of a call with the text of some completions replaced by another's, or by "".

    >>> with_texts({"completions": ["a", "b"], "answer": ["1", "1"]}, [1], None, False)
    {'completions': ['a', ''], 'answer': ['1', '1']}
    """
    changed = dict(arguments)
    for name in TEXTS & changed.keys() if left_out else ():
        value: Any = changed[name]
        if per_sample:
            changed[name] = _without_text(value)
        else:
            stand_ins = [_without_text(text) if instead is None else value[instead] for text in value]
            changed[name] = [stand_ins[i] if i in left_out else text for i, text in enumerate(value)]
    return changed


def _without_text(text: Any) -> object:
    if isinstance(text, str):
        return ""
    silent = list[Mapping[str, Any]]()
    for turn in text:
        if isinstance(turn, Mapping):  # a list of token ids has none, so nothing is left of it
            silent.append({**turn, "content": ""} if turn.get("role") == "assistant" else turn)
    return silent


def scores_of_reply(reply: CallReply, context: Context) -> list[Score]:
    """Return the scores of a reply, and log its metrics. Raises CallFailed or RewardError."""
    for name, values in reply.get("logged", {}).items():
        for value in values:
            context.log_metric(name, value)
    # What was logged before a failure is kept.
    context.extra.update(reply.get("extra", {}))
    if "refused" in reply:
        error = RewardError(reply["refused"])
        error.code = reply["code"]
        raise error
    if "raised" in reply:
        raise CallFailed(reply["raised"], reply["trace"])
    return [score_from_fields(fields) for fields in reply["scores"]]


def score_from_fields(fields: Mapping[str, Any]) -> Score:
    """Return a Score from its fields as JSON."""
    steps = fields.get("steps")
    return Score(**{**fields, "steps": None if steps is None else tuple(map(tuple, steps))})
