"""What a model wrote as text. Tokens are the truth; this is the one view of them that everybody judges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

ANCHOR = "a"
"""What stands before the tokens while they are decoded, as their prompt does: never shown."""


class FaithfulText:
    """Token ids -> the text that rewards, stop strings, judges and kept examples read.

    Special tokens are kept, as a model's form may consist of them (`<|channel|>`, `[THINK]`, a user's
    `<answer>`). Left out are only the ends and the padding behind the last word. Many tokenizers, those of
    Llama 2 and Mistral for two, drop the first space of whatever they decode; so tokens are decoded behind an
    anchor: the text is decode(prompt + tokens) less decode(prompt), whatever words the prompt has.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> None:
        """``ends``: the ids that end a completion."""
        self.tokenizer = tokenizer
        pad = tokenizer.pad_token_id
        self.silent = {*ends, *([] if pad is None else [pad])}
        self.anchor = self.encoded(ANCHOR)
        self._shown = self._decoded(self.anchor)

    def __call__(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        ids = list(tokens)
        while ids and ids[-1] in self.silent:
            ids.pop()
        return self.named(ids)

    def named(self, ids: Sequence[int]) -> str:
        """The text of tokens with the names of the ends and the padding behind the last word, too."""
        whole = self._decoded([*self.anchor, *ids])
        # Where bytes are tokens, broken ones may take an anchor of bytes with them.
        return whole[len(self._shown) :] if whole.startswith(self._shown) else self._decoded(ids)

    def encoded(self, text: str) -> list[int]:
        """Its token ids, without those that the tokenizer puts around a text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def behind(self, text: str) -> list[int]:
        """Its token ids behind the anchor, where that stays as it is."""
        whole, length = self.encoded(ANCHOR + text), len(self.anchor)
        return whole[length:] if whole[:length] == self.anchor else self.encoded(text)

    def _decoded(self, ids: Sequence[int]) -> str:
        as_written = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, **as_written))


def ids_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids that have this text when they are read behind others.

    Tokenizers of SentencePiece's kind take whatever they encode for the beginning of a text and put a space
    before it; so where its ids come back as another text, it is encoded behind an anchor.
    """
    view = _view(tokenizer)
    alone = view.encoded(text)
    if view(alone) == text:
        return alone
    added = {token.content: n for n, token in tokenizer.added_tokens_decoder.items()}
    tokens = "|".join(re.escape(word) for word in sorted(added, key=len, reverse=True))
    parts = re.split(f"({tokens})", text) if tokens else [text]
    behind = [n for part in parts if part for n in ([added[part]] if part in added else view.behind(part))]
    return behind if view(behind) == text else alone


@lru_cache(64)
def _view(tokenizer: PreTrainedTokenizerBase) -> FaithfulText:
    return FaithfulText(tokenizer, ())
