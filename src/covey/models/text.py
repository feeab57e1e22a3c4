"""The text of a model's tokens: the one view of them that rewards, judges and people read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

PADDING = re.compile(r"[<\[].*[>\]]")
"""The form of a token for padding alone. Some tokenizers pad with a word, such as `!`, their first token."""
ANCHOR = "a"
"""A text before the tokens while they are decoded, in place of their prompt; it is never shown."""


class FaithfulText:
    """Token ids -> the text that rewards, stop strings, judges and kept examples read.

    Special tokens are kept, as a format may consist of them (`<|channel|>`, `[THINK]`, a user's `<answer>`).
    Only ends and padding after the last word are left out. Many tokenizers, such as Llama 2's and
    Mistral's, drop the first space of any text that they decode. So tokens are decoded after an anchor: the
    text is decode(prompt + tokens) less decode(prompt), whatever words the prompt has.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> None:
        """Decode for ``tokenizer``; ``ends`` are the ids that end a completion."""
        self.tokenizer = tokenizer
        is_padding = PADDING.fullmatch(str(tokenizer.pad_token or "")) is not None
        self.silent = {*ends, *([tokenizer.pad_token_id] if is_padding else [])}
        self.anchor = self.encode(ANCHOR)
        self._shown = self._decode(self.anchor)

    def __call__(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without the ends and padding after the last word."""
        ids = list(tokens)
        while ids and ids[-1] in self.silent:
            ids.pop()
        return self.text_with_specials(ids)

    def text_with_specials(self, ids: Sequence[int]) -> str:
        """The text of tokens, ends and padding after the last word included by name."""
        anchored = self._decode([*self.anchor, *ids])
        # Where bytes are tokens, broken ones may take an anchor of bytes with them.
        return anchored[len(self._shown) :] if anchored.startswith(self._shown) else self._decode(ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without those that the tokenizer puts around it."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_after_anchor(self, text: str) -> list[int]:
        """Token ids of a text after the anchor, unless the anchor's own ids change by it."""
        anchored = self.encode(ANCHOR + text)
        length = len(self.anchor)
        return anchored[length:] if anchored[:length] == self.anchor else self.encode(text)

    def _decode(self, ids: Sequence[int]) -> str:
        options = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, **options))


def continuation_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids that decode to this text when they follow others.

    Tokenizers of SentencePiece's kind put a space before any text, as if it were a beginning. So if the ids
    decode to another text, it is encoded after an anchor.
    """
    view = _view(tokenizer)
    unanchored = view.encode(text)
    if view(unanchored) == text:
        return unanchored
    # Each part between added tokens is encoded by itself, because each would get a space.
    added = {token.content: n for n, token in tokenizer.added_tokens_decoder.items()}
    tokens = "|".join(re.escape(word) for word in sorted(added, key=len, reverse=True))
    parts = re.split(f"({tokens})", text) if tokens else [text]
    continued = list[int]()
    for part in parts:
        if part in added:
            continued.append(added[part])
        elif part:
            continued += view.encode_after_anchor(part)
    # A tokenizer that lower-cases, say, gives no text back: then the space tells the beginning.
    is_beginning = view(unanchored) == f" {view(continued)}"
    return continued if view(continued) == text or is_beginning else unanchored


@lru_cache(64)
def _view(tokenizer: PreTrainedTokenizerBase) -> FaithfulText:
    return FaithfulText(tokenizer, ())
