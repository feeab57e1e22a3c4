"""Blame: whose fault it is that a call of a user's function hangs, ends its process or raises.

A text's own fault costs its completion. The function's fault, or the machine's, leaves a completion unscored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from covey.rewards.contract import Context
from covey.rewards.serving import CallReply
from covey_verify.errors import RewardError
from covey_verify.sandbox.base import Outcome
from covey_verify.types import Score

TEXTS = {"completion", "completions", "solution_str", "turns", "completion_ids", "sampled_ids", "token_ends"}
"""Arguments that hold sampled text, or its tokens."""


class Failed(Exception):
    """A reward function raised an exception, or ended its process."""

    def __init__(self, what: str, trace: str = "") -> None:
        super().__init__(what)
        self.trace = trace


class Lost(Failed):
    """The machine that a worker ran on is gone; the function did not cause it, so the call is made again."""


def blamed(
    asked: Callable[[Collection[int], float], Outcome], count: int, context: Context, seconds: float
) -> list[Score]:
    """Return the scores of a call; a text that hangs it or ends its process gets 0.

    ``asked(empty, seconds)`` makes the call with the texts of the completions in ``empty`` replaced by "". A
    text is to blame if the call hangs or ends with it twice, and not without it. All else is the function's
    fault or the machine's. Raises Failed for these, or RewardError if the function breaks its contract.
    """
    found = asked((), seconds)
    ended = _ended_by(found)
    guilty: Mapping[int, Score] | None = {}
    if ended is not None:
        # The texts of a rehearsal are known to be harmless.
        guilty = None if context.rehearsal else _guilty(asked, count, seconds)
        if guilty is not None and len(guilty) == count:
            return [guilty[i] for i in range(count)]  # what it says about empty texts is nobody's
        found = found if guilty is None else asked(guilty, seconds)
        if guilty is None or _ended_by(found) is not None:
            raise Failed(ended.detail, found.value if isinstance(found.value, str) else "")
    if found.kind != "ok":
        raise Failed(found.text, found.value or "")
    scores = scores_of(found.value, context)
    return [guilty.get(i, score) for i, score in enumerate(scores)]


def _guilty(
    asked: Callable[[Collection[int], float], Outcome], count: int, seconds: float
) -> dict[int, Score] | None:
    """Return the completions whose text alone, all others empty, hangs or ends a call, with their scores.

    None if the call does not even end well without any text.

    A text alone has its share of the call's seconds, beside those that the call takes without any text. So
    the search takes little longer than the call, however many texts hang.
    """
    begun = time.monotonic()
    if _ended_by(asked(range(count), seconds)) is not None:
        return None
    share = min(seconds, max(1.0, seconds / count) + 2 * (time.monotonic() - begun))
    alone = {i: _ended_by(asked([j for j in range(count) if j != i], share)) for i in range(count)}
    return {i: score for i, score in alone.items() if score is not None}


def _ended_by(found: Outcome) -> Score | None:
    """Return the score of a text that hung, ended the process (an exit, a crash, memory) or raised itself."""
    if found.kind == "timeout" or (found.kind == "ok" and "late" in found.value):
        return Score(0.0, "timeout", detail=found.text or "no answer in time")
    if found.kind == "crashed":
        return Score(0.0, "crashed", detail=found.text)
    reply = found.value if found.kind == "ok" else {"raised": found.text}
    raised = str(reply.get("raised", ""))
    own_end = raised.startswith(("SystemExit", "MemoryError", "KeyboardInterrupt"))
    return Score(0.0, "crashed", detail=raised) if own_end or reply.get("by_text") else None


def without_text(
    arguments: Mapping[str, object], empty: Collection[int], per_sample: bool
) -> dict[str, object]:
    """Return the arguments of a call with the text of some completions replaced by "".

    >>> without_text({"completions": ["a", "b"], "answer": ["1", "1"]}, [1], False)
    {'completions': ['a', ''], 'answer': ['1', '1']}
    """
    found = dict(arguments)
    for name in TEXTS & found.keys() if empty else ():
        value: Any = found[name]
        if per_sample:
            found[name] = _silent(value)
        else:
            found[name] = [_silent(v) if i in empty else v for i, v in enumerate(value)]
    return found


def _silent(said: Any) -> object:
    if isinstance(said, str):
        return ""
    turns = [turn for turn in said if isinstance(turn, Mapping)]  # there are none among token ids
    return [{**turn, "content": ""} if turn.get("role") == "assistant" else turn for turn in turns]


def scores_of(reply: CallReply, context: Context) -> list[Score]:
    """Return the scores of a reply, and log its metrics. Raises Failed or RewardError."""
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
        raise Failed(reply["raised"], reply["trace"])
    return [rebuilt(fields) for fields in reply["scores"]]


def rebuilt(fields: Mapping[str, Any]) -> Score:
    """Return a Score from its fields as JSON."""
    steps = fields.get("steps")
    return Score(**{**fields, "steps": None if steps is None else tuple(map(tuple, steps))})
