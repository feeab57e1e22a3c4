"""The words by which a chat template tells turns apart, and texts without them.

A text that somebody else wrote, put into a chat, could close its message and open another: a tokenizer
reads the letters `<|im_end|>` as the token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from covey.models.chat import chat_text
from covey_verify.errors import ConfigError, DataError

THOUGHTS = ("<think>", "</think>")
"""Marks that an answer may well have."""
EXCHANGE = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


class ControlWords:
    """Words that are taken out of texts.

    All of them are found at once, by the automaton of Aho and Corasick: a state is the longest beginning of a
    word that the text so far ends with. What is left behind a word that was taken out continues before it, in
    the state of then, so that no other word can come of it. One pass: a character costs no more steps than
    the longest word has characters.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        """Of each state: the beginnings that are one character longer."""
        self.fallback = [0]
        """Of each state: that of the next shorter beginning."""
        self.length = [0]
        """Of each state: how many characters the longest word has that ends here."""
        for word in words:
            self._add(word)
        order = list(self.next[0].values())
        for state in order:  # which grows: shorter beginnings come first
            for character, after in self.next[state].items():
                order.append(after)
                self.fallback[after] = self._after(self.fallback[state], character)
                self.length[after] = self.length[after] or self.length[self.fallback[after]]

    def _add(self, word: str) -> None:
        state = 0
        for character in word:
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.fallback.append(0)
                self.length.append(0)
            state = self.next[state][character]
        if state:
            self.length[state] = len(word)

    def _after(self, state: int, character: str) -> int:
        """Where a character leads."""
        tried = state
        while character not in self.next[tried] and tried:
            tried = self.fallback[tried]
        return self.next[tried].get(character, 0)

    def removed(self, text: str) -> str:
        """A text without them.

        >>> ControlWords(["<end>"]).removed("a<en<end>d>b")
        'ab'
        """
        states, kept = [0], list[str]()
        for character in text:
            state = self._after(states[-1], character)
            states.append(state)
            kept.append(character)
            if length := self.length[state]:
                del states[-length:], kept[-length:]
        return "".join(kept)


def template_words(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Tokens of the template's own: some are not special, as `<｜User｜>` of R1's distilled models."""
    template = str(tokenizer.chat_template)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (token.content.strip() and token.content in template):
            yield token.content


def turn_words(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Special tokens, and those that the template writes around messages; an answer may have all others."""
    try:
        around = chat_text(tokenizer, EXCHANGE, {}, begin=False)
    except (ConfigError, DataError):
        around = ""
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (
            token.content.strip() and token.content in around and token.content not in THOUGHTS
        ):
            yield token.content
