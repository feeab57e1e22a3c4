"""Control words of chat templates, and their removal from texts that others wrote.

Within a chat such a text could close its message and open another, because a tokenizer reads the letters
`<|im_end|>` as the token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from covey.models.chat import chat_text
from covey_verify.errors import ConfigError, DataError

THOUGHTS = ("<think>", "</think>")
"""Marks that an answer may contain."""
EXCHANGE = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


class ControlWords:
    """Words that can be removed from texts, all in one pass.

    The automaton is that of Aho and Corasick: a state is the longest prefix of any word that the text read so
    far ends with. After a removal the search returns to the state before the removed word. So the letters on
    both sides of it cannot form another word unseen. A character costs at most as many steps as the longest
    word has characters.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        """State -> next character -> the state of the prefix with that character."""
        self.fallback = [0]
        """State -> the state of the longest shorter prefix that the text also ends with."""
        self.length = [0]
        """State -> characters of the longest word that ends there, or 0."""
        for word in words:
            self._add(word)
        order = list(self.next[0].values())
        # Breadth first (`order` grows meanwhile): a state's fallback is shorter, so it is complete by then.
        for state in order:
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
        """The state that a character leads to."""
        tried = state
        while character not in self.next[tried] and tried:
            tried = self.fallback[tried]
        return self.next[tried].get(character, 0)

    def removed(self, text: str) -> str:
        """The text without any of the words.

        >>> ControlWords(["<end>"]).removed("a<en<end>d>b")
        'ab'
        """
        # states[i] belongs to the first i kept characters, so truncating both rewinds the search.
        states = [0]
        texts = list[str]()
        for character in text:
            state = self._after(states[-1], character)
            states.append(state)
            texts.append(character)
            if length := self.length[state]:
                del states[-length:], texts[-length:]
        return "".join(texts)


def template_words(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Tokens that the template uses; some are not special, such as `<｜User｜>` of R1's distilled models."""
    template = str(tokenizer.chat_template)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (token.content.strip() and token.content in template):
            yield token.content


def turn_words(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Special tokens, and those that the template writes around messages; an answer may use all others."""
    try:
        around = chat_text(tokenizer, EXCHANGE, {}, begin=False)
    except (ConfigError, DataError):  # no template, or one that refuses this chat: special tokens remain
        around = ""
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (
            token.content.strip() and token.content in around and token.content not in THOUGHTS
        ):
            yield token.content
