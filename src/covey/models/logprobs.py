"""Log-probs of chosen tokens from hidden states, in chunks of rows: all logits never stand in memory.

Where the sampler could not draw from the whole vocabulary, everything here is of the distribution that it
drew from: softmax over the tokens it kept, of the logits of whoever is asked now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covey.kernels.calls import call
from covey.models.linear import Linear, add_gradient, outer_sum
from covey.types import SamplingMask

CHUNK_LOGITS = 1 << 24
"""Logits alive at once: 64 MiB in float32, whatever the batch and the vocabulary."""
CACHED_LOGITS = 1 << 20
"""The same for the compiled head, which is fastest while a chunk stays in the processor's cache."""
FEWEST_ROWS = 128
"""Rows of a chunk, however large the vocabulary: below this the products become slow."""

EXCLUDED = -1e20
"""The logit of a token that cannot be drawn: its probability is 0, and 0 times its logit is not NaN."""

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
    """KL(pi || reference) over what could be drawn; 0 where no reference was given."""


def score_tokens(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    reference: tuple[Tensor, Head] | None = None,
    mask: SamplingMask | None = None,
) -> TokenScores:
    """Score ``targets`` (M,) under softmax(head(hidden) / temperature), hidden (M, D).

    Chunks are recomputed in the backward pass. ``reference`` gives the other model's hidden states
    and head for the full-vocabulary KL. With ``mask`` both softmaxes are over what it keeps.
    """
    vocabulary = int(head(hidden[:1].detach()).shape[-1])
    rows = max(1, CHUNK_LOGITS // vocabulary)
    ref_hidden, ref_head = reference or (hidden, None)
    parts = []
    for start in range(0, max(len(hidden), 1), rows):
        h, r, y = (x[start : start + rows] for x in (hidden, ref_hidden, targets))
        arguments = (h, head, y, temperature, r, ref_head, mask, start)
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
    mask: SamplingMask | None,
    start: int,
) -> tuple[Tensor, ...]:
    all_logprobs = exclude(head(hidden).float() / temperature, mask, start).log_softmax(-1)
    probs = all_logprobs.exp()
    logprobs = all_logprobs.gather(1, targets[:, None])[:, 0]
    entropy = -(probs * all_logprobs).sum(-1)
    collision = probs.square().sum(-1)
    full_kl = torch.zeros_like(entropy)
    if ref_head is not None:
        reference = exclude(ref_head(ref_hidden).float() / temperature, mask, start).log_softmax(-1)
        full_kl = (probs * (all_logprobs - reference)).sum(-1)
    return logprobs, entropy, collision, full_kl


def exclude(logits: Tensor, mask: SamplingMask | None, start: int) -> Tensor:
    """In place: no chance for what could not be drawn. logits (n, V) of the places from ``start`` on."""
    if mask is None:
        return logits
    kept = torch.from_numpy(mask.flat(start, start + len(logits), logits.shape[1])).to(logits.device)
    excluded = torch.ones(logits.numel(), dtype=torch.bool, device=logits.device).index_fill_(0, kept, 0)
    return logits.masked_fill_(excluded.view(logits.shape), EXCLUDED)


def score_compiled(
    hidden: Tensor, layer: Linear, targets: Tensor, temperature: float, mask: SamplingMask | None = None
) -> TokenScores:
    """``score_tokens`` with the compiled operations: logits are made again in the backward pass."""
    arguments = (hidden, layer, targets, 1.0 / temperature, layer.modules[0].weight, mask)
    logprobs, entropy, collision = _ScoreFunction.apply(*arguments)
    return TokenScores(logprobs, entropy, collision, torch.zeros_like(entropy))


class _ScoreFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        layer: Linear,
        targets: Tensor,
        inverse: float,
        weight: Tensor,
        mask: SamplingMask | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy, collision = (torch.empty(len(hidden)) for _ in range(3))
        room = hidden.new_empty(_chunk(len(hidden), len(weight)), len(weight))
        for x, rows in _chunks(hidden, room):
            logits = exclude(layer.product_once(x, room[: len(x)]), mask, rows.start)
            parts = (targets[rows], inverse, logprobs[rows], entropy[rows], collision[rows])
            call("score_rows", logits, *parts, *logits.shape, dtype=logits.dtype)
        ctx.save_for_backward(hidden, targets, entropy, room)
        ctx.layer, ctx.inverse, ctx.weight, ctx.mask = layer, inverse, weight, mask
        ctx.mark_non_differentiable(collision)
        return logprobs, entropy, collision

    @staticmethod
    def backward(
        ctx: Any, dlogprob: Tensor, dentropy: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, targets, entropy, room = ctx.saved_tensors
        weight = ctx.weight
        dhidden = torch.empty_like(hidden)
        dlogprob = dlogprob.contiguous()
        dentropy = dentropy.contiguous() if dentropy is not None and bool(dentropy.any()) else None

        def add(into: Tensor | None) -> None:
            for x, rows in _chunks(hidden, room):
                logits = exclude(ctx.layer.product_once(x, room[: len(x)]), ctx.mask, rows.start)
                grads = (dlogprob[rows], None if dentropy is None else dentropy[rows], entropy[rows])
                parts = (targets[rows], ctx.inverse, *grads)
                call("score_rows_back", logits, *parts, *logits.shape, dtype=logits.dtype)
                dhidden[rows] = ctx.layer.product_back(logits)
                if into is not None:
                    outer_sum(logits, x, into)

        if not weight.requires_grad:
            add(None)
        return dhidden, None, None, None, add_gradient(weight, add), None


def _chunk(rows: int, vocabulary: int) -> int:
    """Rows whose logits are alive at once."""
    return min(rows, max(FEWEST_ROWS, CACHED_LOGITS // vocabulary))


def _chunks(hidden: Tensor, room: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Pieces of ``hidden`` whose logits fit into ``room``, and where they stand."""
    for start in range(0, len(hidden), max(len(room), 1)):
        rows = slice(start, start + len(room))
        yield hidden[rows], rows
