"""Rows of TRL's formats as tokens: where an answer begins, and what a chat template is told."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from covey.models.tiny import build_tokenizer
from covey.trl.meanings import UnsupportedArgument
from covey.trl.rows import RowReader, pair_row

WORDS = {"a": 1, "b": 2, "ab": 3, "e": 4}


class Merging:
    """A tokenizer of a, b and their merge ab; each text ends with e."""

    eos_token, chat_template = "e", None

    def get_vocab(self) -> dict[str, int]:
        return WORDS

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [WORDS[word] for word in re.findall("ab|.", text)]}

    def decode(self, ids: list[int]) -> str:
        names = {number: word for word, number in WORDS.items()}
        return "".join(names[i] for i in ids)


def test_an_answer_begins_where_its_tokens_part_from_the_prompts(caplog) -> None:
    """`ba` with `bb` is b, ab, b: the answer begins at ab, and the prompt's `a` is left out."""
    reader = RowReader(Merging(), SimpleNamespace())
    row = {"prompt": "ba", "chosen": "bb", "rejected": "a"}
    assert pair_row(reader, row) == {
        "prompt_ids": [2],
        "chosen_ids": [3, 2, 4],
        "rejected_ids": [1, 1, 4],
    }
    assert pair_row(reader, row)["prompt_ids"] == [2]
    (said,) = caplog.messages
    assert "'a' at its end is left out" in said
    with pytest.raises(UnsupportedArgument, match="has other tokens than before its answer"):
        pair_row(reader, {**row, "prompt": "a"})


def test_a_column_is_no_variable_of_the_chat_template() -> None:
    tokenizer = build_tokenizer(["abc"], vocab_size=300)
    tokenizer.chat_template = "{{ system }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    reader = RowReader(tokenizer, SimpleNamespace(chat_template_kwargs=None))
    asked = [{"role": "user", "content": "b"}]
    plain = reader.chat(asked, {"system": "a", "category": "c"})
    assert tokenizer.decode(plain) == "b"
    told = reader.chat(asked, {"chat_template_kwargs": {"system": "a"}})
    assert tokenizer.decode(told) == "ab"
