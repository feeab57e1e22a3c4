"""Given examples to learn from, in TRL's formats: worked answers, pairs, judged answers, labelled steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from covey.config.methods import METHODS, ExampleKind
from covey.config.schema import Data
from covey.system.text import common_prefix_length, percent
from covey.tasks.sampled import REMEDY, SAMPLED
from covey.types import AnswerTokens, Problem
from covey_verify.errors import DataError
from covey_verify.types import Messages

AnswerText = str | Messages
COLUMNS_OF: Mapping[ExampleKind, str] = {
    "pair": "chosen and rejected",
    "judged": "completion and label",
    "steps": "completions (its steps) and labels",
    "answer": "the answer to imitate (data.completion), a text or messages",
}
"""Kind of example -> the columns of its rows, for messages."""
PLACE = re.compile(r"\{(\w+)\}")
"""A column's name in braces, in data.template or data.completion."""
MESSAGES_IN_TEXT = re.compile(r"""\s*\[\s*\{\s*(['"])(role|content|from|value)\1\s*:""")
"""The beginning of a list of messages as JSON or Python writes it."""


UNTRAINED = "weight"
"""Key of an assistant's message that is read but not trained; its value is 0."""
TRAIN_FLAGS = ("weight", "train", "training", "loss")
"""Keys of a message that say whether it is trained: of OpenAI, Mistral, axolotl, and a common one."""


@dataclass(frozen=True)
class Example:
    """A problem with answers and their labels."""

    kind: ExampleKind
    problem: Problem
    answers: tuple[AnswerText, ...]
    """One answer, the chosen and the rejected one, or the steps of one."""
    labels: tuple[float, ...]
    """One label per answer: 1 imitated, chosen, good; 0 rejected, bad."""
    sampled_tokens: tuple[AnswerTokens, ...] = ()
    """The answers' tokens, if an earlier stage has sampled them."""


def with_prompt(row: dict[str, object], where: str, data: Data, answered: bool = False) -> dict[str, object]:
    """Return a row with a prompt column, made of the beginning of its pair or messages if it has none.

    ``answered``: the model answers the prompt itself, so the prompt ends with the last question of a chat.

    >>> with_prompt({"chosen": "2+2= 4", "rejected": "2+2= 5"}, "", Data())
    {'chosen': ' 4', 'rejected': ' 5', 'prompt': '2+2='}
    """
    if "completions" in row and "labels" in row:
        # TRL's column of steps; a reward function's argument `completions` is something else.
        row = {"steps" if k == "completions" else k: v for k, v in row.items()}
    messages = row.get("messages")
    if data.prompt not in row and isinstance(messages, list) and messages:
        if answered:
            return {**_last_question(messages, data), **row}
        first = _first_answer(messages, where)
        return {**row, data.prompt: messages[:first], data.completion: messages[first:]}
    chosen = row.get("chosen")
    rejected = row.get("rejected")
    # TRL's pairs may repeat the prompt in both conversations even if there is a prompt column.
    if data.prompt in row and not (_begins_with_question(chosen) and _begins_with_question(rejected)):
        return row
    shared = _shared_prompt_length(chosen, rejected)
    if shared is None:
        return row
    assert isinstance(chosen, str | list) and isinstance(rejected, str | list), "they share a prompt"
    if shared == 0:
        raise DataError(
            f"{where}: chosen and rejected begin differently, so they share no prompt; give two answers to "
            f"one prompt, with a prompt outside of them in column {data.prompt!r}"
        )
    return {**row, "chosen": chosen[shared:], "rejected": rejected[shared:], data.prompt: chosen[:shared]}


def _shared_prompt_length(chosen: object, rejected: object) -> int | None:
    """Return how many messages or characters of a pair are its prompt; None if there is no pair."""
    if isinstance(chosen, list) and isinstance(rejected, list):
        # At least one message has to remain as an answer.
        return max(0, min(common_prefix_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1))
    if isinstance(chosen, str) and isinstance(rejected, str):
        shared = common_prefix_length(chosen, rejected)
        # A space belongs to the word that follows it.
        return shared - 1 if shared and chosen[shared - 1] == " " else shared
    return None


