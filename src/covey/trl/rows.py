"""Conversion of rows in TRL's formats to token ids, as TRL tokenizes them, and to rows that covey trains on.

TRL appends the end of sequence to a text, and renders conversations with the chat template. The columns
determine which tokens are trained. A prepared row has `input_ids` and `labels` (-100 where a token is not
trained), or `prompt_ids`, `chosen_ids` and `rejected_ids`.
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
from covey.models.hashes import vocabulary_hash
from covey.rng import key, permutation
from covey.system.text import common_prefix_length
from covey.tasks.sampled import SAMPLED, sampled_column
from covey.trl.configs import TrainerArguments
from covey.trl.meanings import UnsupportedArgument
from covey.types import AnswerTokens, SampledTokens

LOGGER = logging.getLogger("covey.trl")
Row = dict[str, Any]
UNTRAINED = -100
"""TRL's label of a token that is not trained."""


def is_stream(rows: object) -> bool:
    """Return whether rows come one by one, from an iterator or a data set without a length."""
    return isinstance(rows, Iterable) and not hasattr(rows, "__len__")


def streamed_rows(rows: object, max_rows: int | None) -> list[Row]:
    """Return the first ``max_rows`` rows of a stream. Raises UnsupportedArgument if that number is None."""
    if max_rows is None:
        raise UnsupportedArgument("train_dataset: a stream has no length, so `max_steps` must be set")
    return list_rows(rows, "train_dataset", max_rows)


def list_rows(rows: object, what: str, max_rows: int | None = None) -> list[Row]:
    """Return rows as a list, at most ``max_rows`` of a stream. Raises UnsupportedArgument."""
    if isinstance(rows, Mapping):
        raise UnsupportedArgument(f"{what}: this is a mapping of tables; give one of them, as rows['train']")
    if isinstance(rows, str | bytes) or not (isinstance(rows, Iterable) or hasattr(rows, "__getitem__")):
        raise UnsupportedArgument(f"{what}: give a table of rows, not {type(rows).__name__}")
    table = listed(what, rows)
    if table is not None:
        return [dict(row) for row in table]
    stream = without_format(rows)
    streamed = [dict(row) for row in islice(stream, MAX_STREAMED + 1 if max_rows is None else max_rows)]
    if len(streamed) > MAX_STREAMED:
        raise UnsupportedArgument(
            f"{what}: the stream has more than {MAX_STREAMED:,} rows: give it `.take(n)` of them"
        )
    return streamed


def as_table(table: object, rows: list[Row]) -> Any:
    """Return prepared rows in the class of the given table, if that can be made from a list."""
    make = getattr(type(table), "from_list", None)
    return make(rows) if make is not None else rows


def keep_order(rows: Sequence[Row], seed: int, count: int) -> list[Row]:
    """Return rows so that a run which trains on ``count`` rows takes them in the given order.

    covey permutes the rows of an epoch by the seed. So this returns a single epoch of all rows that the run
    takes, permuted by the inverse.
    """
    repeated = [rows[n % len(rows)] for n in range(max(count, len(rows)))]
    order = permutation(key(seed, "order", 0), len(repeated))
    placed: list[Row] = [{}] * len(repeated)
    for n, position in enumerate(order):
        placed[int(position)] = repeated[n]
    return placed


