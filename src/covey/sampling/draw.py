"""Drawing one token per row from its logits: temperature, top-k, top-p, inverse CDF."""

from __future__ import annotations

import torch
from torch import Tensor

from covey.kernels.calls import available, call
from covey.sampling.base import SamplingParams


def draw(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The first token whose cumulative probability exceeds the uniform; the likeliest if greedy.

    logits (B, V), uniform (B,) in [0, 1) -> tokens (B,) int64 and logprobs (B,) float32, nats,
    under the distribution drawn from (greedy: at temperature 1).
    """
    if not params.truncates and available(logits.dtype, logits.device):
        return _draw_compiled(logits, uniform, params)
    logits = logits.float()
    if params.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        logits = truncate(logits / params.temperature, params)
        cdf = logits.softmax(-1).cumsum(-1)
        tokens = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(-1)
    logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return tokens, logprobs


def _draw_compiled(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    inverse = 1.0 / params.temperature if params.temperature else 0.0
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


def truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """-inf outside the top-k and outside the smallest set with probability >= top_p. (B, V)."""
    if params.top_k > 0:
        kth = logits.topk(min(params.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= params.top_p
        logits = ordered.masked_fill(outside, -torch.inf).gather(-1, order.argsort(-1))
    return logits
