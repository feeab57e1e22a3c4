"""The readers of each column, printed before a run so that the user notices unread columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter

from covey.config.schema import Data
from covey.rewards.contract import Reward
from covey.tasks.examples import PLACE, Example
from covey.tasks.files import TEMPLATE_COLUMNS, has_system
from covey.tasks.schemas import SCHEMAS
from covey.types import Problem

EVERYTHING = "*"
"""A reader's name for all columns."""
UNREAD_REMEDIES: Mapping[str, str] = {
    "input": "often a part of the question: put it into data.template, as '{prompt}\\n\\n{input}'",
    "system": "set data.system, or write a message of the role system into each row's prompt",
    "weight": "covey weights all rows equally; remove rows that must not be trained",
    "loss_mask": "covey determines itself which tokens the model writes",
    "reward_model": "verl's; set data.answer to the path of the reference in it",
    "ground_truth": "set data.answer: ground_truth",
    "tools": "only the template of a chat lists them: set data.chat: true",
    "images": "covey trains text only",
    "label": "methods kto and reward_model read it",
    "chosen": "preference methods and reward_model read it",
    "rejected": "preference methods and reward_model read it",
    "margin": "covey does not use margins of pairs",
}
"""Columns that usually change what should be trained, and the remedy for each."""


def find_readers(
    problems: Sequence[Problem],
    examples: Sequence[Example],
    data: Data,
    rewards: Iterable[Reward],
    others: Mapping[str, Iterable[str]],
) -> dict[str, list[str]]:
    """Return column -> its readers, over all rows; an empty list if there are none.

    ``others`` maps further readers (tools, environments) to the columns that they ask for.
    """
    rows = [*problems, *(e.problem for e in examples)]
    columns: dict[str, list[str]] = {name: [] for row in rows for name in row.columns}
    readings = [
        *_data_readers(rows, data),
        *(("the answers to learn from", _example_columns(example, data)) for example in examples),
        *((reward.name, _reward_columns(reward, columns)) for reward in rewards),
        *others.items(),
    ]
    for who, names in readings:
        read = set(columns) if EVERYTHING in names else set(columns) & set(names)
        for column in read:
            if who not in columns[column]:
                columns[column].append(who)
    return columns


def _data_readers(rows: Sequence[Problem], data: Data) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield (reader, its columns) for the settings of ``data`` and for the rows' schema."""
    for schema in SCHEMAS:
        # The columns of a schema have been added by now, so it is recognized by them.
        if any(schema.has_filled(row.columns) for row in rows):
            yield f"read as {schema.name} writes it", (*schema.columns, *schema.optional)
    yield "data.template", PLACE.findall(data.template or "")
    for name, source in {**data.columns, "answer": data.answer or ""}.items():
        yield f"copied to {name}", (source, source.partition(".")[0])
    if any(_asks_in_messages(row) for row in rows):
        yield "the prompt", ("messages",)
    if any(not isinstance(row.prompt, str) for row in rows):
        yield "the chat template", (*TEMPLATE_COLUMNS, "chat_template_kwargs")


def _asks_in_messages(row: Problem) -> bool:
    """Return whether a row's prompt was taken from its conversation."""
    messages = row.columns.get("messages")
    return isinstance(messages, list) and not isinstance(row.prompt, str) and row.prompt[-1] in messages


def _example_columns(example: Example, data: Data) -> Sequence[str]:
    if example.kind == "pair":
        return ("chosen", "rejected")
    if example.kind == "steps":
        return ("steps", "labels")
    # A template names several columns; a path such as `a.b` names the column `a`.
    names = PLACE.findall(data.completion) if "{" in data.completion else [data.completion.partition(".")[0]]
    if example.kind == "judged":
        names.append("label")
    return (*names, data.completion, "messages")


def _reward_columns(reward: Reward, columns: Iterable[str]) -> list[str]:
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in reward.parameters.values())
    names = [*reward.parameters, *reward.options.columns, *(columns if takes_all else ())]
    if "ground_truth" in names:
        names.append("answer")
    # A function of one completion gets the model's text under this name, never the column.
    return [name for name in names if name != "completion" or not reward.per_sample]


def print_readers(columns: Mapping[str, Sequence[str]], say: Callable[..., object]) -> None:
    """Print the readers of all columns, and warn of each unread column with a usual meaning."""
    read = [f"{name} ({', '.join(who)})" for name, who in columns.items() if who]
    unread = [name for name, who in columns.items() if not who]
    parts = [f"columns: {', '.join(read)}"] if read else []
    plain = [name for name in unread if name not in UNREAD_REMEDIES]
    if plain:
        parts.append(f"columns that nothing reads: {', '.join(plain)}")
    if parts:
        say("; ".join(parts))
    for name in unread:
        if name in UNREAD_REMEDIES:
            say(f"nothing reads column {name!r}; {UNREAD_REMEDIES[name]}", "yellow")


def system_notes(problems: Iterable[Problem], data: Data) -> list[str]:
    """Return a note if rows have a system message of their own, which replaces ``data.system``."""
    if data.system is None:
        return []
    chats = [(problem, problem.prompt) for problem in problems if not isinstance(problem.prompt, str)]
    rows = [
        problem
        for problem, messages in chats
        if has_system(messages) and messages[0]["content"] != data.system
    ]
    if not rows:
        return []
    count = "the row has" if len(rows) == 1 else f"{len(rows):,} rows have"
    return [f"{rows[0].id}: {count} a system message, which replaces data.system"]
