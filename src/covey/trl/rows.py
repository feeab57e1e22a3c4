"""Rows in TRL's formats as token ids, tokenized as TRL does, and as the rows that covey trains on.

TRL puts the end of sequence after a text and renders conversations by the chat template; which tokens are
trained follows from the columns. A prepared row has `input_ids` and `labels`, -100 where nothing is trained,
or `prompt_ids`, `chosen_ids` and `rejected_ids`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from covey.config.python_objects import MAX_STREAMED, listed, without_format
from covey.models.chat import assistant_spans
from covey.models.policy import vocabulary_hash
from covey.rng import key, permutation
from covey.system.text import common_prefix_length
from covey.tasks.sampled import SAMPLED, sampled_column
from covey.trl.configs import Arguments
from covey.trl.meanings import Refused
from covey.types import AnswerTokens, SampledTokens

LOGGER = logging.getLogger("covey.trl")
Row = dict[str, Any]
UNTRAINED = -100
"""TRL's label of a token that is not trained."""


def is_stream(rows: object) -> bool:
    """Whether rows are read one after another, from an iterator or a data set without a length."""
    return isinstance(rows, Iterable) and not hasattr(rows, "__len__")


def streamed_rows(rows: object, most: int | None) -> list[Row]:
    """Return the first ``most`` rows of a training stream. Raises Refused if that number is not known."""
    if most is None:
        raise Refused("train_dataset: a stream has no length, so `max_steps` must be set")
    return list_rows(rows, "train_dataset", most)


def list_rows(rows: object, what: str, most: int | None = None) -> list[Row]:
    """Return rows as a list, at most ``most`` of a stream. Raises Refused for an endless stream."""
    if isinstance(rows, Mapping):
        raise Refused(f"{what}: this is a mapping of tables; give one of them, as rows['train']")
    if isinstance(rows, str | bytes) or not (isinstance(rows, Iterable) or hasattr(rows, "__getitem__")):
        raise Refused(f"{what}: give a table of rows, not {type(rows).__name__}")
    table = listed(what, rows)
    if table is not None:
        return [dict(row) for row in table]
    stream = without_format(rows)
    streamed = [dict(row) for row in islice(stream, MAX_STREAMED + 1 if most is None else most)]
    if len(streamed) > MAX_STREAMED:
        raise Refused(f"{what}: the stream has more than {MAX_STREAMED:,} rows: give it `.take(n)` of them")
    return streamed


def like(table: object, rows: list[Row]) -> Any:
    """Return prepared rows in the class of the table that was given, where it can be made of a list."""
    make = getattr(type(table), "from_list", None)
    return make(rows) if make is not None else rows


def in_order(rows: Sequence[Row], seed: int, places: int) -> list[Row]:
    """Return rows so that a run of ``places`` places takes them in the order given.

    covey permutes each epoch by its seed; the rows of all epochs, placed by the inverse, are one.
    """
    every = [rows[n % len(rows)] for n in range(max(places, len(rows)))]
    order = permutation(key(seed, "order", 0), len(every))
    placed: list[Row] = [{}] * len(every)
    for n, position in enumerate(order):
        placed[int(position)] = every[n]
    return placed


