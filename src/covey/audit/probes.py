"""Rewards asked once more: one completion at a time, with another problem's row, and with an empty text.

A reward that answers otherwise than in its batch mixes rows up, or is random; one that pays another problem's
row as well, or an empty text, does not read the answer. Only the standard library is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Score = Callable[..., Sequence[float | None]]
"""A reward function as TRL calls it: lists, by keyword, to a value for each completion."""


def probe(
    functions: Mapping[str, Score],
    columns: Mapping[str, Sequence[Any]],
    prompts: Sequence[Any],
    extra: Mapping[str, Any],
) -> list[dict[str, dict[str, float | None]]]:
    """Return `alone`, `elsewhere` and `empty` of each completion: values by reward function.

    ``columns`` have the completions and the data rows, a value each; ``extra`` is handed on as it is. A
    function that fails on one completion has no value for it.
    """
    found = []
    for i, prompt in enumerate(prompts):
        own = {name: values[i] for name, values in columns.items()}
        # The next completion of another prompt gives the row of another problem.
        other = next((j for j in [*range(i + 1, len(prompts)), *range(i)] if prompts[j] != prompt), None)
        text = ("completions", "completion_ids")
        moved = own if other is None else {n: v[i if n in text else other] for n, v in columns.items()}
        silent = {**own, "completions": _emptied(own["completions"]), "completion_ids": []}
        asked = {"alone": own, "empty": silent} | ({} if other is None else {"elsewhere": moved})
        found.append(
            {kind: {n: _value(f, row, extra) for n, f in functions.items()} for kind, row in asked.items()}
        )
    return found


def _emptied(completion: Any) -> Any:
    return "" if isinstance(completion, str) else [{**message, "content": ""} for message in completion]


def _value(function: Score, row: Mapping[str, Any], extra: Mapping[str, Any]) -> float | None:
    try:
        (value,) = function(**{name: [v] for name, v in row.items()}, **extra)
        return None if value is None else float(value)
    except Exception:
        return None
