"""The operations that a decoder consists of: their definition, and an implementation in plain torch.

`compiled` implements them for the CPU; `ops_choice` chooses when a model is loaded. Shapes: T tokens,
D width, F feed-forward width, H query heads, K key/value heads, E head width, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covey.models.linear import FusedLinear
from covey.models.logits import logits_of


class Norm:
    """An RMS norm of the Hugging Face model: (weight + shift) x / sqrt(mean(x^2) + epsilon)."""

    def __init__(self, module: Any, shift: float = 0.0) -> None:
        """``shift``: 1 in families that store weights as their difference from 1. Raises AttributeError."""
        self.module = module
        self.shift = shift
        # Raises AttributeError for a module that is no norm.
        _ = self.weight
        # The names of Gemma and of Llama; another module's are not taken, since it may be another norm.
        self.epsilon = float(module.eps if shift else module.variance_epsilon)

    @property
    def weight(self) -> Tensor:
        """The stored weight (D,), read at each call, since sharding replaces it."""
        weight: Tensor = self.module.weight
        return weight

    @property
    def constants(self) -> tuple[float, float]:
        """Shift and epsilon, in the compiled operations' order."""
        return self.shift, self.epsilon


class Heads(NamedTuple):
    """The heads of a projected row (H query, K key and K value heads of width E) and how they attend."""

    queries: int
    keys: int
    width: int
    query_norm: Norm | None = None
    """Norm of each query head, before rotation."""
    key_norm: Norm | None = None
    """Norm of each key head, before rotation."""
    scale: float | None = None
    """Factor on the scores; None: E^-1/2."""
    window: int | None = None
    """Number of tokens that a token sees, itself included; None: all before it."""
    rotary: str = ""
    """Name of the rotary table that rotates them."""
    interleaved: bool = False
    """Whether rotation pairs neighbouring features instead of the two halves."""
    cap: float | None = None
    """Bound on the scores (`soft_cap`); None: no bound."""

    @property
    def norm_constants(self) -> tuple[float, float]:
        """The constants of both norms, which are of one kind."""
        return self.query_norm.constants if self.query_norm else (0.0, 0.0)

    @property
    def factor(self) -> float:
        """The factor on the scores, with the default filled in."""
        return self.width**-0.5 if self.scale is None else self.scale


class Activation(NamedTuple):
    """An activation gate * sigmoid(linear gate + cubic gate^3), and torch's function for it."""

    linear: float
    cubic: float
    torch: Callable[[Tensor], Tensor]


# gelu's tanh form is a sigmoid too: (1 + tanh y) / 2 = sigmoid(2 y), and 2 sqrt(2 / pi) = sqrt(8 / pi).
ACTIVATIONS = {
    "silu": Activation(1.0, 0.0, F.silu),
    "gelu_pytorch_tanh": Activation(
        (8 / math.pi) ** 0.5, 0.044715 * (8 / math.pi) ** 0.5, partial(F.gelu, approximate="tanh")
    ),
}


class Rotation(NamedTuple):
    """Rotary tables (positions, R <= E) for paired halves, and the position of every token (T,) int64."""

    cos: Tensor
    sin: Tensor
    positions: Tensor


Attention = Callable[[Tensor, Tensor, Tensor, Heads], Tensor]
"""Function of q (T, H, E), k and v (T, K, E) and their heads -> (T, H, E)."""


