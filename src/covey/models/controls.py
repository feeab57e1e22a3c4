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

    After a removal the text before the word is the end again that words are looked for at. So the letters on
    both sides of it cannot form another word unseen. A character costs at most a look-up for each length of a
    word, however many words there are and whatever the text is.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = {word for word in words if word}
        self.lengths = sorted({len(word) for word in self.words}, reverse=True)
        self.endings = {word[-1] for word in self.words}

    def remove_from(self, text: str) -> str:
        """The text without any of the words; where several end at a place, without the longest.

        >>> ControlWords(["<end>"]).remove_from("a<en<end>d>b")
        'ab'
        """
        characters = list[str]()
        for character in text:
            characters.append(character)
            if character in self.endings:
                tails = ("".join(characters[-n:]) for n in self.lengths)
                word = next((tail for tail in tails if tail in self.words), "")
                del characters[len(characters) - len(word) :]
        return "".join(characters)


def template_words(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Tokens that the template uses; some are not special, such as `<｜User｜>` of R1's distilled models."""
    template = str(tokenizer.chat_template)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (token.content.strip() and token.content in template):
            yield token.content


def turn_words(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Special tokens, and tokens that the template writes around messages; an answer may use all others."""
    try:
        around = chat_text(tokenizer, EXCHANGE, {}, begin=False)
    except (ConfigError, DataError):  # no template, or it refuses this chat: special tokens remain
        around = ""
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (
            token.content.strip() and token.content in around and token.content not in THOUGHTS
        ):
            yield token.content
