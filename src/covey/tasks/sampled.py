"""Rows that a stage has sampled: besides texts for people, they have the token ids to train.

    {"prompt": "2+3=", "completion": "5", "sampled_tokens": {
        "tokenizer": "6f0c...", "texts": "91ab...", "prompt": [20, 13, 21, 31], "completion": [23, 2],
        "inserted": {"completion": [[4, 9]]}}}

`texts` is a hash of prompt and answers, so that a changed text is noticed. `inserted` has the spans, [first,
one after the last], of tools' replies; it is left out if there are none.
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
"""Name of the column with the token ids."""
ANSWER_COLUMNS = ("completion", "chosen", "rejected")
"""Columns with sampled text."""
REMEDY = (
    f"Remove {SAMPLED} from the rows to encode their texts instead; data.system, data.template and the other "
    "settings of `data` then apply to them"
)
# At least one token id, none of them negative.
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
    """Return the value of a row's column; ``row`` has the texts."""
    inserted = {name: answer.inserted for name, answer in tokens.answers.items() if answer.inserted}
    return {
        "tokenizer": tokens.tokenizer,
        "texts": texts_hash(row),
        "prompt": list(tokens.prompt),
        **{name: list(answer.ids) for name, answer in tokens.answers.items()},
        **({"inserted": inserted} if inserted else {}),
    }


def read_sampled(where: str, row: Mapping[str, object]) -> SampledTokens:
    """Return the token ids of a row. Raises DataError if they are damaged or its texts were changed."""
    value = row[SAMPLED]
    try:
        column = _Column.model_validate(json.loads(value) if isinstance(value, str) else without_nulls(value))
        every = {"completion": column.completion, "chosen": column.chosen, "rejected": column.rejected}
        answers = {name: ids for name, ids in every.items() if ids is not None}
        sampled = {name: _answer(ids, column.inserted.get(name, [])) for name, ids in answers.items()}
    except (ValidationError, ValueError) as error:
        reason = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
        raise DataError(f"{where}: {SAMPLED} is damaged: {reason}. {REMEDY}") from None
    if texts_hash(row) != column.texts:
        raise DataError(
            f"{where}: the prompt or the answer was changed after sampling, but its tokens ({SAMPLED}) were "
            f"not. {REMEDY}"
        )
    return SampledTokens(column.tokenizer, tuple(column.prompt), sampled)


def texts_hash(row: Mapping[str, object]) -> str:
    """Return a hash of prompt and answers only, the same after a conversion to parquet or CSV and back."""
    texts = [_roles_and_contents(row.get(name)) for name in ("prompt", *ANSWER_COLUMNS)]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _roles_and_contents(value: object) -> object:
    if isinstance(value, list):
        return [[m.get("role"), m.get("content")] if isinstance(m, Mapping) else m for m in value]
    return value


def without_nulls(value: object) -> object:
    """Return a value of a row without the nulls with which parquet pads its objects."""
    if isinstance(value, Mapping):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _answer(ids: list[int], inserted: list[list[int]]) -> AnswerTokens:
    by_model = [True] * len(ids)  # False: a tool inserted the token
    for first, after in inserted:
        if not 0 <= first < after <= len(ids):
            raise ValueError(f"{first} to {after} are not positions among {len(ids)} tokens")
        by_model[first:after] = [False] * (after - first)
    if not any(by_model):
        raise ValueError("no token of the answer was sampled")
    return AnswerTokens(tuple(ids), tuple(by_model))
