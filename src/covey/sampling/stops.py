"""Stop strings in the text of tokens, also of a completion that is drawn in several parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from covey.types import Completion

Decode = Callable[[Sequence[int]], str]
MARGIN = 8
"""Tokens that are decoded besides those that a stop string can have."""


def has_stop(decode: Decode, tokens: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether the last tokens contain a stop string; none of those before may have completed one."""
    text = decode(tokens[-tail_length(stop) :])
    return any(s in text for s in stop)


def ended_at_stop(
    completion: Completion, first: int, stop: Sequence[str], decode: Decode, whole: Decode
) -> Completion:
    """Return a completion up to a stop string that begins before token ``first`` and ends after it.

    ``first`` is the first token of a part that was drawn later: its sampler did not see the beginning of the
    string. ``decode`` names ends and padding, ``whole`` gives a completion's text.
    """
    tokens = completion.tokens.tolist()
    # A string that ends later than this lies in the later part, where its sampler has looked for it.
    last = min(len(tokens), first + tail_length(stop)) if stop else 0
    length = next((n for n in range(first + 1, last + 1) if has_stop(decode, tokens[:n], stop)), None)
    if length is None:
        return completion
    return replace(completion.until(length), finish="stop", text=whole(tokens[:length]))


def tail_length(stop: Sequence[str]) -> int:
    """Return how many of the last tokens show whether a stop string ends with them.

    Decoding no more keeps the cost of a step from growing with the completion. It is a token for each byte of
    the longest stop string, as a token may be a single byte, and some more.
    """
    return max(len(s.encode()) for s in stop) + MARGIN
