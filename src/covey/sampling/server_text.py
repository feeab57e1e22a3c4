"""Servers' tokens as this run's tokenizer reads them: stop strings, and ids without words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from covey.models.policy import Policy
from covey.sampling.base import SamplingParams
from covey.sampling.dialects import ServerFault, ServerOutput

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of an incomplete character."""
CHARACTER_BYTES = 4
"""The most bytes, and so tokens, that a character has."""


def check_stop(policy: Policy, output: ServerOutput, params: SamplingParams) -> None:
    """Check that a completion ends with the first stop string in its text. Raises ServerFault.

    Servers look for it once a character is whole, and decode padding as its name.
    """
    # Up to the token before the last no stop string may have been complete.
    text_before_last = policy.decode(_whole_characters(policy, output.tokens[:-1]))
    if any(s in text_before_last for s in params.stop):
        raise ServerFault("a completion continues after a stop string: does it have another tokenizer?")
    claims_stop = output.finish == "stop" and output.tokens[-1] not in params.ends_of(policy)
    text = policy.decode.text_with_specials(output.tokens)
    if claims_stop and not any(s in text for s in params.stop):
        raise ServerFault(
            "a completion is marked as ended, but has no stop string: does it have another tokenizer?"
        )


def _whole_characters(policy: Policy, tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens up to the last one with which a character ends."""
    end = len(tokens)
    while end:
        tail = policy.decode.text_with_specials(tokens[max(0, end - CHARACTER_BYTES) : end])
        if not tail.endswith(INCOMPLETE):
            break
        end -= 1
    return tokens[:end]


def note_on_padding(policy: Policy, completions: Sequence[np.ndarray]) -> str:
    """Return a note on tokens that are padding of the embedding; empty if there are none."""
    count = sum(int((tokens >= policy.word_ids).sum()) for tokens in completions)
    if not count:
        return ""
    total = sum(map(len, completions))
    return (
        f"{count:,} of {total:,} tokens that servers drew are ids from {policy.word_ids} on: the "
        f"tokenizer has no words for them, the model's embedding is padded to {policy.embedded}, and servers "
        "draw from all of it. They are trained as they were drawn, and read as nothing. If there are many, "
        "shrink the embedding (model.resize_token_embeddings), or sample in the process: it never draws them"
    )
