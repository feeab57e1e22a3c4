"""Our own decoder forward: Llama, Mistral, Qwen2 and Qwen3 shapes, on the loaded model's parameters.

Tokens lie flat, one after another, whatever sequences they belong to; only attention knows about
sequences, so it is passed in: over packed sequences for training (``Decoder.packed``), over a key/value
cache for sampling. Same weights, same code, same log-probs.

Shapes: T flat tokens, D model width, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from covey.models.compiled import pick_ops
from covey.models.linear import FusedLinear
from covey.models.ops import Heads, Ops, Rotation, Sequences
from covey.models.packing import Packed

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


def hidden_states(
    decoder: Decoder | None, packed: Packed, states: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The hidden states that predict: (M, D).

    ``states`` runs padded tokens (N, S) with their mask where no own forward knows the architecture.
    """
    if decoder is not None:
        attend = decoder.packed(packed.positions, packed.sequences)
        return decoder(packed.tokens, attend)[packed.sources]
    index, real = packed.padded()
    found = states(packed.tokens[index], real.long())
    first = packed.completions[:, 1] - 1
    column = torch.arange(packed.place.shape[1], device=index.device)
    row = torch.arange(len(index), device=index.device)[:, None]
    return found[row, (first[:, None] + column).clamp(max=index.shape[1] - 1)][packed.place]


class Layer(nn.Module):
    """One transformer layer: a Hugging Face layer computed with our operations.

    Its parameters are those of ``block``, read at each call, so that sharding can swap them in its hooks.
    """

    def __init__(self, number: int, block: GradientCheckpointingLayer, config: PretrainedConfig) -> None:
        super().__init__()
        self.number, self.block = number, block
        self.norms = (block.input_layernorm, block.post_attention_layernorm)  # a tuple registers nothing
        attention, mlp = block.self_attn, block.mlp
        head_norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        counts = (config.num_attention_heads, config.num_key_value_heads)
        self.heads = Heads(*counts, attention.head_dim, *head_norms)
        self.qkv = FusedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = FusedLinear(attention.o_proj)
        self.gate_up = FusedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = FusedLinear(mlp.down_proj)

    def forward(
        self, x: Tensor, delta: Tensor | None, attend: Attend, ops: Ops
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream and the delta still to be added to it, before and after: (T, D) each.

        x' = x + delta, x'' = x' + attention(norm(x')) -> x'', mlp(norm(x'')). The last sum is left to the
        next norm (the next layer's, or the final one): ``add_norm`` adds and norms in one pass over a row.
        """
        x, h = ops.add_norm(x, delta, self.norms[0])
        mixed = attend(self.number, self.heads, ops.linear(self.qkv, h))
        x, h = ops.add_norm(x, ops.linear(self.output, mixed), self.norms[1])
        return x, ops.linear(self.down, ops.silu_mul(ops.linear(self.gate_up, h)))


class Decoder(nn.Module):
    """The transformer between token ids and final hidden states.

    It has no parameters of its own: its modules are those of the Hugging Face model (LoRA layers included),
    which does not know it, so that the model's state_dict holds each weight once.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        body, config = model.get_decoder(), model.config
        self.embed, self.norm, self._rotary = body.embed_tokens, body.norm, body.rotary_emb
        layers = [Layer(i, block, config) for i, block in enumerate(body.layers)]
        self.layers, self.heads = nn.ModuleList(layers), layers[0].heads
        self.ops = pick_ops(self.embed.weight, self.heads, [config.hidden_size, config.intermediate_size])
        self.recompute = False
        """Keep only what enters each layer, and compute the rest again in the backward pass."""
        self._tables = (torch.empty(0), torch.empty(0))

    @property
    def bit_exact(self) -> bool:
        """Whether a token's hidden state is the same bits alone, in a batch, decoding and training."""
        linears = (m for layer in self.layers for m in vars(layer).values() if isinstance(m, FusedLinear))
        return self.ops.bit_exact and all(m.plain for m in linears)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Final hidden states of flat tokens. (T,) int64 -> (T, D)."""
        x, delta = self.ops.embed(self.embed, tokens), None
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x, delta = checkpoint(layer, x, delta, attend, self.ops, use_reentrant=False)
            else:
                x, delta = layer(x, delta, attend, self.ops)
        return self.ops.add_norm(x, delta, self.norm)[1]

    def packed(self, positions: Tensor, sequences: Sequences) -> Attend:
        """Attention over packed sequences: a completion sees its group's prompt and itself."""
        rotation, attention = self.rotation(positions), self.ops.attention(sequences)

        def attend(_: int, heads: Heads, qkv: Tensor) -> Tensor:
            return attention(*self.ops.split_heads(qkv, heads, rotation)).flatten(1)

        return attend

    @torch.no_grad()
    def rotation(self, positions: Tensor, length: int | None = None) -> Rotation:
        """Rotary tables for all positions, (T,) int64, or for ``length`` of them."""
        needed = length or int(positions.max()) + 1
        weight = self.embed.weight
        if len(self._tables[0]) < needed or self._tables[0].dtype != weight.dtype:
            every = torch.arange(max(needed, 2 * len(self._tables[0])), device=weight.device)
            cos, sin = self._rotary(weight[:1, None], every[None])
            self._tables = (cos[0].contiguous(), sin[0].contiguous())
        return Rotation(*self._tables, positions)
