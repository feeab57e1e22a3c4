"""Logits of bfloat16 models in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from covey.models.internals import has_hooks

BLOCK_NUMBERS = 1 << 22
"""Numbers of a weight that are converted to float32 at once: 16 MiB."""


def logits_of(head: nn.Module, hidden: Tensor) -> Tensor:
    """Compute the logits of an output layer, in float32 if its weights are bfloat16. (..., D) -> (..., V).

    Rounding to bfloat16 moves a logit of 20 by up to 0.06. On SmolLM2-135M that was a quarter of the
    difference between sampler and trainer (benchmarks/results/gpu.md). MiniMax-M1 (2506.13585) multiplies in
    float32 for that reason; here the products stay in bfloat16, and only their float32 sums are not rounded.
    """
    weight = head.weight
    if not _is_plain(head) or weight.dtype != torch.bfloat16:
        return head(hidden)
    return _Float32Product.apply(hidden.flatten(0, -2), weight).unflatten(0, hidden.shape[:-1])


def _is_plain(head: nn.Module) -> bool:
    """Whether a layer multiplies by its weight and does nothing else."""
    has_bias = getattr(head, "bias", None) is not None
    split = isinstance(head.weight, DTensor)
    return type(head) is nn.Linear and not (has_bias or split or has_hooks(head))


class _Float32Product(torch.autograd.Function):
    """The product X W^T of bfloat16 tensors in float32. X (M, D), W (V, D) -> (M, V)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype"):  # from torch 2.8 on, not on a CPU
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        # Blocks of the vocabulary, since a float32 copy of the weight would take twice its memory.
        x = x.float()
        blocks = weight.split(max(1, BLOCK_NUMBERS // x.shape[1]))
        return torch.cat([x @ block.float().t() for block in blocks], 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        # In bfloat16, as the gradients of all layers below.
        grad = grad.to(torch.bfloat16)
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return grad @ weight if needs_x else None, grad.t() @ x if needs_weight else None
