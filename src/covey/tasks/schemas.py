"""The schemas of other projects, converted to covey's rows: verl, Alpaca, ShareGPT, OpenAI's pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SchemaRow = dict[str, Any]
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's speaker -> the role that chat templates know, if they differ."""


@dataclass(frozen=True)
class Schema:
    """The layout of another project's rows."""

    name: str
    columns: tuple[str, ...]
    """Columns that every row of this schema has."""
    unless: tuple[str, ...]
    """Columns that no row of this schema has: a row with one of them is in covey's names already."""
    adds: Callable[[SchemaRow], SchemaRow]
    """Returns the columns in covey's names to add to a row; none if its values have another form."""
    optional: tuple[str, ...] = ()
    """Further columns that are read if a row has them."""

    def has_filled(self, columns: Mapping[str, object]) -> bool:
        """Return whether a row's columns, without its prompt, contain what this schema would add."""
        if not set(self.columns) <= {*columns, "prompt"}:
            return False
        added = self.adds({"prompt": None, **columns})
        return bool(added) and all(columns.get(n) == value for n, value in added.items() if n != "prompt")


def recognize_schema(row: Mapping[str, object], prompt: str) -> Schema | None:
    """Return the schema of a row whose prompt is in column ``prompt``; None if it uses covey's names."""
    names = {name if name != prompt else "prompt" for name in row}
    return next((s for s in SCHEMAS if set(s.columns) <= names and not set(s.unless) & names), None)


def _verl(row: SchemaRow) -> SchemaRow:
    rule = row["reward_model"]
    return {"answer": rule["ground_truth"]} if isinstance(rule, dict) and "ground_truth" in rule else {}


def _alpaca(row: SchemaRow) -> SchemaRow:
    parts = [str(row[name]) for name in ("instruction", "input") if row.get(name)]
    return {"prompt": "\n\n".join(parts), "completion": row["output"]}


def _sharegpt(row: SchemaRow) -> SchemaRow:
    conversation = row["conversations"]
    if not isinstance(conversation, list) or not all(
        isinstance(m, dict) and {"from", "value"} <= set(m) for m in conversation
    ):
        # Not ShareGPT's form after all: the check of messages reports it.
        return {"messages": conversation}
    messages = [
        {"role": SHAREGPT_ROLES.get(m["from"], m["from"]), "content": m["value"]}
        | {key: value for key, value in m.items() if key not in ("from", "value")}
        for m in conversation
    ]
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.insert(0, {"role": "system", "content": row["system"]})
    return {"messages": messages}


def _openai_pair(row: SchemaRow) -> SchemaRow:
    request = row["input"]
    if not isinstance(request, dict):
        return {}
    # Of the request's other fields (the model, ...) only the tools are part of the prompt.
    tools = {name: value for name, value in request.items() if name == "tools" and value}
    pair = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    return {"prompt": request.get("messages"), **pair, **tools}


# Tried in this order; the first that matches is used.
SCHEMAS = (
    Schema("verl", ("prompt", "reward_model"), ("answer", "ground_truth"), _verl),
    Schema(
        "OpenAI's pairs", ("input", "preferred_output", "non_preferred_output"), ("prompt",), _openai_pair
    ),
    Schema("Alpaca", ("instruction", "output"), ("prompt", "completion"), _alpaca, ("input",)),
    Schema("ShareGPT", ("conversations",), ("prompt", "messages"), _sharegpt, ("system",)),
)
