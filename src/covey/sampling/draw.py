"""Drawing one token per row from its logits: temperature, top-k, top-p, inverse CDF."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from covey.models.kernels.calls import available, call
from covey.models.logprobs import EXCLUDED
from covey.sampling.base import SamplingParams

GREEDY = -1.0
"""Value in place of a uniform: take the likeliest token."""


class DrawnTokens(NamedTuple):
    """The tokens drawn, one per row."""

    tokens: Tensor
    """(B,) int64."""
    logprobs: Tensor
    """(B,) float32, nats, under the distribution drawn from (temperature 0: at 1)."""
    drawable: Tensor | None
    """(B, V) bool: the tokens that could be drawn; None where all could."""


def draw(logits: Tensor, uniform: Tensor, params: SamplingParams) -> DrawnTokens:
    """Draw each row's first token whose cumulative probability exceeds the uniform; the likeliest if greedy.

    logits (B, V), uniform (B,) in [0, 1), or ``GREEDY`` for rows that take the likeliest at any temperature.
    Tokens that top_k and top_p exclude get the logit ``EXCLUDED``, so that the log-prob is computed as the
    trainer computes it under the same mask.
    """
    drawable = None
    if params.truncates:
        # top_p is taken at the temperature: it holds a probability of the distribution that is drawn from.
        drawable = kept_tokens(logits.float() / params.temperature, params)
        logits = logits.masked_fill(~drawable, EXCLUDED)
    if available(logits.dtype, logits.device):
        return DrawnTokens(*_draw_compiled(logits, uniform, params.temperature), drawable)
    logits = logits.float()
    if params.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        logits = logits / params.temperature
        # Scaled by the sum, which rounding keeps from being exactly 1: no draw can exceed the last token.
        cdf = logits.softmax(-1).cumsum(-1)
        # The index drawn is the number of tokens whose cumulative probability is at most the uniform.
        count_below = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(-1)
        tokens = torch.where(uniform == GREEDY, logits.argmax(-1), count_below)
    return DrawnTokens(tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], drawable)


def _draw_compiled(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    logprobs = torch.empty(len(logits))
    # The kernel multiplies; 0 means greedy to it.
    inverse = 1.0 / temperature if temperature else 0.0
    inputs = (logits.contiguous(), uniform.contiguous(), inverse)
    call("draw", *inputs, tokens, logprobs, *logits.shape, dtype=logits.dtype)
    return tokens, logprobs


def kept_tokens(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the tokens that top_k keeps, and of these top_p; ties stay. (B, V) -> (B, V) bool."""
    drawable = torch.ones_like(logits, dtype=torch.bool)
    if params.top_k > 0:
        kth = logits.topk(min(params.top_k, logits.shape[-1])).values[:, -1:]
        # Negated rather than ``>=``: where the k-th is NaN all tokens stay, instead of none.
        drawable = ~(logits < kth)
    if params.top_p < 1:
        drawable = nucleus(logits.masked_fill(~drawable, EXCLUDED).softmax(-1), params.top_p)
    return drawable


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Return the likeliest tokens that together hold ``top_p``. (B, V) -> (B, V) bool.

    All tokens with at most the probability (1 - top_p) / V together hold at most 1 - top_p, so only the
    others need sorting: a few thousand of a large vocabulary. Ties are all kept, so that a row's set does
    not depend on how many candidates another row has.
    """
    smallest = (1 - top_p) / probs.shape[-1]
    sorted_probs = probs.topk(candidates(probs, smallest)).values
    # A token is inside while those before it hold less than top_p; the likeliest always is.
    in_nucleus = (sorted_probs.cumsum(-1) - sorted_probs < top_p) & (sorted_probs > smallest)
    in_nucleus[:, 0] = True
    # The row's threshold is the smallest probability inside.
    threshold = sorted_probs.masked_fill(~in_nucleus, torch.inf).amin(-1, keepdim=True)
    return ~(probs < threshold)


def candidates(probs: Tensor, smallest: float) -> int:
    """Return the largest number of tokens in a row that are likelier than ``smallest``.

    On a GPU everything is sorted: that is faster than waiting for this number.
    """
    if probs.device.type != "cpu":
        return probs.shape[-1]
    return max(int((probs > smallest).sum(-1).max()), 1)
