"""Where tokens and reasoning steps of a completion end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from covey.types import Completion, StepRewards


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


def spans_of(given: StepRewards) -> tuple[tuple[int, int, float], ...]:
    """(first token, token after the last, value) of each step. Raises ValueError where they are none."""
    ends = [int(end) for end in given.ends]
    if len(ends) != len(given.values):
        raise ValueError(
            f"StepRewards of {len(given.values)} values and {len(ends)} ends; each step has both"
        )
    wrong = [i for i, end in enumerate(ends) if end <= (ends[i - 1] if i else -1)]
    if wrong:
        raise ValueError(
            f"StepRewards whose ends {ends[:20]} do not increase at place {wrong[0] + 1}: they are the "
            "indices of the last token of each step, from 0 up"
        )
    after = [end + 1 for end in ends]
    return tuple(zip((0, *after), after, given.values, strict=False))
