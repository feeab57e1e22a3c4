"""Probes of reward functions: further calls with a completion alone, another problem's row, or other texts.

A reward that scores a completion alone differently than in its batch mixes up rows, or is random. A reward
that pays as much with another problem's row, or for an empty text, does not read the answer. A reward that
pays a list of all answers finds the correct answer anywhere in a text. This module needs only the standard
library, since it runs inside other trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

ANSWERS = (
    "answer", "solution", "target", "label", "ground_truth", "gold", "gts", "expected", "reference_answer",
)  # fmt: skip
"""Columns that are usually a row's answer; `gts` in a dump of verl."""
MAX_LISTED = 64
"""Most answers in a list."""
MAX_LISTED_CHARACTERS = 40
"""Most characters of an answer in a list; longer ones are proofs or programs."""
TEXT = ("completions", "completion_ids")
"""Columns with a completion; the others belong to its data row."""
Score = Callable[..., Sequence[float | None]]
"""A reward function as TRL calls it: lists by keyword -> a value for each completion."""


def probe(
    functions: Mapping[str, Score],
    columns: Mapping[str, Sequence[object]],
    prompts: Sequence[object],
    extra: Mapping[str, object],
) -> list[dict[str, dict[str, float | None]]]:
    """Return `alone`, `elsewhere`, `empty` and `listed` of each completion: values by reward function.

    ``columns`` hold the completions and the data rows, a value for each; ``extra`` is passed on unchanged. A
    function that fails on a completion gives it no value.
    """
    answers = _listed_answers(columns)
    results = []
    for i, prompt in enumerate(prompts):
        row = {name: values[i] for name, values in columns.items()}
        questions = {"alone": row, "empty": _with_text(row, "")}
        # The next completion with another prompt has another problem's row.
        other_index = next(
            (j for j in [*range(i + 1, len(prompts)), *range(i)] if prompts[j] != prompt), None
        )
        if other_index is not None:
            questions["elsewhere"] = {n: v[i if n in TEXT else other_index] for n, v in columns.items()}
        if answers:
            questions["listed"] = _with_text(row, answers)
        results.append(
            {
                kind: {name: _value(function, question, extra) for name, function in functions.items()}
                for kind, question in questions.items()
            }
        )
    return results


def _listed_answers(columns: Mapping[str, Sequence[object]]) -> str:
    """Return the different answers of all rows as one text; '' if they are not short texts or numbers."""
    # Some trainers pass a whole data row as one value, so its columns are inside.
    nested = [row for values in columns.values() for row in values if isinstance(row, Mapping)]
    answers = [value for name in ANSWERS for value in columns.get(name, ())]
    answers += [row[name] for row in nested for name in ANSWERS if name in row]
    short = [str(answer).strip() for answer in answers if isinstance(answer, str | int | float)]
    different = [answer for answer in dict.fromkeys(short) if answer]
    if len(different) < 2 or max(map(len, different)) > MAX_LISTED_CHARACTERS:
        return ""
    return " ".join(different[:MAX_LISTED])


def _with_text(row: Mapping[str, Any], text: str) -> dict[str, object]:
    """Return a row with another completion, whose ids are unknown."""
    sampled = row["completions"]
    completion = text if isinstance(sampled, str) else [{**message, "content": text} for message in sampled]
    return {**row, "completions": completion, "completion_ids": []}


def _value(function: Score, row: Mapping[str, object], extra: Mapping[str, object]) -> float | None:
    try:
        (value,) = function(**{name: [v] for name, v in row.items()}, **extra)
        return None if value is None else float(value)
    except Exception:
        return None
