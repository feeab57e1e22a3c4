"""Where the tokens of a completion end in its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from covey.types import Completion


def token_ends(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """For each token the number of characters decoded up to its end.

    Decodes a sliding window, as tokenizers may drop a leading space or need several tokens for one
    character.
    """
    ends, known, before, read = [], 0, 0, 0
    for place in range(1, len(tokens) + 1):
        old, new = decode(tokens[before:read]), decode(tokens[before:place])
        if len(new) > len(old) and not new.endswith("\ufffd"):
            known, before, read = known + len(new) - len(old), read, place
        ends.append(known)
    return ends


def drawn_ends(completion: Completion, decode: Callable[[Sequence[int]], str]) -> list[int]:
    """``token_ends`` in a completion's text, to which inserted tokens and the ends of turns add nothing."""
    ends, before = list[int](), 0
    for drawn, tokens in completion.parts:
        own = token_ends(tokens.tolist(), decode) if drawn else [0] * len(tokens)
        ends += [before + end for end in own]
        before = ends[-1]
    return ends
