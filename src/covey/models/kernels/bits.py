"""Bit test of a kernel library: whether sampling and training compute a token's result to the same bits.

In C both are the same sums in the same order. But a compiler may fuse a product into its sum in one place and
not in the other. So each pair is compared on random numbers. Widths, lengths and numbers of rows are chosen
so that some fill vectors, panels and tiles, and some do not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from covey.models.kernels.calls import NEIGHBOURS, Numbers, call, key_columns, memory_of, packed_size

Pair = tuple[str, Tensor, Tensor]
"""A name, and the same values as computed in sampling and in training."""
OUTPUTS_INPUTS = ((64, 32), (300, 48), (97, 272))
"""Outputs and inputs of the products that are compared."""
SPLITS = ((4, 2, 32), (7, 1, 64), (3, 3, 96), (2, 1, 128))
"""Query heads, key heads and head width of the attentions that are compared."""
NORM = (1.0, 1e-6)
"""The constants that are added to the norms' weights, and to their mean squares."""
PROMPT_TOKENS = 19
COMPLETION_TOKENS = 37
CACHE_POSITIONS = 64


def first_difference(numbers: Numbers) -> str:
    """Name of the first pair that differs; empty if all agree."""
    checks = [_products(numbers)]
    if isinstance(numbers, torch.dtype):  # "mixed" are products alone
        checks += [_attention(numbers), _logits(numbers)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for pairs in checks:
            for name, sampled, trained in pairs:
                if not torch.equal(sampled, trained):
                    return name
    return ""


def _products(numbers: Numbers) -> Iterator[Pair]:
    for n, k in OUTPUTS_INPUTS:
        x, w = (torch.randn(*shape).to(memory_of(numbers)) for shape in ((130, k), (n, k)))
        panels = torch.empty(packed_size(n, k, numbers), dtype=torch.uint8)
        call("pack_weight", w, panels, n, k, dtype=numbers)
        all_rows = x.new_empty(130, n)
        call("product_once", x, w, 0, None, all_rows, 130, n, k, dtype=numbers)
        # Sampling reads packed weights for few rows, training multiplies all rows at once.
        for rows in (1, 7, 32, 130):
            few_rows = x.new_empty(rows, n)
            call("product", x, panels, None, few_rows, rows, n, k, dtype=numbers)
            yield f"a product of {rows} rows", few_rows, all_rows[:rows]


def _attention(dtype: torch.dtype) -> Iterator[Pair]:
    for sizes in SPLITS:
        heads = _Heads(dtype, *sizes)
        total = PROMPT_TOKENS + COMPLETION_TOKENS
        # Without window and cap, with a window shorter than the prompt, and with a cap.
        for window, cap in ((total, 0.0), (8, 0.0), (total, 0.5)):
            sampled = heads.attend_by_token(window, cap)
            yield f"attention of {sizes[0]} heads of {sizes[2]}", sampled, heads.attend_at_once(window, cap)


class _Heads:
    """Random queries, keys and values of a prompt and a completion, and their attention in both ways."""

    def __init__(self, dtype: torch.dtype, queries: int, keys: int, width: int) -> None:
        total = PROMPT_TOKENS + COMPLETION_TOKENS
        self.dtype = dtype
        self.sizes = (queries, keys, width)
        self.qkv = torch.randn(total, (queries + 2 * keys) * width).to(dtype)
        self.norms = [torch.rand(width).to(dtype) + 0.5 for _ in range(2)]
        # Rotary angles of the halves' pairs: the same for both halves of a head.
        angles = torch.rand(total, width // 2).repeat(1, 2)
        self.tables = angles.cos().to(dtype), angles.sin().to(dtype)
        self.parts = [self.qkv.new_empty(total, heads, width) for heads in (queries, keys, keys)]
        inputs: tuple[Tensor | float, ...] = (self.qkv, *self.norms, *NORM, *self.tables, torch.arange(total))
        call("split_heads", *inputs, *self.parts, total, *self.sizes, dtype=dtype)

    def attend_at_once(self, window: int, cap: float) -> Tensor:
        """Attend from all tokens at once, and return the rows of the completion, (COMPLETION_TOKENS, H E)."""
        h, _, e = self.sizes
        total = PROMPT_TOKENS + COMPLETION_TOKENS
        # One prompt and one completion that sees it, as `Sequences.spans`.
        spans = torch.tensor([[0, 0, 0, PROMPT_TOKENS], [0, PROMPT_TOKENS, PROMPT_TOKENS, COMPLETION_TOKENS]])
        out = self.qkv.new_empty(total, h, e)
        levels = torch.empty(total, h)
        lengths = (*self.sizes, total, window)
        call("attend", *self.parts, spans, 2, 0.2, cap, out, levels, *lengths, dtype=self.dtype)
        return out[PROMPT_TOKENS:].flatten(1)

    def attend_by_token(self, window: int, cap: float) -> Tensor:
        """Attend from one token of the completion after the other, with the prompt in a cache.

        Returns (COMPLETION_TOKENS, H E).
        """
        h, k, e = self.sizes
        # Keys and values of the prompt, then the completion's, which decode_attend fills itself.
        shapes = (CACHE_POSITIONS // NEIGHBOURS, e, NEIGHBOURS), (CACHE_POSITIONS, e)
        stores = [torch.zeros(1, k, *s) for s in shapes * 2]
        columns = key_columns(self.parts[1][:PROMPT_TOKENS])
        stores[0][0, :, : columns.shape[1]] = columns
        stores[1][0, :, :PROMPT_TOKENS] = self.parts[2][:PROMPT_TOKENS].transpose(0, 1)
        slot = torch.zeros(1, dtype=torch.int64)
        cached = torch.tensor([PROMPT_TOKENS])
        sampled = self.qkv.new_empty(COMPLETION_TOKENS, h * e)
        for t in range(COMPLETION_TOKENS):
            inputs: tuple[Tensor | float, ...] = (
                self.qkv[PROMPT_TOKENS + t],
                *self.norms,
                *NORM,
                *self.tables,
            )
            slots = (slot, cached, torch.tensor([t]))
            lengths = (1, *self.sizes, CACHE_POSITIONS, CACHE_POSITIONS, window)
            call("decode_attend", *inputs, *slots, *stores, 0.2, cap, sampled[t], *lengths, dtype=self.dtype)
        return sampled


def _logits(dtype: torch.dtype) -> Iterator[Pair]:
    for v in (300, 4099):
        logits = (3 * torch.randn(5, v)).to(dtype)
        for inverse in (1.0, 1.25):
            tokens = torch.empty(5, dtype=torch.int64)
            sampled = torch.empty(5)
            # The log-prob of a drawn token, as `draw` records it and as training computes it.
            call("draw", logits, torch.rand(5), inverse, tokens, sampled, 5, v, dtype=dtype)
            outputs = [torch.empty(5) for _ in range(3)]
            call("token_outputs", logits, tokens, inverse, *outputs, 5, v, dtype=dtype)
            yield f"log-probs of {v} tokens", sampled, outputs[0]
