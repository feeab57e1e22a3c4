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
READ, DRAWN, ROOM = 19, 37, 64
"""Tokens of the prompt and of the completion, and positions of the key/value cache."""


def first_difference(numbers: Numbers) -> str:
    """Name of the first pair that differs; empty if all agree."""
    ways = [_products(numbers)]
    if isinstance(numbers, torch.dtype):  # "mixed" are products alone
        ways += [_attention(numbers), _logits(numbers)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for pairs in ways:
            for name, sampled, trained in pairs:
                if not torch.equal(sampled, trained):
                    return name
    return ""


def _products(numbers: Numbers) -> Iterator[Pair]:
    for n, k in OUTPUTS_INPUTS:
        x, w = (torch.randn(*shape).to(memory_of(numbers)) for shape in ((130, k), (n, k)))
        panels = torch.empty(packed_size(n, k, numbers), dtype=torch.uint8)
        call("pack_weight", w, panels, n, k, dtype=numbers)
        together = x.new_empty(130, n)
        call("product_once", x, w, 0, None, together, 130, n, k, dtype=numbers)
        # Sampling reads packed weights for few rows, training multiplies all rows at once.
        for rows in (1, 7, 32, 130):
            some = x.new_empty(rows, n)
            call("product", x, panels, None, some, rows, n, k, dtype=numbers)
            yield f"a product of {rows} rows", some, together[:rows]


def _attention(dtype: torch.dtype) -> Iterator[Pair]:
    total = READ + DRAWN
    places = torch.arange(total)
    # One prompt and one completion that sees it, as `Sequences.spans`.
    spans = torch.tensor([[0, 0, 0, READ], [0, READ, READ, DRAWN]])
    for h, k, e in SPLITS:
        qkv = torch.randn(total, (h + 2 * k) * e).to(dtype)
        norms = [torch.rand(e).to(dtype) + 0.5 for _ in range(2)]
        # Rotary angles of the halves' pairs: the same for both halves of a head.
        angles = torch.rand(total, e // 2).repeat(1, 2)
        tables = angles.cos().to(dtype), angles.sin().to(dtype)
        parts = [qkv.new_empty(total, heads, e) for heads in (h, k, k)]
        call("split_heads", qkv, *norms, 1e-6, *tables, places, *parts, total, h, k, e, dtype=dtype)
        # Without window and cap, with a window shorter than the prompt, and with a cap.
        for window, cap in ((total, 0.0), (8, 0.0), (total, 0.5)):
            # Training: all tokens at once.
            trained = qkv.new_empty(total, h, e)
            levels = torch.empty(total, h)
            lengths = (h, k, e, total, window)
            call("attend", *parts, spans, 2, 0.2, cap, trained, levels, *lengths, dtype=dtype)
            # Sampling: the prompt's keys and values are in the cache, and tokens are decoded one by one.
            shapes = (ROOM // NEIGHBOURS, e, NEIGHBOURS), (ROOM, e)
            # Keys and values of the prompt, then those of the completion, which decode_attend fills itself.
            stores = [torch.zeros(1, k, *s) for s in shapes * 2]
            columns = key_columns(parts[1][:READ])
            stores[0][0, :, : columns.shape[1]] = columns
            stores[1][0, :, :READ] = parts[2][:READ].transpose(0, 1)
            slot = torch.zeros(1, dtype=torch.int64)
            before = torch.tensor([READ])
            sampled = qkv.new_empty(DRAWN, h * e)
            for t in range(DRAWN):
                row = qkv[READ + t]
                sizes = (1, h, k, e, ROOM, ROOM, window)
                slots = (slot, before, torch.tensor([t]))
                given: tuple[Tensor | float, ...] = (
                    row,
                    *norms,
                    1e-6,
                    *tables,
                    *slots,
                    *stores,
                    0.2,
                    cap,
                    sampled[t],
                )
                call("decode_attend", *given, *sizes, dtype=dtype)
            yield f"attention of {h} heads of {e}", sampled, trained[READ:].flatten(1)


def _logits(dtype: torch.dtype) -> Iterator[Pair]:
    for v in (300, 4099):
        logits = (3 * torch.randn(5, v)).to(dtype)
        for inverse in (1.0, 1.25):
            tokens = torch.empty(5, dtype=torch.int64)
            sampled = torch.empty(5)
            # The log-prob of a drawn token, as `draw` records it and as training scores it.
            call("draw", logits, torch.rand(5), inverse, tokens, sampled, 5, v, dtype=dtype)
            scores = [torch.empty(5) for _ in range(3)]
            call("score_rows", logits, tokens, inverse, *scores, 5, v, dtype=dtype)
            yield f"log-probs of {v} tokens", sampled, scores[0]
