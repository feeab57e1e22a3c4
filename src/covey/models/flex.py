"""Attention over packed sequences on a GPU: torch's FlexAttention with a mask of prompts and completions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from covey.models.ops import Attention, Heads, Sequences, TorchOps, soft_cap

BLOCK = 128
"""Tokens in a block of the mask; blocks without a visible pair are skipped."""
MIN_BLOCKS = 2
"""Short packings are padded to this many, because torch compiles a size of 1 as a case of its own."""
MIN_HEAD_WIDTH = 16
"""Features of a head; torch has no kernel for fewer."""
MAX_COMPILED_FORMS = 64
"""Most compiled forms: with and without a gradient, a cap or shared heads, in each dtype of each model."""


class FlexOps(TorchOps):
    """The operations of plain torch, with attention compiled by torch."""

    def attention(self, sequences: Sequences, window: int | None = None) -> Attention:
        """Attend with one mask for all layers. Layers with a window, or narrow heads, use plain torch."""
        if window is not None:
            return super().attention(sequences, window)
        mask = group_mask(sequences)

        def attend(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
            if heads.width < MIN_HEAD_WIDTH:
                return TorchOps.attention(self, sequences)(q, k, v, heads)
            padding = mask.seq_lengths[0] - len(q)
            # (T, heads, E) -> (1, heads, whole blocks of T, E).
            heads_first = (F.pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1)[None] for x in (q, k, v))
            options = {"block_mask": mask, "enable_gqa": heads.queries > heads.keys, "scale": heads.factor}
            mixed = compiled_attention()(*heads_first, score_mod=capped_score(heads.cap, q.device), **options)
            return mixed[0, :, : len(q)].transpose(0, 1)

        return attend


@cache
def compiled_attention() -> Callable[..., Tensor]:
    """FlexAttention compiled once for all lengths; without compilation it would need T^2 memory."""
    # By default torch raises at the ninth form, which a run with a critic or a reference may reach.
    dynamo: Any = torch._dynamo.config  # noqa: SLF001 - torch offers no other way to it
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_COMPILED_FORMS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def capped_score(cap: float | None, device: torch.device) -> Callable[..., Tensor] | None:
    """The function that caps a scaled score; None without a cap."""
    if cap is None:
        return None
    limit = torch.full((), cap, device=device)  # a number becomes a symbol, which torch cannot trace here

    def cap_score(score: Tensor, *_indices: Tensor) -> Tensor:
        return soft_cap(score, limit)

    return cap_score


def _padded_spans(spans: Tensor) -> Tensor:
    """The span of each token's sequence, (T, 4) with T padded to whole blocks; the padding sees itself.

    Kernels differ below one block, and look up all queries of the last one.
    """
    rows = spans.repeat_interleave(spans[:, 3], dim=0)
    tokens = len(rows)
    size = max(MIN_BLOCKS, -(-tokens // BLOCK)) * BLOCK
    rows = F.pad(rows, (0, 0, 0, size - tokens), value=tokens)
    # Rows of padding belong to no prompt.
    rows[tokens:, 1] = 0
    return rows


def group_mask(sequences: Sequences) -> BlockMask:
    """The mask by which a token sees its group's prompt and its own sequence up to itself."""
    rows = _padded_spans(sequences.spans)
    size = len(rows)
    block_count = size // BLOCK
    prompt, prompt_length, start = (column.contiguous() for column in rows.T[:3])
    prompt_end = prompt + prompt_length

    def sees_some(query: Tensor, first: Tensor, count: int) -> Tensor:
        """Whether a query sees any of ``count`` tokens from the first on."""
        in_sequence = (start[query] < first + count) & (first <= query)
        in_prompt = (prompt[query] < first + count) & (first < prompt_end[query])
        return in_sequence | in_prompt

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees_some(query, key, 1)

    # Which blocks of 128 x 128 have a visible pair, from the spans alone: the mask (T, T) is never built.
    queries = torch.arange(size, device=rows.device)[:, None]
    block_starts = torch.arange(0, size, BLOCK, device=rows.device)
    sees_block = sees_some(queries, block_starts, BLOCK)  # (T, blocks)
    visible = sees_block.view(block_count, BLOCK, block_count).any(1).int()
    # Per block of queries: how many blocks of keys it reads, and their numbers ahead of all others.
    order = visible.argsort(dim=1, descending=True, stable=True).int()
    blocks = (visible.sum(1, dtype=torch.int32)[None, None], order[None, None])
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(size, size))