def _last_question(messages: list[object], data: Data) -> dict[str, object]:
    """Split a conversation into a prompt and, if it ends with the assistant, a reference answer.

    The prompt ends with the last message of the user. Calls and results of tools after it are part of the
    answer that the model is to give.
    """
    roles = _roles(messages)
    if roles[-1] != "assistant":
        return {data.prompt: messages}
    end = len(roles) - roles[::-1].index("user") if "user" in roles else roles.index("assistant")
    content = messages_of(messages[-1:])
    reference = {"answer": content[0]["content"]} if content and content[0]["content"] else {}
    return {data.prompt: messages[:end], **reference}


def _roles(messages: list[object]) -> list[object]:
    return [m.get("role") if isinstance(m, dict) else None for m in messages]


def _first_answer(messages: list[object], where: str) -> int:
    """Return the index of the assistant's first message, where the prompt ends. Raises DataError."""
    roles = _roles(messages)
    if "assistant" not in roles:
        raise DataError(
            f"{where}: 'messages' has no message of the assistant, so there is nothing to imitate. If "
            "they are the prompt, set data.prompt: messages"
        )
    first = roles.index("assistant")
    if first == 0:
        raise DataError(
            f"{where}: 'messages' begins with the assistant, so there is no prompt; begin with a message "
            "of the user or the system"
        )
    return first


def messages_of(value: list[object]) -> Messages | None:
    """Return a list as messages, or None if an element is no message with content or tool calls.

    Nulls, with which parquet pads, are left out: templates ask whether a message has `tool_calls`, and print
    a null content as None. A content of text parts becomes their joined text, which all templates accept.
    """
    messages: list[Mapping[str, object]] = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return None
        fields = {key: part for key, part in message.items() if part is not None}
        content = _content(fields.get("content", "" if fields.get("tool_calls") else None), fields["role"])
        if content is None:
            return None
        messages.append({**fields, "content": content})
    return messages or None


def _content(content: object, role: object) -> object:
    """Return a content that templates accept: a text, or an object that a tool returned; None otherwise."""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"text": part} for part in content]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        only_text = len(texts) == len(parts) and all(part.get("type", "text") == "text" for part in parts)
        return "".join(texts) if only_text else None
    if isinstance(content, int | float) and not isinstance(content, bool):
        return str(content)
    return content if isinstance(content, str) or (isinstance(content, dict) and role == "tool") else None


def _begins_with_question(messages: object) -> bool:
    """Return whether a conversation begins with a message of the user or the system."""
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and first.get("role") in ("user", "system")


def examples_of(problems: Sequence[Problem], method: str, data: Data, max_ties: float) -> list[Example]:
    """Return the examples that a method learns from. Raises DataError naming row and column.

    Pairs of equal answers are left out; more than the fraction ``max_ties`` of them is an error.
    """
    examples = [_example(problem, method, data) for problem in problems]
    kinds = sorted({e.kind for e in examples})
    if len(kinds) > 1:
        first, second = (f"{_first_id(examples, kind)} has {COLUMNS_OF[kind]}" for kind in kinds[:2])
        raise DataError(f"{first}, but {second}: a file must have one kind of example")
    ties = [e for e in examples if _is_tie(e)]
    if len(ties) > max_ties * len(examples):
        raise DataError(
            f"{ties[0].problem.id}: chosen and rejected are the same, as in {len(ties)} of {len(examples)} "
            f"pairs. Remove these rows (scoring.max_bad_references allows {percent(max_ties, 'g')})"
        )
    remaining = [e for e in examples if not _is_tie(e)]
    if examples and not remaining:
        raise DataError(f"{ties[0].problem.id}: chosen and rejected are the same, as in every other pair")
    # A method of judged answers, such as kto, learns from the two answers of a pair one by one.
    if METHODS[method].learns_from[0] == "judged":
        remaining = [answer for e in remaining for answer in _split_pair(e)]
    return remaining


def _is_tie(example: Example) -> bool:
    return example.kind == "pair" and example.answers[0] == example.answers[1]


def _first_id(examples: Sequence[Example], kind: ExampleKind) -> str:
    return next(e.problem.id for e in examples if e.kind == kind)