class RowReader:
    """Tokenizes rows, with the settings of a config."""

    def __init__(self, tokenizer: Any, args: TrainerArguments) -> None:
        self.tokenizer = tokenizer
        self.args = args
        self.identity = vocabulary_hash(tokenizer)
        self.warned = False
        end = getattr(args, "eos_token", None) or tokenizer.eos_token
        self.end = str(end or "")
        template = getattr(args, "chat_template_path", None)
        if template:
            tokenizer.chat_template = _load_template(template)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer puts before it."""
        return list(self.tokenizer(text)["input_ids"])

    def chat(self, messages: Sequence[Any], row: Row, begin: bool = False) -> list[int]:
        """Return the ids of a conversation, rendered with the row's tools and template arguments."""
        if self.tokenizer.chat_template is None:
            raise UnsupportedArgument(
                "a conversation needs a chat template, which this tokenizer does not have"
            )
        tools = row.get("tools")
        extra = {
            **(getattr(self.args, "chat_template_kwargs", None) or {}),
            **(row.get("chat_template_kwargs") or {}),
        }
        rendered = self.tokenizer.apply_chat_template(
            [plain_message(m) for m in messages],
            tools=json.loads(tools) if isinstance(tools, str) else tools,
            add_generation_prompt=begin,
            tokenize=True,
            return_dict=True,
            **extra,
        )
        return list(rendered["input_ids"])

    def with_end(self, text: str) -> str:
        """Return a text with the end of sequence appended, if it is not there yet."""
        return text if not self.end or text.endswith(self.end) else text + self.end

    def answers(self, prompt: Any, texts: Sequence[Any], row: Row) -> tuple[list[int], list[list[int]]]:
        """Return the ids of a prompt and of each answer to it.

        The ids of a prompt alone may differ from those before an answer: tokens merge across the border, or
        the template renders it differently. Then, as in TRL, the answer begins at the first difference, and
        there is a warning. Raises UnsupportedArgument if nothing of the prompt is left.
        """
        if isinstance(prompt, str):
            before = self.ids(prompt)
            whole = [self.ids(self.with_end(prompt + answer)) for answer in texts]
        else:
            before = self.chat(prompt, row, begin=True)
            whole = [self.chat([*prompt, *answer], row) for answer in texts]
        shared = min(common_prefix_length(before, ids) for ids in whole)
        if before and not shared:
            raise UnsupportedArgument(
                f"train_dataset: {prompt!r:.80} alone has other tokens than before its answer"
            )
        if shared < len(before) and not self.warned:
            self.warned = True
            LOGGER.warning(
                "The tokenized prompt is not a prefix of the tokenized prompt with its answer: %r at its end "
                "is left out, and the answer begins there. A sampler sees another context than is trained. "
                "Other rows may have this too",
                self.tokenizer.decode(before[shared:]),
            )
        return before[:shared], [ids[shared:] for ids in whole]


def plain_message(message: Mapping[str, object]) -> dict[str, object]:
    """Return a message with OpenAI's keys, without the nulls with which tables pad."""
    renamed = {"from": "role", "value": "content"}
    roles = {"human": "user", "gpt": "assistant"}
    filled = {renamed.get(k, k): v for k, v in message.items() if v is not None}
    role = filled.get("role")
    return {**filled, "role": roles.get(str(role), role)}


def _load_template(path: str) -> str:
    """Return the chat template in a file, or that of the tokenizer of a folder or hub id."""
    if Path(path).is_file():
        return Path(path).read_text("utf-8")
    from covey.models.pretrained import pretrained_tokenizer, unreachable

    return str(pretrained_tokenizer(path, local_files_only=unreachable(path)).chat_template)


def language_row(reader: RowReader, row: Row) -> Row:
    """Return the ids and labels of a row for SFT: a text, conversation, prompt with completion, or ids."""
    args = reader.args
    if "input_ids" in row:
        return _read_pretokenized(row)
    messages = row.get("messages") or row.get("conversations")
    if messages is not None:
        return (
            _assistant_row(reader, [], messages, row)
            if args.assistant_only_loss
            else _fully_trained_row(reader.chat(messages, row))
        )
    if "prompt" in row and "completion" in row:
        if args.assistant_only_loss and not isinstance(row["prompt"], str):
            return _assistant_row(reader, row["prompt"], row["completion"], row)
        before, (after,) = reader.answers(row["prompt"], [row["completion"]], row)
        only = args.completion_only_loss is not False
        return {
            "input_ids": before + after,
            "labels": [UNTRAINED] * len(before) + after if only else before + after,
        }
    text = row.get(args.dataset_text_field)
    if not isinstance(text, str):
        raise UnsupportedArgument(
            f"train_dataset: a row has {', '.join(row)}, but SFT reads `{args.dataset_text_field}`, "
            "`messages`, `prompt` with `completion`, or `input_ids`"
        )
    return _fully_trained_row(reader.ids(reader.with_end(text)))


