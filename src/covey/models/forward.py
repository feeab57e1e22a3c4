"""Our own decoder forward: Llama, Mistral, Qwen2, Qwen3 shapes, on the loaded model's parameters.

Tokens lie flat, one after another, whatever sequences they belong to; only attention knows about
sequences, so it is passed in. The trainer passes ``PackedAttention`` (prompts shared by their
completions), the sampler passes one over its KV cache: same weights, same code, same log-probs.

Shapes: T flat tokens, D model width, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q (T, H, E), k (T, K, E), v (T, K, E)) -> (T, H, E)."""

LLAMA_SHAPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def supported(model: PreTrainedModel) -> bool:
    """Whether the own forward computes exactly this model: known shape, no sliding window in use."""
    config = model.config
    window = getattr(config, "sliding_window", None) if _slides(config) else None
    return (
        config.model_type in LLAMA_SHAPES
        and getattr(config, "hidden_act", "") == "silu"
        and (window is None or window >= config.max_position_embeddings)
    )


def _slides(config: object) -> bool:
    kinds = getattr(config, "layer_types", None)
    return kinds is None or "sliding_attention" in kinds


class Decoder:
    """The transformer between token ids and final hidden states.

    Holds no weights: it calls the submodules of the Hugging Face model, so LoRA adapters and
    dtype conversions made there act here too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body = model.get_decoder()
        self.embed: nn.Module = body.embed_tokens
        self.layers: list[Any] = list(body.layers)
        self.norm: Any = body.norm
        self.rotary = body.rotary_emb
        attention = self.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.heads: int = model.config.num_attention_heads
        self.kv_heads: int = model.config.num_key_value_heads

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states of flat tokens. (T,) int64, (T,) int64 -> (T, D)."""
        x = self.embed(tokens)
        cos, sin = (c[0, :, None] for c in self.rotary(x[None], positions[None]))
        for i, layer in enumerate(self.layers):
            attention = layer.self_attn
            q, k, v = self._heads(attention, rms_norm(x, layer.input_layernorm))
            mixed = attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + attention.o_proj(mixed.flatten(1))
            h = rms_norm(x, layer.post_attention_layernorm)
            x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
        return rms_norm(x, self.norm)

    def _heads(self, attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = attention.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = attention.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = attention.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if hasattr(attention, "q_norm"):
            q, k = rms_norm(q, attention.q_norm), rms_norm(k, attention.k_norm)
        return q, k, v


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), the mean in float32. (..., D) -> (..., D)."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (wide * scale).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves paired. (T, heads, E), (T, 1, E) -> (T, heads, E)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


@dataclass(frozen=True)
class Rows:
    """Sequences of similar length that attend together, as indices into the flat tokens."""

    queries: Tensor
    """(R, Q) int64 flat positions of the tokens that look; padding points at position 0."""
    keys: Tensor
    """(R, S) int64 flat positions of the tokens that may be seen."""
    mask: Tensor
    """(R, 1, Q, S) bool: who sees whom. Padding queries see everything, so no row is empty."""
    real: Tensor
    """(R, Q) bool: false on padding, whose result is dropped."""


class PackedAttention:
    """Attention over packed sequences: each completion sees its group's prompt and itself."""

    def __init__(self, blocks: Sequence[Rows]) -> None:
        self.blocks = blocks

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        """Attend within every block. (T, H, E), (T, K, E), (T, K, E) -> (T, H, E)."""
        out = torch.zeros_like(q)
        for rows in self.blocks:
            mixed = grouped_attention(q[rows.queries], k[rows.keys], v[rows.keys], rows.mask)
            out = out.index_put((rows.queries[rows.real],), mixed[rows.real])
        return out


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot-product attention with shared key/value heads.

    q (R, Q, H, E), k and v (R, S, K, E), mask (R, 1, Q, S) bool -> (R, Q, H, E).
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] > k.shape[1])
    return mixed.transpose(1, 2)
