"""The scoring of given completions: one call, and a table over a JSONL file."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from covey_verify.contract import RewardFunction
from covey_verify.errors import ConfigError, CoveyError, DataError, describe_error
from covey_verify.extract import TextOrMessages, text_of
from covey_verify.machine import available_cpus
from covey_verify.parsing import parse_json
from covey_verify.types import Row, Score

NOT_IN_TEXTS = {
    "completion_ids": "token ids", "sampled_ids": "token ids", "environment": "an environment",
    "environments": "environments", "trainer_state": "a trainer", "log_extra": "a trainer",
    "log_metric": "a trainer",
}  # fmt: skip
"""Arguments that a text alone cannot provide, and what they need."""
# Seconds between two lines of progress.
PROGRESS_SECONDS = 10.0


def check(function: RewardFunction, columns: Sequence[str], available: Sequence[str] = ()) -> str | None:
    """Return why a function cannot judge texts with these columns, or None.

    ``available`` are the arguments in NOT_IN_TEXTS that the caller has nevertheless.
    """
    for name, parameter in function.parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if needed and name in NOT_IN_TEXTS and name not in (*available, *columns, *function.settings):
            return f"asks for `{name}`: it needs {NOT_IN_TEXTS[name]}, and there are only texts"
    return function.problem_with(columns)


def scores_of(
    function: RewardFunction,
    row: Row,
    completions: Sequence[TextOrMessages],
    ids: Sequence[Sequence[int]] | None = None,
) -> list[Score]:
    """Return a function's scores of completions of one row, from one call if it judges groups.

    ``ids`` are their tokens, if known. A function that raises gives scores without a value. Raises
    RewardError for an invalid return value, and other errors that a user can repair.
    """
    if not function.per_sample:
        return _call_function(function, row, completions, ids)
    scores = list[Score]()
    for i, completion in enumerate(completions):
        scores += _call_function(function, row, [completion], None if ids is None else [ids[i]])
    return scores


def _call_function(
    function: RewardFunction,
    row: Row,
    completions: Sequence[TextOrMessages],
    ids: Sequence[Sequence[int]] | None,
) -> list[Score]:
    try:
        returned = function.function(**_arguments(function, row, completions, ids))
        if asyncio.iscoroutine(returned):
            returned = asyncio.run(returned)
    except CoveyError:
        raise
    except Exception as error:
        detail = describe_error(error, "" if function.ours else function.file)[:300]
        return [Score(None, "infra_error", detail=detail)] * len(completions)
    return function.scores(row.id, returned, len(completions))


def _arguments(
    function: RewardFunction,
    row: Row,
    completions: Sequence[TextOrMessages],
    ids: Sequence[Sequence[int]] | None,
) -> dict[str, object]:
    """Return the arguments of a call; a text without tokens has no token ends."""
    offered = function.offer_arguments(row, completions, [text_of(c) for c in completions])
    turns = [[{"role": "assistant", "content": c}] if isinstance(c, str) else list(c) for c in completions]
    per_sample = function.per_sample
    offered |= {"turns": turns[0] if per_sample else turns, "token_ends": []}
    if ids is not None:
        lists = [list(tokens) for tokens in ids]
        offered |= dict.fromkeys(("completion_ids", "sampled_ids"), lists[0] if per_sample else lists)
    return function.choose_arguments(offered)


CompletionRow: TypeAlias = tuple[Row, TextOrMessages, Mapping[str, object]]
"""A row, its completion, and the whole object of its line."""


def read_rows(file: Path) -> Iterator[CompletionRow]:
    """Yield each line of a JSONL file. Raises DataError with file and line."""
    try:
        # Not `splitlines`: JSON may hold other line separators of Unicode within a text.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        fields = parse_json(line, where)
        if not isinstance(fields, dict):
            raise DataError(
                f"{where}: a line must be an object with a 'completion', not a {type(fields).__name__}"
            )
        columns = {name: value for name, value in fields.items() if name not in ("completion", "prompt")}
        row = Row(f"{file.name}:{number}", fields.get("prompt", ""), columns)
        yield row, fields.get("completion", ""), fields


def score_file(
    file: Path, functions: Sequence[RewardFunction], say: Callable[[str], object] = lambda _: None
) -> list[dict[str, Any]]:
    """Return each row of a file with every function's score of its completion.

    ``say`` gets a line of progress every few seconds. Raises RewardError, or DataError naming the file and
    line of a row that cannot be judged.
    """
    rows = _judgeable_rows(file, functions)
    # Functions that do not declare themselves concurrent are called by one thread at a time.
    plain = (f for f in functions if not (f.options.concurrent or f.is_async))
    locks = {function.name: threading.Lock() for function in plain}

    def score_entry(entry: CompletionRow) -> dict[str, Any]:
        row, completion, fields = entry
        scores = dict[str, Score]()
        for function in functions:
            with locks.get(function.name, contextlib.nullcontext()):
                (scores[function.name],) = scores_of(function, row, [completion])
        return record(fields, scores)

    records = list[dict[str, Any]]()
    last_report = time.monotonic()
    with ThreadPoolExecutor(max(2, available_cpus())) as pool:
        for judged_row in pool.map(score_entry, rows):
            records.append(judged_row)
            if time.monotonic() - last_report > PROGRESS_SECONDS:
                last_report = time.monotonic()
                say(f"{len(records)} of {len(rows)} rows")
    return records


def _judgeable_rows(file: Path, functions: Sequence[RewardFunction]) -> list[CompletionRow]:
    """Return the rows of a file. Raises DataError or ConfigError unless the functions can judge them all."""
    rows = list(read_rows(file))
    if not rows:
        raise DataError(f"{file}: the file has no rows")
    for row, completion, fields in rows:
        where = file.parent / row.id
        if not _is_completion(completion) or "completion" not in fields:
            raise DataError(f"{where}: 'completion' must be text, or messages {{role, content}}")
        _check_columns(where, row, functions)
    return rows


def _check_columns(where: Path, row: Row, functions: Sequence[RewardFunction]) -> None:
    """Raise DataError or ConfigError if a function cannot be called with the columns of a row."""
    for function in functions:
        complaint = check(function, list(row.columns))
        if complaint:
            kind = DataError if "column" in complaint else ConfigError
            has = ", ".join(map(repr, row.columns)) or "no columns"
            raise kind(f"{where}: reward {function.name} {complaint}; the row has {has}")


def record(row: Mapping[str, object], scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return a row and its scores by name, as written to a file."""
    return {
        **row,
        "rewards": {name: s.value for name, s in scores.items()},
        "status": {name: s.status for name, s in scores.items()},
        "extracted": {name: s.extracted for name, s in scores.items() if s.extracted is not None},
        "parts": {name: dict(s.metrics) for name, s in scores.items() if s.metrics},
        "detail": {name: s.detail for name, s in scores.items() if s.detail},
    }


def mean(values: Sequence[float | None]) -> float:
    """Return the mean of the values that are not None; NaN if there are none.

    >>> mean([1.0, None, 0.5])
    0.75
    """
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else float("nan")


def table(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return a line for each function: its mean, and how often each status occurred.

    >>> table([{"rewards": {"f": 1.0}, "status": {"f": "ok"}}], ["f"])
    ['f  mean 1.000 of 1 rows: 1 ok']
    """
    lines = list[str]()
    width = max(map(len, names))
    for name in names:
        statuses = [record["status"][name] for record in records]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        average = mean([record["rewards"][name] for record in records])
        lines.append(f"{name:{width}}  mean {average:.3f} of {len(records)} rows: {counts}")
    return lines


def _is_completion(value: object) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)
