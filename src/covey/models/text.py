"""What a model wrote as text. Tokens are the truth; this is the one view of them that everybody judges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        self.silent = {*ends, *([] if tokenizer.pad_token_id is None else [tokenizer.pad_token_id])}
        self._anchor = list(tokenizer(ANCHOR, add_special_tokens=False)["input_ids"])
        self._shown = self._decoded(self._anchor)

    def __call__(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        ids = list(tokens)
        while ids and ids[-1] in self.silent:
            ids.pop()
        whole = self._decoded([*self._anchor, *ids])
        # Where bytes are tokens, broken ones may take an anchor of bytes with them.
        return whole[len(self._shown) :] if whole.startswith(self._shown) else self._decoded(ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        as_written = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, **as_written))