class RowReader:
    """Reads rows by a tokenizer, with a config's settings of rows."""

    def __init__(self, tokenizer: Any, args: Arguments) -> None:
        self.tokenizer = tokenizer
        self.args = args
        self.identity = vocabulary_hash(tokenizer)
        self.warned = False
        end = getattr(args, "eos_token", None) or tokenizer.eos_token
        self.end = str(end or "")
        template = getattr(args, "chat_template_path", None)
        if template:
            tokenizer.chat_template = _template(template)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokenizer's own beginning."""
        return list(self.tokenizer(text)["input_ids"])

    def chat(self, messages: Sequence[Any], row: Row, begin: bool = False) -> list[int]:
        """Return the ids of a conversation, rendered with the row's tools and template arguments."""
        if self.tokenizer.chat_template is None:
            raise Refused("a conversation needs a chat template, which this tokenizer does not have")
        tools = row.get("tools")
        extra = {
            **(getattr(self.args, "chat_template_kwargs", None) or {}),
            **(row.get("chat_template_kwargs") or {}),
        }
        rendered = self.tokenizer.apply_chat_template(
            [bare(m) for m in messages],
            tools=json.loads(tools) if isinstance(tools, str) else tools,
            add_generation_prompt=begin,
            tokenize=True,
            return_dict=True,
            **extra,
        )
        return list(rendered["input_ids"])

    def with_end(self, text: str) -> str:
        """Return a text with the end of sequence behind it."""
        return text if not self.end or text.endswith(self.end) else text + self.end

    def answers(self, prompt: Any, texts: Sequence[Any], row: Row) -> tuple[list[int], list[list[int]]]:
        """Return the ids of a prompt and of each answer to it.

        A prompt alone may have other ids than before an answer: tokens merge across the border, or the
        template renders it otherwise. As in TRL an answer then begins where the two part, with a warning.
        Raises Refused if nothing of the prompt is left.
        """
        if isinstance(prompt, str):
            before = self.ids(prompt)
            whole = [self.ids(self.with_end(prompt + answer)) for answer in texts]
        else:
            before = self.chat(prompt, row, begin=True)
            whole = [self.chat([*prompt, *answer], row) for answer in texts]
        shared = min(common_prefix_length(before, ids) for ids in whole)
        if before and not shared:
            raise Refused(f"train_dataset: {prompt!r:.80} alone has other tokens than before its answer")
        if shared < len(before) and not self.warned:
            self.warned = True
            LOGGER.warning(
                "The tokenized prompt is not a prefix of the tokenized prompt with its answer: %r at its end "
                "is left out, and the answer begins there. A sampler sees another context than is trained. "
                "Other rows may have this too",
                self.tokenizer.decode(before[shared:]),
            )
        return before[:shared], [ids[shared:] for ids in whole]


def bare(message: Mapping[str, object]) -> dict[str, object]:
    """Return a message in OpenAI's keys, without the nulls that tables pad with."""
    renamed = {"from": "role", "value": "content"}
    roles = {"human": "user", "gpt": "assistant"}
    filled = {renamed.get(k, k): v for k, v in message.items() if v is not None}
    role = filled.get("role")
    return {**filled, "role": roles.get(str(role), role)}


def _template(path: str) -> str:
    """Return the chat template of a file, or of the tokenizer of a folder or hub id."""
    if Path(path).is_file():
        return Path(path).read_text("utf-8")
    from covey.models.pretrained import pretrained_tokenizer, unreachable

    return str(pretrained_tokenizer(path, local_files_only=unreachable(path)).chat_template)


def language_row(reader: RowReader, row: Row) -> Row:
    """Return an SFT row's ids and labels: a text, a conversation, a prompt with its completion, or ids."""
    args = reader.args
    if "input_ids" in row:
        return _read_pretokenized(row)
    messages = row.get("messages") or row.get("conversations")
    if messages is not None:
        return (
            _assistants(reader, [], messages, row)
            if args.assistant_only_loss
            else _all_trained(reader.chat(messages, row))
        )
    if "prompt" in row and "completion" in row:
        if args.assistant_only_loss and not isinstance(row["prompt"], str):
            return _assistants(reader, row["prompt"], row["completion"], row)
        before, (after,) = reader.answers(row["prompt"], [row["completion"]], row)
        only = args.completion_only_loss is not False
        return {
            "input_ids": before + after,
            "labels": [UNTRAINED] * len(before) + after if only else before + after,
        }
    text = row.get(args.dataset_text_field)
    if not isinstance(text, str):
        raise Refused(
            f"train_dataset: a row has {', '.join(row)}, but SFT reads `{args.dataset_text_field}`, "
            "`messages`, `prompt` with `completion`, or `input_ids`"
        )
    return _all_trained(reader.ids(reader.with_end(text)))


def _assistants(reader: RowReader, before: Sequence[Any], messages: Sequence[Any], row: Row) -> Row:
    """Return a conversation in which the assistant's messages after ``before`` are trained.

    Raises Refused if the template changes earlier messages when one is added.
    """
    every = [bare(message) for message in (*before, *messages)]
    ids = reader.chat(every, row)
    spans = assistant_spans(
        lambda part, begin: reader.chat(part, row, begin),
        every,
        len(before),
        ids,
        [reader.tokenizer.eos_token_id],
    )
    if spans is None:
        raise Refused(
            "assistant_only_loss: the chat template changes earlier messages when one is added, so the "
            "assistant's tokens cannot be located; give each answer its own row"
        )
    labels = [UNTRAINED] * len(ids)
    for span in spans:
        # TRL's templates for training train all that belongs to a message, a line break at its end included.
        labels[span.start : span.whole] = ids[span.start : span.whole]
    return {"input_ids": ids, "labels": labels}


