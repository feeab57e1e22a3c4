"""Log-probs of chosen tokens from hidden states, in chunks: all logits never stand in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 1 << 24
"""Logits alive at once: 64 MiB in float32, whatever the batch and the vocabulary."""

Head = Callable[[Tensor], Tensor]
"""Hidden states (M, D) -> logits (M, V)."""


class TokenScores(NamedTuple):
    """What is known of M predicted tokens, each (M,), in nats. All carry gradient."""

    logprobs: Tensor
    entropy: Tensor
    """Of the distribution the token was drawn from."""
    collision: Tensor
    """sum_v pi(v)^2."""
    full_kl: Tensor
    """KL(pi || reference) over the vocabulary; 0 where no reference was given."""


def score_tokens(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    reference: tuple[Tensor, Head] | None = None,
) -> TokenScores:
    """Score ``targets`` (M,) under softmax(head(hidden) / temperature), hidden (M, D).

    Chunks are recomputed in the backward pass. ``reference`` gives the other model's hidden states
    and head for the full-vocabulary KL.
    """
    vocabulary = int(head(hidden[:1].detach()).shape[-1])
    rows = max(1, CHUNK_LOGITS // vocabulary)
    ref_hidden, ref_head = reference or (hidden, None)
    parts = []
    for h, r, y in zip(hidden.split(rows), ref_hidden.split(rows), targets.split(rows), strict=True):
        arguments = (h, head, y, temperature, r, ref_head)
        if torch.is_grad_enabled() and len(hidden) > rows:
            parts.append(checkpoint(_score, *arguments, use_reentrant=False))
        else:
            parts.append(_score(*arguments))
    return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _score(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    ref_hidden: Tensor,
    ref_head: Head | None,
) -> tuple[Tensor, ...]:
    all_logprobs = (head(hidden).float() / temperature).log_softmax(-1)
    probs = all_logprobs.exp()
    logprobs = all_logprobs.gather(1, targets[:, None])[:, 0]
    entropy = -(probs * all_logprobs).sum(-1)
    collision = probs.square().sum(-1)
    full_kl = torch.zeros_like(entropy)
    if ref_head is not None:
        reference = (ref_head(ref_hidden).float() / temperature).log_softmax(-1)
        full_kl = (probs * (all_logprobs - reference)).sum(-1)
    return logprobs, entropy, collision, full_kl