def _split_pair(example: Example) -> list[Example]:
    if example.kind != "pair":
        return [example]
    return [
        Example("judged", example.problem, (answer,), (label,), example.sampled_tokens[n : n + 1])
        for n, (answer, label) in enumerate(zip(example.answers, example.labels, strict=True))
    ]


def require_both_labels(examples: Sequence[Example]) -> None:
    """Raise DataError if all labels are the same: then there is no difference to learn."""
    labels = {label for e in examples for label in e.labels if e.kind in ("judged", "steps")}
    if len(labels) == 1:
        label = "good" if labels == {1.0} else "bad"
        raise DataError(
            f"{examples[0].problem.id} and all other rows are labelled {label}, so there is nothing to "
            "compare. Add rows with the other label, or use method sft to imitate good answers"
        )


def _example(problem: Problem, method: str, data: Data) -> Example:
    columns = problem.columns
    if problem.sampled_tokens is not None:
        data = Data()  # its columns have covey's names, whatever names the user's file has
    # Kind -> (the columns that its rows have, its reader).
    readers: Mapping[ExampleKind, tuple[set[str], Callable[[Problem, Data], Example]]] = {
        "answer": (set(), _answer_example),
        "pair": ({"chosen", "rejected"}, _pair_example),
        "judged": ({"label", data.completion}, _judged_example),
        "steps": ({"steps", "labels"}, _steps_example),
    }
    # The method lists its kinds in order of preference.
    kinds = METHODS[method].learns_from
    for kind in kinds:
        needed, read = readers[kind]
        if needed <= set(columns):
            return read(problem, data)
    columns_of_kinds = ", or ".join(COLUMNS_OF[kind] for kind in kinds)
    raise DataError(
        f"{problem.id}: method {method} needs {columns_of_kinds}; the row has "
        f"{', '.join(map(repr, columns)) or 'no'} columns. Rename them by data.columns, or write pairs from "
        "a run by `covey pairs RUN`"
    )


def _answer_example(problem: Problem, data: Data) -> Example:
    columns = problem.columns
    if "{" in data.completion:
        missing = [name for name in PLACE.findall(data.completion) if columns.get(name) is None]
        if missing:
            raise DataError(
                f"{problem.id}: data.completion names column {missing[0]!r}, which the row does not have"
            )
        answer: object = PLACE.sub(lambda m: str(columns[m[1]]), data.completion)
    else:
        answer = columns.get(data.completion)
    if answer is None or isinstance(answer, dict):
        raise DataError(
            f"{problem.id}: column {data.completion!r} (data.completion) must hold the answer to imitate, as "
            "text or messages"
        )
    text = _read_answer(problem, data.completion, answer)
    _need_words(problem, text, "the answer to imitate (data.completion)")
    return Example("answer", problem, (text,), (1.0,), _sampled_tokens(problem, data.completion))


def _need_words(problem: Problem, answer: AnswerText, name: str) -> None:
    """Raise DataError for an answer that the model would learn to prefer, and that says nothing."""
    if _is_blank(answer):
        raise DataError(f"{problem.id}: {name} is empty; remove this row")


def _sampled_tokens(problem: Problem, *columns: str) -> tuple[AnswerTokens, ...]:
    """Return the tokens of the answers in these columns; () if no stage has sampled the row."""
    if problem.sampled_tokens is None:
        return ()
    answers = problem.sampled_tokens.answers
    missing = [name for name in columns if name not in answers]
    if missing:
        raise DataError(f"{problem.id}: {SAMPLED} has no tokens for {missing[0]!r}. {REMEDY}")
    return tuple(answers[name] for name in columns)


def _is_blank(answer: AnswerText) -> bool:
    """Return whether an answer, or an assistant's message in it, is only white space."""
    if isinstance(answer, str):
        return not answer.strip()
    by_assistant = [m for m in answer if m["role"] == "assistant"]
    return any(set(m) <= {"role", "content"} and not str(m["content"]).strip() for m in by_assistant)


def _pair_example(problem: Problem, _: Data) -> Example:
    names = ("chosen", "rejected")
    answers = tuple(_read_answer(problem, name, problem.columns[name]) for name in names)
    # A completion that was sampled may be empty and yet the better one.
    if problem.sampled_tokens is None:
        _need_words(problem, answers[0], "the chosen answer")
    return Example("pair", problem, answers, (1.0, 0.0), _sampled_tokens(problem, *names))


