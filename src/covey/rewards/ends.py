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
    # the tokens up to `read` have `length` characters.
    ends = []
    length = 0
    before = 0
    read = 0
    for stop in range(1, len(tokens) + 1):
        old = decode(tokens[before:read])
        new = decode(tokens[before:stop])
        # U+FFFD at the end: the character is not complete yet, so its tokens all end where it begins.
        if len(new) > len(old) and not new.endswith("\ufffd"):
            length = length + len(new) - len(old)
            before = read
            read = stop
        ends.append(length)
    return ends


def drawn_ends(completion: Completion, decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return ``token_ends`` in a completion's text, to which inserted tokens and turn ends add nothing."""
    ends = list[int]()
    before = 0
    for sampled, tokens in completion.parts:
        part_ends = token_ends(tokens.tolist(), decode) if sampled else [0] * len(tokens)
        ends += [before + end for end in part_ends]
        before = ends[-1]
    return ends