def _all_trained(ids: list[int]) -> Row:
    return {"input_ids": ids, "labels": list(ids)}


def _read_pretokenized(row: Row) -> Row:
    """Return a row of ids, with its labels or the labels that its masks leave."""
    ids = list(row["input_ids"])
    if row.get("labels") is not None:
        return {"input_ids": ids, "labels": list(row["labels"])}
    masks = [row[name] for name in ("completion_mask", "assistant_masks") if row.get(name) is not None]
    trained = [all(mask[n] for mask in masks) for n in range(len(ids))]
    return {
        "input_ids": ids,
        "labels": [i if is_trained else UNTRAINED for i, is_trained in zip(ids, trained, strict=True)],
    }


def cut_language(row: Row, args: Arguments) -> Row | None:
    """Return a row of at most ``max_length`` tokens; None if no trained token is left."""
    span = _kept_slice(args)
    shortened = {"input_ids": row["input_ids"][span], "labels": row["labels"][span]}
    # The first token is predicted by nothing.
    return shortened if any(label != UNTRAINED for label in shortened["labels"][1:]) else None


def _kept_slice(args: Arguments) -> slice:
    max_length = args.max_length
    if max_length is None:
        return slice(None)
    keeps_end = getattr(args, "truncation_mode", "") == "keep_end"
    return slice(-max_length, None) if keeps_end else slice(0, max_length)


def preference_row(reader: RowReader, row: Row) -> Row:
    """Return the ids of a pair; a prompt that both conversations repeat is taken from them."""
    row = split_pair(row)
    before, (chosen, rejected) = reader.answers(row["prompt"], [row["chosen"], row["rejected"]], row)
    return {"prompt_ids": before, "chosen_ids": chosen, "rejected_ids": rejected}