class Ops(Protocol):
    """The operations that a decoder needs."""

    compiled: bool
    """Whether these are the C operations."""

    @property
    def bit_exact(self) -> bool:
        """Whether a token's result has the same bits alone, in a batch, in decoding and in training."""

    def embed(self, module: nn.Module, tokens: Tensor) -> Tensor:
        """Look up embeddings. (T,) int64 -> (T, D)."""

    def linear(self, layer: FusedLinear, x: Tensor) -> Tensor:
        """Apply linear layers, outputs concatenated. (T, in) -> (T, out)."""

    def logits(self, head: FusedLinear, hidden: Tensor) -> Tensor:
        """Apply the output layer. (T, D) -> (T, V)."""

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """The sum s = x + delta, and its norm weight * s / sqrt(mean(s^2) + eps). (T, D) each."""

    def split_heads(self, qkv: Tensor, heads: Heads, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Split, norm and rotate. (T, (H + 2K) E) -> q (T, H, E), k (T, K, E), v (T, K, E)."""

    def attention(self, sequences: Sequences, window: int | None = None) -> Attention:
        """Causal attention of every sequence to [its prompt | itself], for all layers with this window."""

    def gate_mul(self, gate_up: Tensor, gate: Activation) -> Tensor:
        """Compute activation(gate) * up from rows ``gate_up``. (T, 2F) -> (T, F)."""

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Compute cap tanh(x / cap) of logits. (T, V) -> (T, V)."""


class Sequences(NamedTuple):
    """The sequences that flat tokens belong to."""

    spans: Tensor
    """(S, 4) int64: start and length of the prompt, start and length of the sequence's own tokens.
    A prompt is a sequence of its own, with a prompt of length 0."""
    groups: Tensor
    """(groups + 1,) int64: where each prompt's spans begin: the prompt itself, then its completions."""
    longest: int
    """Largest number of keys that a query sees."""


class TorchOps:
    """The operations in plain torch, on any device and in any dtype."""

    compiled = bit_exact = False

    def embed(self, module: nn.Module, tokens: Tensor) -> Tensor:
        """Call the module itself."""
        return module(tokens)

    def linear(self, layer: FusedLinear, x: Tensor) -> Tensor:
        """Call the modules themselves, LoRA layers included."""
        parts = [m(x) for m in layer.modules]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def logits(self, head: FusedLinear, hidden: Tensor) -> Tensor:
        """Apply the output layer; the logits of bfloat16 weights are float32."""
        (module,) = head.modules
        return logits_of(module, hidden)

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """Add and norm in float32; only the normed rows are rounded to the layers' dtype.

        With a bfloat16 stream, sampler and trainer of SmolLM2-135M differ by .024 nats instead of .015.
        """
        dtype = x.dtype if delta is None else delta.dtype
        total = x.to(torch.promote_types(dtype, torch.float32))
        total = total if delta is None else total + delta
        return total, rms_norm(total, norm).to(dtype)

    def split_heads(self, qkv: Tensor, heads: Heads, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Split a row into views, then norm and rotate them."""
        # (T, (H + 2K) E) -> (T, H + 2K, E), split into H, K and K heads.
        q, k, v = qkv.unflatten(-1, (-1, heads.width)).split([heads.queries, heads.keys, heads.keys], dim=1)
        q = q if heads.query_norm is None else rms_norm(q, heads.query_norm)
        k = k if heads.key_norm is None else rms_norm(k, heads.key_norm)
        cos, sin = (table[rotation.positions][:, None] for table in (rotation.cos, rotation.sin))
        rotate_heads = rotate_neighbours if heads.interleaved else rotate
        return rotate_heads(q, cos, sin), rotate_heads(k, cos, sin), v

    def attention(self, sequences: Sequences, window: int | None = None) -> Attention:
        """Attend in padded blocks of sequences of similar length."""
        blocks = padded_rows(sequences.spans, window)

        def attend(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
            out = torch.zeros_like(q)
            for rows in blocks:
                mixed = grouped_attention(q[rows.queries], k[rows.keys], v[rows.keys], rows.mask, heads)
                out = out.index_put((rows.queries[rows.real],), mixed[rows.real])
            return out

        return attend

    def gate_mul(self, gate_up: Tensor, gate: Activation) -> Tensor:
        """Activate and multiply as the Hugging Face modules do."""
        gates, up = gate_up.chunk(2, dim=-1)
        return gate.torch(gates) * up

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Cap as the Hugging Face modules do."""
        return soft_cap(x, cap)


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """The RMS norm, its mean in float32. (..., D) -> (..., D)."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + norm.epsilon)
    # In float32, the difference from 1 is not lost.
    weight = norm.weight.float() + norm.shift if norm.shift else norm.weight
    return (weight * (x32 * scale).to(x.dtype)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of the first R of E. (T, heads, E), (T, 1, R) -> (T, heads, E)."""
    rotated, unrotated = x.tensor_split([cos.shape[-1]], dim=-1)
    lower, upper = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-upper, lower), dim=-1) * sin
    return rotated if not unrotated.shape[-1] else torch.cat((rotated, unrotated), dim=-1)


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding that pairs features 2i and 2i + 1. Shapes as ``rotate``."""
    rotated, unrotated = x.tensor_split([cos.shape[-1]], dim=-1)
    # Sort even features before odd ones, rotate as halves, and sort back.
    halves = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)
    pairs = rotate(halves, cos, sin).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((pairs, unrotated), dim=-1)


def soft_cap(x: Tensor, cap: float | Tensor) -> Tensor:
    """The soft cap, cap tanh(x / cap): about x where that is small, and never beyond the cap.

    Gemma 2 bounds attention scores and final logits so (2408.00118). The slope is 1 - tanh(x / cap)^2.
    """
    return cap * torch.tanh(x / cap)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: Heads) -> Tensor:
    """Scaled dot-product attention with shared key/value heads.

    q (R, Q, H, E), k and v (R, N, K, E), mask (R, 1, Q, N) bool -> (R, Q, H, E).
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if heads.cap is not None:
        rows = q.unflatten(1, (heads.keys, -1)).flatten(2, 3)  # the queries of a key head, as rows
        # (R, 1, Q, N) -> (R, 1, (H / K) Q, N), in the order of those rows.
        row_mask = mask.repeat(1, 1, heads.queries // heads.keys, 1)
        return capped_attention(rows, k, v, row_mask, heads).view(q.shape).transpose(1, 2)
    shared = q.shape[1] > k.shape[1]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shared, scale=heads.factor)
    return mixed.transpose(1, 2)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: Heads) -> Tensor:
    """Compute softmax(soft_cap(q k^T)) v where the mask is true; torch's own operation has no cap.

    q (R, K, Q, E), k and v (R, K, N, E), mask (R, 1, Q or 1, N) bool -> (R, K, Q, E).
    """
    assert heads.cap is not None, "without a cap torch's operation is faster"
    scores = soft_cap(q @ k.mT * heads.factor, heads.cap).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


