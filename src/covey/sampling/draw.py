"""Drawing one token per row from its logits: temperature, top-k, top-p, inverse CDF."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from covey.kernels.calls import available, call
from covey.models.logprobs import EXCLUDED
from covey.sampling.base import SamplingParams


class Drawn(NamedTuple):
    """One token per row."""

    tokens: Tensor
    """(B,) int64."""
    logprobs: Tensor
    """(B,) float32, nats, under the distribution drawn from (greedy: at temperature 1)."""
    kept: Tensor | None
    """(B, V) bool: what could be drawn; None where everything could."""


def draw(logits: Tensor, uniform: Tensor, params: SamplingParams) -> Drawn:
    """The first token whose cumulative probability exceeds the uniform; the likeliest if greedy.

    logits (B, V), uniform (B,) in [0, 1). What top_k and top_p leave out gets a logit without a chance, so
    that the log-prob is computed as the trainer computes it under the same mask.
    """
    kept = None
    if params.truncates:
        kept = kept_tokens(logits.float() / params.temperature, params)
        logits = logits.masked_fill(~kept, EXCLUDED)
    if available(logits.dtype, logits.device):
        return Drawn(*_draw_compiled(logits, uniform, params.temperature), kept)
    logits = logits.float()
    if params.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        logits = logits / params.temperature
        cdf = logits.softmax(-1).cumsum(-1)
        tokens = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(-1)
    return Drawn(tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], kept)


def _draw_compiled(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    inverse = 1.0 / temperature if temperature else 0.0
    call(
        "draw",
        logits.contiguous(),
        uniform.contiguous(),
        inverse,
        tokens,
        logprobs,
        *logits.shape,
        dtype=logits.dtype,
    )
    return tokens, logprobs


def kept_tokens(logits: Tensor, params: SamplingParams) -> Tensor:
    """The top-k, and of these the smallest set with probability >= top_p. (B, V) -> (B, V) bool."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    if params.top_k > 0:
        kth = logits.topk(min(params.top_k, logits.shape[-1])).values[:, -1:]
        kept = ~(logits < kth)
    if params.top_p < 1:
        ordered, order = logits.masked_fill(~kept, EXCLUDED).sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        inside = ~(probs.cumsum(-1) - probs >= params.top_p)
        kept = kept & torch.empty_like(kept).scatter_(-1, order, inside)
    return kept
