"""The turns of a conversation in token ids, as the tokenizer's own template opens and ends them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any


class Turns:
    """Finds the assistant's turns: between what opens an answer in the template, and an end token."""

    def __init__(self, tokenizer: Any) -> None:
        self.ends = {tokenizer.eos_token_id}
        self._tokenizer = tokenizer
        self.opening: list[int] = []
        # A tokenizer without a template, or with one that wants other messages, opens no turns.
        with suppress(Exception):
            messages = [{"role": "user", "content": "a"}]
            texts = [
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=on)
                for on in (0, 1)
            ]
            opening = texts[1].removeprefix(texts[0])
            self.opening = tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []

    @property
    def opening_length(self) -> int:
        """The number of tokens that open an answer."""
        return len(self.opening)

    def answer(self, ids: Sequence[int]) -> int | None:
        """Return the place after the first opening; None without one."""
        return next(iter(self._openings(ids)), None)

    def _openings(self, ids: Sequence[int]) -> list[int]:
        size = len(self.opening)
        if not size:
            return []
        return [n + size for n in range(len(ids) - size + 1) if list(ids[n : n + size]) == self.opening]

    def end(self, ids: Sequence[int]) -> int:
        """Return the place after the last end token if only white space follows it, or else the length."""
        last = max((n for n, token in enumerate(ids) if token in self.ends), default=None)
        if last is None or (last + 1 < len(ids) and self._tokenizer.decode(ids[last + 1 :]).strip()):
            return len(ids)
        return last + 1

    def between(self, ids: Sequence[int], start: int) -> list[bool]:
        """Return for each token from ``start`` on whether it is outside of the assistant's turns."""
        outside = [False] * (len(ids) - start)
        for opening in self._openings(ids):
            # A turn that follows another begins behind the end of the one before.
            previous = max((place for place in self._openings(ids) if place < opening), default=start)
            ended = next((n + 1 for n in range(max(previous, start), opening) if ids[n] in self.ends), None)
            if opening > start and ended is not None:
                outside[ended - start : opening - start] = [True] * (opening - ended)
        return outside