def _judged_example(problem: Problem, data: Data) -> Example:
    answer = _read_answer(problem, data.completion, problem.columns[data.completion])
    label = _read_label(problem, problem.columns["label"])
    if label and problem.sampled_tokens is None:
        _need_words(problem, answer, "an answer labelled good")
    return Example("judged", problem, (answer,), (label,), _sampled_tokens(problem, data.completion))


def _steps_example(problem: Problem, _: Data) -> Example:
    steps = problem.columns["steps"]
    labels = problem.columns["labels"]
    if not (isinstance(steps, list) and isinstance(labels, list) and steps):
        raise DataError(f"{problem.id}: completions and labels must be lists, with a label for each step")
    if len(steps) != len(labels):
        raise DataError(f"{problem.id}: completions has {len(steps)} steps, but labels has {len(labels)}")
    texts = tuple(step for step in steps if isinstance(step, str) and step.strip())
    if len(texts) != len(steps):
        raise DataError(f"{problem.id}: step {len(texts) + 1} is empty or not text")
    return Example("steps", problem, texts, tuple(_read_label(problem, label) for label in labels))


def label_of(label: object) -> float | None:
    """Return 1 for true and 0 for false, however a file writes them; None for anything else."""
    values = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
    return values.get(str(label).strip().lower())


def _read_label(problem: Problem, label: object) -> float:
    value = label_of(label)
    if value is None:
        raise DataError(f"{problem.id}: the label must be true or false (1 or 0), not {str(label)[:40]!r}")
    return value


def _read_answer(problem: Problem, column: str, answer: object) -> AnswerText:
    """Return an answer: a text, or messages if the prompt is a chat. Raises DataError."""
    if isinstance(answer, list):
        messages = messages_of(answer)
        if messages is None:
            raise DataError(
                f"{problem.id}: {column!r} must be text or {{role, content}} messages, each content text or "
                f"parts of text, not {str(answer)[:120]!r}"
            )
        if messages[-1]["role"] != "assistant":
            raise DataError(
                f"{problem.id}: {column!r} must end with a message of the assistant, not of "
                f"{messages[-1]['role']!r}"
            )
        if isinstance(problem.prompt, str):
            raise DataError(
                f"{problem.id}: {column!r} is a chat, but the prompt is text; set data.chat: true"
            )
        return _mark_untrained(problem, column, messages)
    if answer is None:
        raise DataError(f"{problem.id}: {column!r} has no value (null, or NaN); leave the row out")
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise DataError(f"{problem.id}: {column!r} must be text, not {str(answer)[:60]!r}")
    if problem.sampled_tokens is None:
        refuse_messages_in_text(problem.id, column, str(answer))
    return str(answer)


def refuse_messages_in_text(where: str, column: str, text: str) -> None:
    """Raise DataError for a text that is a list of messages, for example from a CSV.

    The model would read its brackets and quotes.
    """
    if MESSAGES_IN_TEXT.match(text):
        raise DataError(
            f"{where}: {column!r} is a text that holds a list of messages, {text[:40]!r}...; write these "
            "rows as JSONL or parquet, where it is a list"
        )


def _mark_untrained(problem: Problem, column: str, messages: Messages) -> Messages:
    """Mark untrained messages with ``UNTRAINED``, whichever key the row uses. Return all messages."""
    result = []
    for message in messages:
        flags = {name: message[name] for name in TRAIN_FLAGS if name in message}
        for name, value in flags.items():
            if value not in (0, 1):  # True and False are 1 and 0
                raise DataError(
                    f"{problem.id}: a message in {column!r} has {name}: {str(value)[:40]!r}; use 0 or false "
                    "for a message that is read but not trained, else 1"
                )
        plain = {name: value for name, value in message.items() if name not in flags}
        skipped = message["role"] == "assistant" and not all(flags.values())
        result.append({**plain, UNTRAINED: 0} if skipped else plain)
    if all(UNTRAINED in m for m in result if m["role"] == "assistant"):
        raise DataError(f"{problem.id}: {column!r} has no trained message; remove this row")
    return result