def split_pair(row: Row) -> Row:
    """Return a pair with its prompt apart from the answers."""
    chosen, rejected = (row.get(name) for name in ("chosen", "rejected"))
    if chosen is None or rejected is None:
        raise Refused(f"train_dataset: a row has {', '.join(row)}, but pairs are `chosen` and `rejected`")
    if row.get("prompt") is not None:
        return row
    shared = common_prefix_length(chosen, rejected)
    if isinstance(chosen, str):
        shared -= shared > 0 and chosen[shared - 1] == " "  # a space belongs to the word behind it
    return {**row, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def cut_preference(row: Row, args: Arguments) -> Row | None:
    """Return a pair of at most ``max_length`` tokens each; None if nothing is left of an answer."""
    max_length = args.max_length
    if max_length is None:
        return row
    before = row["prompt_ids"]
    longest = max(len(row["chosen_ids"]), len(row["rejected_ids"]))
    if getattr(args, "truncation_mode", "") == "keep_end" and len(before) + longest > max_length:
        before = before[len(before) + longest - max_length :] or before[-1:]
    room = max_length - len(before)
    shortened = {
        "prompt_ids": before,
        **{name: row[name][: max(room, 0)] for name in ("chosen_ids", "rejected_ids")},
    }
    return shortened if all(shortened.values()) else None


def judged_alone(pair: Row) -> list[Row]:
    """Return a pair's answers as two rows, the chosen one labelled good and the rejected one bad."""
    with_prompt = split_pair(pair)
    others = {name: value for name, value in with_prompt.items() if name not in ("chosen", "rejected")}
    return [{**others, "completion": with_prompt[n], "label": n == "chosen"} for n in ("chosen", "rejected")]


def judged_row(reader: RowReader, row: Row) -> Row:
    """Return the ids of an answer that was judged alone."""
    if not {"prompt", "completion", "label"} <= set(row):
        raise Refused(
            f"train_dataset: a row has {', '.join(row)}, but KTO reads prompt, completion and label"
        )
    before, (after,) = reader.answers(row["prompt"], [row["completion"]], row)
    return {"prompt_ids": before, "completion_ids": after, "label": bool(row["label"])}


def cut_judged(row: Row, args: Arguments) -> Row | None:
    """Return a judged answer of at most ``max_length`` tokens; None if nothing is left of it."""
    room = len(row["completion_ids"]) if args.max_length is None else args.max_length - len(row["prompt_ids"])
    shortened = {**row, "completion_ids": row["completion_ids"][: max(room, 0)]}
    return shortened if shortened["completion_ids"] else None


def scored_row(reader: RowReader, row: Row) -> Row:
    """Return the ids of two whole conversations, the chosen and the rejected one."""
    if row.get("margin") is not None:
        raise Refused(
            "train_dataset: `margin` is not supported: a pair's scores are to differ, by no given amount"
        )
    if "chosen_input_ids" in row:
        return {
            name: list(row[f"{name.removesuffix('_ids')}_input_ids"])
            for name in ("chosen_ids", "rejected_ids")
        }
    ids = {}
    for name in ("chosen", "rejected"):
        prompt, answer = row.get("prompt"), row.get(name)
        if answer is None:
            raise Refused(f"train_dataset: a row has {', '.join(row)}, but pairs are `chosen` and `rejected`")
        if isinstance(answer, str):
            ids[f"{name}_ids"] = reader.ids(reader.with_end((prompt or "") + answer))
        else:
            ids[f"{name}_ids"] = reader.chat([*(prompt or ()), *answer], row)
    return ids


def cut_scored(row: Row, args: Arguments) -> Row | None:
    """Return a pair, None if one of them is longer than ``max_length``."""
    max_length = args.max_length
    fits = max_length is None or max(len(row["chosen_ids"]), len(row["rejected_ids"])) <= max_length
    return row if fits and row["chosen_ids"] != row["rejected_ids"] else None


def language_tokens(row: Row) -> tuple[list[int], dict[str, AnswerTokens]]:
    """Return a prompt of the tokens before the first trained one, and the answer behind it."""
    ids, labels = row["input_ids"], row["labels"]
    first = next(n for n, label in enumerate(labels) if n and label != UNTRAINED)
    answer = AnswerTokens(tuple(ids[first:]), tuple(label != UNTRAINED for label in labels[first:]))
    return ids[:first], {"completion": answer}


def language_labels(row: Row) -> list[list[int]]:
    """Return the labels of a row's one sequence."""
    return [row["labels"]]


def no_labels(_: Row) -> list[list[int]]:
    """Return nothing: what a reward model says of a text has no labels."""
    return []


def _whole(ids: Sequence[int]) -> AnswerTokens:
    return AnswerTokens(tuple(ids), (True,) * len(ids))


def preference_tokens(row: Row) -> tuple[list[int], dict[str, AnswerTokens]]:
    """Return the prompt and the two answers of a pair."""
    return row["prompt_ids"], {name: _whole(row[f"{name}_ids"]) for name in ("chosen", "rejected")}


def judged_tokens(row: Row) -> tuple[list[int], dict[str, AnswerTokens]]:
    """Return the prompt and the answer that was judged."""
    return row["prompt_ids"], {"completion": _whole(row["completion_ids"])}


def scored_tokens(row: Row) -> tuple[list[int], dict[str, AnswerTokens]]:
    """Return what both conversations begin with, and what follows in each."""
    chosen, rejected = row["chosen_ids"], row["rejected_ids"]
    shared = max(1, min(common_prefix_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1))
    return chosen[:shared], {"chosen": _whole(chosen[shared:]), "rejected": _whole(rejected[shared:])}


Tokens = Callable[[Row], tuple[list[int], dict[str, AnswerTokens]]]


def covey_row(reader: RowReader, row: Row, tokens_of: Tokens) -> Row:
    """Return a row with recorded tokens, which covey trains on as they are."""
    prompt, answers = tokens_of(row)
    decode = reader.tokenizer.decode
    texts = {"prompt": decode(prompt), **{name: decode(list(a.ids)) for name, a in answers.items()}}
    columns: Row = {**texts, **({"label": row["label"]} if "label" in row else {})}
    sampled = SampledTokens(reader.identity, tuple(prompt), answers)
    return {**columns, SAMPLED: sampled_column(columns, sampled)}
