"""Log-probs of given tokens from hidden states, in chunks of rows, so that logits are never all in memory.

If the sampler drew from a part of the vocabulary, all values belong to the truncated distribution: the
softmax of the model's logits over the tokens that the sampler kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covey.types import SamplingMask

CHUNK_LOGITS = 1 << 24
"""Most logits in memory at once: 64 MiB in float32, whatever the batch and the vocabulary."""
GPU_CHUNK_LOGITS = 1 << 26
"""The same on a GPU, which needs some hundred rows to be busy with one product."""
CACHED_LOGITS = 1 << 20
"""Logits at once for the compiled head, which is fastest if a chunk fits the processor's cache."""
MIN_ROWS = 128
"""Fewest rows of a chunk, however large the vocabulary: with fewer, products are slow."""
ENOUGH_ROWS = 256
"""Rows of a chunk, if their logits are at most ``CHUNK_LOGITS``: products take two thirds of the time."""

EXCLUDED = -1e20
"""The logit of a token that cannot be drawn: its probability is 0, and 0 times its logit is not NaN."""

Head = Callable[[Tensor], Tensor]
"""Function from hidden states (M, D) to logits (M, V)."""


class TokenOutputs(NamedTuple):
    """Outputs of a model for M given tokens, each (M,), in nats. All carry gradient."""

    logprobs: Tensor
    entropy: Tensor
    """Entropy of the distribution that the token was drawn from."""
    collision: Tensor
    """Probability that two draws agree, sum_v pi(v)^2."""
    full_kl: Tensor
    """KL(pi || reference) over the tokens that could be drawn; 0 without a reference."""
    values: Tensor | None = None
    """Value of the prefix before the token, if a head gives values."""


def chunk_logits(device: torch.device) -> int:
    """Return how many logits are in memory at once on a device."""
    return GPU_CHUNK_LOGITS if device.type == "cuda" else CHUNK_LOGITS


def rows_at_once(tokens: int, vocabulary: int) -> int:
    """Return the number of rows whose logits the compiled head has in memory at once."""
    fewest = ENOUGH_ROWS if ENOUGH_ROWS * vocabulary <= CHUNK_LOGITS else MIN_ROWS
    return min(tokens, max(fewest, CACHED_LOGITS // vocabulary))


def token_outputs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    reference: tuple[Tensor, Head] | None = None,
    mask: SamplingMask | None = None,
    drawable_ids: int | None = None,
) -> TokenOutputs:
    """Return the log-probs, ... of ``targets`` (M,) by softmax(head(hidden) / temperature), hidden (M, D).

    Chunks are recomputed in the backward pass. ``reference`` gives the other model's hidden states
    and head for the full-vocabulary KL. Both softmaxes are over the ids below ``drawable_ids``; a ``mask``
    leaves fewer of them.
    """
    # A head is any callable, so one row has to tell how many logits it gives.
    vocabulary = int(head(hidden[:1].detach()).shape[-1])
    rows = max(1, chunk_logits(hidden.device) // vocabulary)
    ref_hidden, ref_head = reference or (hidden, None)
    parts = []
    # At least one chunk, so that no predictions give empty tensors.
    for start in range(0, max(len(hidden), 1), rows):
        h, r, y = (x[start : start + rows] for x in (hidden, ref_hidden, targets))
        arguments = (h, head, y, temperature, r, ref_head, mask, start, drawable_ids)
        # A single chunk is within the limit anyway and may keep its logits.
        if torch.is_grad_enabled() and len(hidden) > rows:
            parts.append(checkpoint(_chunk_outputs, *arguments, use_reentrant=False))
        else:
            parts.append(_chunk_outputs(*arguments))
    return TokenOutputs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _chunk_outputs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    ref_hidden: Tensor,
    ref_head: Head | None,
    mask: SamplingMask | None,
    start: int,
    drawable_ids: int | None,
) -> tuple[Tensor, ...]:

    def log_softmax(logits: Tensor) -> Tensor:
        drawable = exclude(logits.float() / temperature, mask, start, drawable_ids)
        return drawable.log_softmax(-1)

    # (rows, V) from here on; excluded ids have probability 0 and add 0 to every sum.
    all_logprobs = log_softmax(head(hidden))
    probs = all_logprobs.exp()
    logprobs = all_logprobs.gather(1, targets[:, None])[:, 0]
    entropy = -(probs * all_logprobs).sum(-1)
    collision = probs.square().sum(-1)
    full_kl = torch.zeros_like(entropy)
    if ref_head is not None:
        reference = log_softmax(ref_head(ref_hidden))
        full_kl = (probs * (all_logprobs - reference)).sum(-1)
    return logprobs, entropy, collision, full_kl


def exclude_unknown(logits: Tensor, drawable_ids: int | None) -> Tensor:
    """Exclude, in place, ids that pad the vocabulary: those from ``drawable_ids`` on. (n, V)."""
    if drawable_ids is not None and drawable_ids < logits.shape[-1]:
        logits[:, drawable_ids:] = EXCLUDED
    return logits


def exclude(logits: Tensor, mask: SamplingMask | None, start: int, drawable_ids: int | None) -> Tensor:
    """Exclude, in place, ids that could not be drawn; logits (n, V) are of predictions from ``start`` on."""
    logits = exclude_unknown(logits, drawable_ids)
    if mask is None:
        return logits
    # Kept ids are few: mark them in the flat array and exclude the rest.
    included = torch.from_numpy(mask.flat(start, start + len(logits), logits.shape[1])).to(logits.device)
    excluded = torch.ones(logits.numel(), dtype=torch.bool, device=logits.device).index_fill_(0, included, 0)
    return logits.masked_fill_(excluded.view(logits.shape), EXCLUDED)