def _assistant_row(reader: RowReader, before: Sequence[Any], messages: Sequence[Any], row: Row) -> Row:
    """Return the ids and labels of a conversation: the assistant's messages after ``before`` are trained.

    Raises UnsupportedArgument if the template changes earlier messages when one is added.
    """
    conversation = [plain_message(message) for message in (*before, *messages)]
    ids = reader.chat(conversation, row)
    spans = assistant_spans(
        lambda part, begin: reader.chat(part, row, begin),
        conversation,
        len(before),
        ids,
        [reader.tokenizer.eos_token_id],
    )
    if spans is None:
        raise UnsupportedArgument(
            "assistant_only_loss: the chat template changes earlier messages when one is added, so the "
            "assistant's tokens cannot be located; give each answer its own row"
        )
    labels = [UNTRAINED] * len(ids)
    for span in spans:
        # As in TRL's templates for training, a line break after the message is trained too.
        labels[span.start : span.whole] = ids[span.start : span.whole]
    return {"input_ids": ids, "labels": labels}


def _fully_trained_row(ids: list[int]) -> Row:
    return {"input_ids": ids, "labels": list(ids)}


def _read_pretokenized(row: Row) -> Row:
    """Return the ids of a tokenized row, with its labels or those that its masks give."""
    ids = list(row["input_ids"])
    if row.get("labels") is not None:
        return {"input_ids": ids, "labels": list(row["labels"])}
    masks = [row[name] for name in ("completion_mask", "assistant_masks") if row.get(name) is not None]
    labels = [id_ if all(mask[n] for mask in masks) else UNTRAINED for n, id_ in enumerate(ids)]
    return {"input_ids": ids, "labels": labels}


def truncate_language(row: Row, args: TrainerArguments) -> Row | None:
    """Return a row of at most ``max_length`` tokens; None if no trained token is left."""
    span = _kept_slice(args)
    shortened = {"input_ids": row["input_ids"][span], "labels": row["labels"][span]}
    # The first token is never predicted, so its label does not count.
    return shortened if any(label != UNTRAINED for label in shortened["labels"][1:]) else None


def _kept_slice(args: TrainerArguments) -> slice:
    max_length = args.max_length
    if max_length is None:
        return slice(None)
    keeps_end = getattr(args, "truncation_mode", "") == "keep_end"
    return slice(-max_length, None) if keeps_end else slice(0, max_length)


def pair_row(reader: RowReader, row: Row) -> Row:
    """Return the ids of a pair. Without a prompt column, the prompt is what both answers begin with."""
    row = split_pair(row)
    before, (chosen, rejected) = reader.answers(row["prompt"], [row["chosen"], row["rejected"]], row)
    return {"prompt_ids": before, "chosen_ids": chosen, "rejected_ids": rejected}