MIN_LENGTH_RATIO = 0.75
"""Sequences attend in one block while the shortest has at least this fraction of the longest's length."""


class Rows(NamedTuple):
    """Sequences of similar length that attend together, as indices into the flat tokens."""

    queries: Tensor
    """(R, Q) int64; padding points at token 0."""
    keys: Tensor
    """(R, N) int64: the prompt's tokens, then the sequence's own."""
    mask: Tensor
    """(R, 1, Q, N) bool: whether a query sees a key. Padding queries see all: an empty row gives NaN."""
    real: Tensor
    """(R, Q) bool: false on padding, whose results are dropped."""


def padded_rows(spans: Tensor, window: int | None) -> list[Rows]:
    """Blocks of similar length, prompts apart from completions. (S, 4) -> rows that cover all spans."""
    # Greedy over (prompts first, longest first): a block's first member is its longest. Empty spans drop out.
    _, prefix_lengths, _, lengths = spans.T.tolist()
    is_completion = [prefix > 0 for prefix in prefix_lengths]
    nonempty = [i for i, length in enumerate(lengths) if length]
    blocks: list[list[int]] = []
    for i in sorted(nonempty, key=lambda i: (is_completion[i], -lengths[i])):
        longest = blocks[-1][0] if blocks else i
        similar = (
            is_completion[i] == is_completion[longest] and lengths[i] >= MIN_LENGTH_RATIO * lengths[longest]
        )
        if blocks and similar:
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return [_rows(spans[torch.tensor(block, device=spans.device)], window) for block in blocks]


def _rows(spans: Tensor, window: int | None) -> Rows:
    # Columns (R, 1) against ranges (Q,) and (P,) give tables (R, Q) and (R, P) for all sequences at once,
    # P being the longest prompt of the block.
    prefix, prefix_length, start, length = (column[:, None] for column in spans.T)
    positions = torch.arange(int(length.max()), device=spans.device)
    shared = torch.arange(int(prefix_length.max()), device=spans.device)
    real = positions < length
    in_prefix = shared < prefix_length
    queries = torch.where(real, start + positions, 0)
    keys = torch.cat((torch.where(in_prefix, prefix + shared, 0), queries), dim=1)
    own_mask = (positions[:, None] >= positions) & real[:, None]
    prefix_mask = in_prefix[:, None].expand(-1, len(positions), -1)
    mask = torch.cat((prefix_mask, own_mask), dim=2)
    if window is not None:
        # Position of every key in its sequence; a query sees those less than `window` before its own.
        query_positions = prefix_length + positions
        key_positions = torch.cat((shared.expand(len(spans), -1), query_positions), dim=1)
        distance = query_positions[:, :, None] - key_positions[:, None]
        mask &= distance < window
    mask |= ~real[:, :, None]
    return Rows(queries, keys, mask[:, None], real)
