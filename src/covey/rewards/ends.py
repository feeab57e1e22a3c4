"""The places in a completion's text where its tokens end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from covey.types import Completion


def token_ends(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return for each token the number of characters decoded up to its end.

    Decodes a sliding window, since tokenizers may drop a leading space or need several tokens for one
    character.
    """
    # tokens[before:read] are the last ones with complete characters, which give the next ones their context;
    # `known` characters are decoded up to `read`.
    ends = []
    known = 0
    before = 0
    read = 0
    for place in range(1, len(tokens) + 1):
        old = decode(tokens[before:read])
        new = decode(tokens[before:place])
        # U+FFFD at the end: the character is not complete yet, so its tokens all end where it begins.
        if len(new) > len(old) and not new.endswith("\ufffd"):
            known = known + len(new) - len(old)
            before = read
            read = place
        ends.append(known)
    return ends


def drawn_ends(completion: Completion, decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return ``token_ends`` in a completion's text, to which inserted tokens and turn ends add nothing."""
    ends = list[int]()
    before = 0
    for drawn, tokens in completion.parts:
        own = token_ends(tokens.tolist(), decode) if drawn else [0] * len(tokens)
        ends += [before + end for end in own]
        before = ends[-1]
    return ends
