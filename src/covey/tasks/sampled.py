"""Rows that a stage has sampled: besides texts, which are for people, they have the token ids to train.

    {"prompt": "2+3=", "completion": "5", "sampled_tokens": {
        "tokenizer": "6f0c...", "texts": "91ab...", "prompt": [20, 13, 21, 31], "completion": [23, 2],
        "inserted": {"completion": [[4, 9]]}}}

`texts` is a hash of prompt and answers, so that a text which somebody has changed is not passed over.
`inserted` has the spans, [first, one after the last], that a tool said; where there are none it is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated

from annotated_types import Ge, Len
from pydantic import BaseModel, ConfigDict, ValidationError

from covey.types import AnswerTokens, SampledTokens
from covey_verify.errors import DataError

SAMPLED = "sampled_tokens"
"""The column."""
ANSWERS = ("completion", "chosen", "rejected")
"""Columns with what was sampled."""
REMEDY = (
    f"Take {SAMPLED} out of the rows to have their texts encoded; data.system, data.template and the other "
    "settings of `data` are applied to them then"
)
Ids = Annotated[list[Annotated[int, Ge(0)]], Len(1)]


class _Column(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    tokenizer: str
    texts: str
    prompt: Ids
    completion: Ids | None = None
    chosen: Ids | None = None
    rejected: Ids | None = None
    inserted: dict[str, list[Annotated[list[int], Len(2, 2)]]] = {}


def sampled_column(row: Mapping[str, object], tokens: SampledTokens) -> dict[str, object]:
    """What the column of a row holds; ``row`` has the texts."""
    inserted = {name: answer.inserted for name, answer in tokens.answers.items() if answer.inserted}
    return {
        "tokenizer": tokens.tokenizer,
        "texts": texts_hash(row),
        "prompt": list(tokens.prompt),
        **{name: list(answer.ids) for name, answer in tokens.answers.items()},
        **({"inserted": inserted} if inserted else {}),
    }


def read_sampled(where: str, row: Mapping[str, object]) -> SampledTokens:
    """The token ids of a row. Raises DataError where they are damaged, or not those of its texts any more."""
    value = row[SAMPLED]
    try:
        column = _Column.model_validate(json.loads(value) if isinstance(value, str) else _known(value))
        every = {"completion": column.completion, "chosen": column.chosen, "rejected": column.rejected}
        answers = {name: ids for name, ids in every.items() if ids is not None}
        found = {name: _answer(ids, column.inserted.get(name, [])) for name, ids in answers.items()}
    except (ValidationError, ValueError) as error:
        said = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
        raise DataError(f"{where}: {SAMPLED} is damaged: {said}. {REMEDY}") from None
    if texts_hash(row) != column.texts:
        raise DataError(
            f"{where}: the prompt or the answer was changed after it was sampled, and its tokens "
            f"({SAMPLED}) are still those of before. {REMEDY}"
        )
    return SampledTokens(column.tokenizer, tuple(column.prompt), found)


def texts_hash(row: Mapping[str, object]) -> str:
    """Of prompt and answers, whatever else a row has; the same after a way through parquet or CSV."""
    said = [_said(row.get(name)) for name in ("prompt", *ANSWERS)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _said(value: object) -> object:
    if isinstance(value, list):
        return [[m.get("role"), m.get("content")] if isinstance(m, Mapping) else m for m in value]
    return value


def _known(value: object) -> object:
    """Without the nulls with which parquet pads."""
    if not isinstance(value, Mapping):
        return value
    found = {name: part for name, part in value.items() if part is not None}
    spans = found.get("inserted")
    if isinstance(spans, Mapping):
        found["inserted"] = {name: part for name, part in spans.items() if part is not None}
    return found


def _answer(ids: list[int], inserted: list[list[int]]) -> AnswerTokens:
    drawn = [True] * len(ids)
    for first, after in inserted:
        if not 0 <= first < after <= len(ids):
            raise ValueError(f"{first} to {after} are no places of {len(ids)} tokens")
        drawn[first:after] = [False] * (after - first)
    if not any(drawn):
        raise ValueError("an answer of which nothing was drawn")
    return AnswerTokens(tuple(ids), tuple(drawn))