def split_pair(row: Row) -> Row:
    """Return a pair with the prompt in a column of its own."""
    chosen, rejected = (row.get(name) for name in ("chosen", "rejected"))
    if chosen is None or rejected is None:
        raise UnsupportedArgument(
            f"train_dataset: a row has {', '.join(row)}, but pairs are `chosen` and `rejected`"
        )
    if row.get("prompt") is not None:
        return row
    shared = common_prefix_length(chosen, rejected)
    if isinstance(chosen, str):
        shared -= shared > 0 and chosen[shared - 1] == " "  # a space belongs to the word after it
    return {**row, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def truncate_pair(row: Row, args: TrainerArguments) -> Row | None:
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


def pair_as_judged(pair: Row) -> list[Row]:
    """Return the two answers of a pair as judged rows: the chosen one is good, the rejected one bad."""
    with_prompt = split_pair(pair)
    others = {name: value for name, value in with_prompt.items() if name not in ("chosen", "rejected")}
    return [{**others, "completion": with_prompt[n], "label": n == "chosen"} for n in ("chosen", "rejected")]


def judged_row(reader: RowReader, row: Row) -> Row:
    """Return the ids of an answer that has a label of its own."""
    if not {"prompt", "completion", "label"} <= set(row):
        raise UnsupportedArgument(
            f"train_dataset: a row has {', '.join(row)}, but KTO reads prompt, completion and label"
        )
    before, (after,) = reader.answers(row["prompt"], [row["completion"]], row)
    return {"prompt_ids": before, "completion_ids": after, "label": bool(row["label"])}


def truncate_judged(row: Row, args: TrainerArguments) -> Row | None:
    """Return a judged answer of at most ``max_length`` tokens; None if nothing is left of it."""
    room = len(row["completion_ids"]) if args.max_length is None else args.max_length - len(row["prompt_ids"])
    shortened = {**row, "completion_ids": row["completion_ids"][: max(room, 0)]}
    return shortened if shortened["completion_ids"] else None


def scored_row(reader: RowReader, row: Row) -> Row:
    """Return the ids of a pair for a reward model: two whole texts or conversations."""
    if row.get("margin") is not None:
        raise UnsupportedArgument(
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
            raise UnsupportedArgument(
                f"train_dataset: a row has {', '.join(row)}, but pairs are `chosen` and `rejected`"
            )
        if isinstance(answer, str):
            ids[f"{name}_ids"] = reader.ids(reader.with_end((prompt or "") + answer))
        else:
            ids[f"{name}_ids"] = reader.chat([*(prompt or ()), *answer], row)
    return ids


def drop_long_pair(row: Row, args: TrainerArguments) -> Row | None:
    """Return a pair; None if an answer is longer than ``max_length``, or if both are equal."""
    max_length = args.max_length
    fits = max_length is None or max(len(row["chosen_ids"]), len(row["rejected_ids"])) <= max_length
    return row if fits and row["chosen_ids"] != row["rejected_ids"] else None


def language_tokens(row: Row) -> tuple[list[int], dict[str, AnswerTokens]]:
    """Return the tokens before the first trained one as the prompt, and the rest as the answer."""
    ids, labels = row["input_ids"], row["labels"]
    first = next(n for n, label in enumerate(labels) if n and label != UNTRAINED)
    answer = AnswerTokens(tuple(ids[first:]), tuple(label != UNTRAINED for label in labels[first:]))
    return ids[:first], {"completion": answer}


def language_labels(row: Row) -> list[list[int]]:
    """Return the labels of the one sequence of a row."""
    return [row["labels"]]


def no_labels(_: Row) -> list[list[int]]:
    """Return no labels, since a reward model predicts no tokens."""
    return []


def _all_drawn(ids: Sequence[int]) -> AnswerTokens:
    return AnswerTokens(tuple(ids), (True,) * len(ids))


def answer_tokens(row: Row) -> tuple[list[int], dict[str, AnswerTokens]]:
    """Return the prompt and the answers of a prepared row: a pair's two, or a judged row's one."""
    names = [name for name in ("chosen", "rejected", "completion") if f"{name}_ids" in row]
    return row["prompt_ids"], {name: _all_drawn(row[f"{name}_ids"]) for name in names}


def scored_tokens(row: Row) -> tuple[list[int], dict[str, AnswerTokens]]:
    """Return the common beginning of a pair as the prompt, and the rest of each as its answer."""
    chosen, rejected = row["chosen_ids"], row["rejected_ids"]
    shared = max(1, min(common_prefix_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1))
    return chosen[:shared], {"chosen": _all_drawn(chosen[shared:]), "rejected": _all_drawn(rejected[shared:])}


TokenReader = Callable[[Row], tuple[list[int], dict[str, AnswerTokens]]]


def covey_row(reader: RowReader, row: Row, tokens_of: TokenReader) -> Row:
    """Return a row with its tokens recorded, so that covey does not tokenize its texts again."""
    prompt, answers = tokens_of(row)
    decode = reader.tokenizer.decode
    texts = {"prompt": decode(prompt), **{name: decode(list(a.ids)) for name, a in answers.items()}}
    columns: Row = {**texts, **({"label": row["label"]} if "label" in row else {})}
    sampled = SampledTokens(reader.identity, tuple(prompt), answers)
    return {**columns, SAMPLED: sampled_column(columns, sampled)}
