"""Our own decoder forward: Llama, Mistral, Qwen2 and Qwen3 shapes, on the loaded model's parameters.

Tokens lie flat, one after another, whatever sequences they belong to; only attention knows about
sequences, so it is passed in: over packed sequences for training (``Decoder.packed``), over a key/value
cache for sampling. Same weights, same code, same log-probs.

Shapes: T flat tokens, D model width, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from covey.models.compiled import pick_ops
from covey.models.linear import Linear
from covey.models.ops import Heads, Norm, Rotation, Sequences

LLAMA_SHAPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

Attend = Callable[[int, Heads, Tensor], Tensor]
"""(number of the layer, its heads, qkv (T, (H + 2K) E)) -> (T, H E)."""


def supported(model: PreTrainedModel) -> bool:
    """Whether the own forward computes exactly this model: known shape, no sliding window in use."""
    config = model.config
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    window = getattr(config, "sliding_window", None) if slides else None
    return (
        config.model_type in LLAMA_SHAPES
        and getattr(config, "hidden_act", "") == "silu"
        and (window is None or window >= config.max_position_embeddings)
    )


class Layer(NamedTuple):
    """One transformer layer."""

    attention_norm: Norm
    qkv: Linear
    heads: Heads
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Decoder:
    """The transformer between token ids and final hidden states.

    Holds no weights of its own: it reads those of the Hugging Face model, whose submodules (LoRA layers
    included) stay the place where they live.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body = model.get_decoder()
        config = model.config
        width = body.layers[0].self_attn.head_dim
        counts = (config.num_attention_heads, config.num_key_value_heads, width)
        self.embed: Any = body.embed_tokens
        self.layers = [_layer(module, counts) for module in body.layers]
        self.norm = _norm(body.norm)
        self.ops = pick_ops(
            self.embed.weight, self.layers[0].heads, [config.hidden_size, config.intermediate_size]
        )
        self.recompute = False
        """Keep only what enters each layer, and compute the rest again in the backward pass."""
        self._rotary = body.rotary_emb
        self._tables = (torch.empty(0), torch.empty(0))

    @property
    def exact(self) -> bool:
        """Whether a token's hidden state is the same bits alone, in a batch, decoding and training."""
        linears = (m for layer in self.layers for m in layer if isinstance(m, Linear))
        return self.ops.exact and all(m.plain for m in linears)

    def __call__(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Final hidden states of flat tokens. (T,) int64 -> (T, D)."""
        x, delta = self.ops.embed(self.embed, tokens), None
        for i in range(len(self.layers)):
            if self.recompute and torch.is_grad_enabled():
                x, delta = checkpoint(self._layer, i, x, delta, attend, use_reentrant=False)
            else:
                x, delta = self._layer(i, x, delta, attend)
        return self.ops.add_norm(x, delta, self.norm)[1]

    def _layer(self, i: int, x: Tensor, delta: Tensor | None, attend: Attend) -> tuple[Tensor, Tensor]:
        """The residual stream and what the last block adds to it, before and after layer i. (T, D) each."""
        ops, layer = self.ops, self.layers[i]
        x, h = ops.add_norm(x, delta, layer.attention_norm)
        mixed = attend(i, layer.heads, ops.linear(layer.qkv, h))
        x, h = ops.add_norm(x, ops.linear(layer.output, mixed), layer.mlp_norm)
        return x, ops.linear(layer.down, ops.silu_mul(ops.linear(layer.gate_up, h)))

    def packed(self, positions: Tensor, sequences: Sequences) -> Attend:
        """Attention over packed sequences: a completion sees its group's prompt and itself."""
        rotation, attention = self.rotation(positions), self.ops.attention(sequences)

        def attend(_: int, heads: Heads, qkv: Tensor) -> Tensor:
            return attention(*self.ops.split_heads(qkv, heads, rotation)).flatten(1)

        return attend

    @torch.no_grad()
    def rotation(self, positions: Tensor, reach: int | None = None) -> Rotation:
        """Rotary tables that reach all positions, (T,) int64, or ``reach`` of them."""
        wanted = reach or int(positions.max()) + 1
        weight = self.embed.weight
        if len(self._tables[0]) < wanted or self._tables[0].dtype != weight.dtype:
            every = torch.arange(max(wanted, 2 * len(self._tables[0])), device=weight.device)
            self._tables = tuple(t[0].contiguous() for t in self._rotary(weight[:1, None], every[None]))
        return Rotation(*self._tables, positions)


def _layer(module: Any, counts: tuple[int, int, int]) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    norms = (_norm(attention.q_norm), _norm(attention.k_norm)) if hasattr(attention, "q_norm") else ()
    return Layer(
        attention_norm=_norm(module.input_layernorm),
        qkv=Linear(attention.q_proj, attention.k_proj, attention.v_proj),
        heads=Heads(*counts, *norms),
        output=Linear(attention.o_proj),
        mlp_norm=_norm(module.post_attention_layernorm),
        gate_up=Linear(mlp.gate_proj, mlp.up_proj),
        down=Linear(mlp.down_proj),
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)
