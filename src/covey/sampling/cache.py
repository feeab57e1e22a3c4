"""Our decoding engine: a key/value cache in slots under our own decoder forward.

A prompt is prefilled once for all its completions. The cache comes in two forms: for the compiled
operations, which read the prompt's keys where they lie, and in plain torch, where each slot has a copy.
Shapes: B running slots, P prompt tokens, S own tokens, K key/value heads, E head width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from covey.kernels.calls import call
from covey.models.forward import Attend, Decoder
from covey.models.ops import Heads
from covey.models.packing import pack
from covey.models.policy import Policy
from covey.sampling.base import Moves
from covey.sampling.graphs import Replayed, Step, cuda_recorder

PREFILL_TOKENS = 16_384
"""Prompt tokens that go through the model at once."""
ROUNDING = 64
"""Cache lengths are multiples of this, so that vectors may read past the last token and kernels find
aligned rows."""


class CacheEngine:
    """Logits for completions in slots."""

    def __init__(self, policy: Policy, prompts: Sequence[np.ndarray], slots: int, max_tokens: int) -> None:
        assert policy.decoder is not None, "the modules engine serves architectures we do not know"
        self.policy, self.decoder, self.prompts, self.slots = policy, policy.decoder, prompts, slots
        kind = _CompiledCache if policy.decoder.ops.exact else _TorchCache
        longest = max(map(len, prompts), default=0)
        self.cache: _Cache = kind(policy.decoder, slots, longest, max_tokens)
        self.step: Step = _step(policy, policy.decoder, self.cache)
        if policy.device.type == "cuda":
            recorder = cuda_recorder(policy.device)
            self.step = Replayed(self.step, recorder, slots, _rounded(longest + max_tokens), policy.device)
        self.owners: list[int] = []
        self.lengths: list[int] = []
        self.logits: dict[int, Tensor] = {}

    def room(self, running: int) -> int:
        """Free slots."""
        return self.slots - running

    def join(self, requests: Sequence[int]) -> Tensor:
        """Start a completion of each request in the next slots. -> first logits (n, V)."""
        new = [r for r in dict.fromkeys(requests) if r not in self.logits]
        for chunk in self._chunks(new):
            self._prefill(chunk)
        for r in requests:
            self.cache.start(len(self.owners), r)
            self.owners.append(r)
            self.lengths.append(len(self.prompts[r]))
        first = torch.stack([self.logits[r] for r in requests])
        # Requests come in order: only the last one may still have completions waiting.
        self.logits = {requests[-1]: self.logits[requests[-1]]}
        self._forget()
        return first

    def decode(self, tokens: Tensor) -> Tensor:
        """Append a token (B,) to every running slot. -> next logits (B, V)."""
        self.lengths = [n + 1 for n in self.lengths]
        logits = self.step(tokens, max(self.lengths))
        self.cache.grow(len(self.owners))
        return logits

    def leave(self, moves: Moves) -> None:
        """Free the slots of completions that have ended."""
        if moves.sources:
            self.cache.move(moves.sources, moves.targets)
        self.owners, self.lengths = moves.of(self.owners), moves.of(self.lengths)
        self._forget()

    def _forget(self) -> None:
        self.cache.keep(Counter(self.owners).keys() | self.logits.keys())

    def _chunks(self, requests: list[int]) -> Iterator[list[int]]:
        chunk, tokens = list[int](), 0
        for r in requests:
            if chunk and tokens + len(self.prompts[r]) > PREFILL_TOKENS:
                yield chunk
                chunk, tokens = [], 0
            chunk.append(r)
            tokens += len(self.prompts[r])
        if chunk:
            yield chunk

    def _prefill(self, requests: list[int]) -> None:
        prompts = [self.prompts[r] for r in requests]
        packed = pack(prompts, [[] for _ in prompts]).to(self.policy.device)
        rotation, ops = self.decoder.rotation(packed.positions), self.decoder.ops
        attention = ops.attention(packed.sequences)
        kept: list[tuple[Tensor, Tensor]] = []

        def attend(_: int, heads: Heads, qkv: Tensor) -> Tensor:
            q, k, v = ops.split_heads(qkv, heads, rotation)
            kept.append((k, v))
            return attention(q, k, v).flatten(1)

        hidden = self.decoder(packed.tokens, attend)
        ends = np.cumsum([len(p) for p in prompts])
        logits = self.policy.head(hidden[torch.from_numpy(ends - 1).to(hidden.device)])
        for r, prompt, end, first in zip(requests, prompts, ends, logits, strict=True):
            span = slice(end - len(prompt), end)
            self.cache.place(r, [(k[span], v[span]) for k, v in kept])
            self.logits[r] = first


def _rounded(count: int) -> int:
    return -(-count // ROUNDING) * ROUNDING


def _step(policy: Policy, decoder: Decoder, cache: _Cache) -> Step:
    # A function of the engine would hold the engine, and so its cache, until the garbage is collected.
    return lambda tokens, reach: policy.head(decoder(tokens, cache.step(len(tokens), reach)))


class _Cache(Protocol):
    def place(self, request: int, layers: list[tuple[Tensor, Tensor]]) -> None:
        """Take a prompt's keys and values, (P, K, E) each per layer."""
        ...

    def start(self, slot: int, request: int) -> None:
        """A completion of a placed prompt begins in a slot."""
        ...

    def step(self, rows: int, reach: int) -> Attend:
        """Attention of a new token in each of the first slots, over at most ``reach`` positions."""
        ...

    def grow(self, rows: int) -> None:
        """The first slots are a token longer."""
        ...

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Completions change their slots."""
        ...

    def keep(self, requests: set[int]) -> None:
        """Forget all other prompts."""
        ...


class _TorchCache:
    """Keys and values (layers, slots, P + S, K, E), each slot with its own copy of the prompt."""

    def __init__(self, decoder: Decoder, slots: int, longest: int, max_tokens: int) -> None:
        heads, weight = decoder.layers[0].heads, decoder.embed.weight
        reach = _rounded(longest + max_tokens)
        shape = (len(decoder.layers), slots, reach, heads.keys, heads.width)
        # Zeros, not empty: a masked position weighs 0, and 0 times a stray NaN would be NaN.
        self.keys, self.values = weight.new_zeros(shape), weight.new_zeros(shape)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=weight.device)
        self.rows = torch.arange(slots, device=weight.device)
        self.span = torch.arange(reach, device=weight.device)
        self.ops, self.tables = decoder.ops, decoder.rotation(self.lengths, reach)
        self.prompts: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def place(self, request: int, layers: list[tuple[Tensor, Tensor]]) -> None:
        self.prompts[request] = layers

    def start(self, slot: int, request: int) -> None:
        layers = self.prompts[request]
        length = len(layers[0][0])
        for i, (k, v) in enumerate(layers):
            self.keys[i, slot, :length], self.values[i, slot, :length] = k, v
        self.lengths[slot] = length

    def step(self, rows: int, reach: int) -> Attend:
        slots, position = self.rows[:rows], self.lengths[:rows]
        visible = (self.span[:reach] <= position[:, None])[:, None, None]
        rotation = self.tables._replace(positions=position)

        def attend(layer: int, heads: Heads, qkv: Tensor) -> Tensor:
            q, k, v = self.ops.split_heads(qkv, heads, rotation)
            keys, values = self.keys[layer], self.values[layer]
            keys[slots, position], values[slots, position] = k, v
            together = q.unflatten(1, (heads.keys, -1))  # the queries of a key head, as rows
            keys, values = (x[:rows, :reach].transpose(1, 2) for x in (keys, values))
            return F.scaled_dot_product_attention(together, keys, values, visible).flatten(1)

        return attend

    def grow(self, rows: int) -> None:
        self.lengths[:rows] += 1

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        lengths = self.lengths[sources]
        seen = int(lengths.max())
        for store in (self.keys, self.values):
            store[:, targets, :seen] = store[:, sources, :seen]
        self.lengths[targets] = lengths

    def keep(self, requests: set[int]) -> None:
        self.prompts = {r: p for r, p in self.prompts.items() if r in requests}


class _CompiledCache:
    """The layout of the compiled operation: keys as columns, prompts once for all their completions."""

    def __init__(self, decoder: Decoder, slots: int, longest: int, max_tokens: int) -> None:
        heads, weight = decoder.layers[0].heads, decoder.embed.weight
        p, s = _rounded(max(longest, 1)), _rounded(max_tokens)
        layers, k, e = len(decoder.layers), heads.keys, heads.width
        places = slots + 1  # one more than runs at once: the last prompt waits for its other completions
        # In float32 whatever the model's dtype: converting at every read costs more than the memory.
        self.prompt_keys = torch.zeros(layers, places, k, e, p)
        self.prompt_values = torch.zeros(layers, places, k, p, e)
        self.own_keys = torch.zeros(layers, slots, k, e, s)
        self.own_values = torch.zeros(layers, slots, k, s, e)
        self.facts = torch.zeros(3, slots, dtype=torch.int64)
        self.prompt, self.prompt_length, self.drawn = self.facts
        self.tables = decoder.rotation(self.prompt, reach=longest + max_tokens)
        self.sizes, self.scale, self.dtype = (p, s), e**-0.5, weight.dtype
        self.places: dict[int, tuple[int, int]] = {}
        self.free = list(range(places))

    def place(self, request: int, layers: list[tuple[Tensor, Tensor]]) -> None:
        at, length = self.free.pop(), len(layers[0][0])
        self.places[request] = (at, length)
        for (k, v), keys, values in zip(layers, self.prompt_keys, self.prompt_values, strict=True):
            keys[at, :, :, :length] = k.permute(1, 2, 0)
            values[at, :, :length] = v.transpose(0, 1)

    def start(self, slot: int, request: int) -> None:
        self.prompt[slot], self.prompt_length[slot] = self.places[request]
        self.drawn[slot] = 0

    def step(self, rows: int, _reach: int) -> Attend:
        def attend(layer: int, heads: Heads, qkv: Tensor) -> Tensor:
            out = qkv.new_empty(rows, heads.queries * heads.width)
            norms = [n.weight if n else None for n in (heads.query_norm, heads.key_norm)]
            eps = heads.query_norm.eps if heads.query_norm else 0.0
            who = (self.prompt, self.prompt_length, self.drawn)
            shared = (self.prompt_keys[layer], self.prompt_values[layer])
            own = (self.own_keys[layer], self.own_values[layer])
            sizes = (rows, heads.queries, heads.keys, heads.width, *self.sizes)
            inputs = (qkv, *norms, eps, self.tables.cos, self.tables.sin, *who, *shared, *own)
            call("decode_attend", *inputs, self.scale, out, *sizes, dtype=self.dtype)
            return out

        return attend

    def grow(self, rows: int) -> None:
        self.drawn[:rows] += 1

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        drawn = int(self.drawn[sources].max())
        for store in (self.own_keys[..., :drawn], self.own_values[..., :drawn, :], self.facts):
            store[:, targets] = store[:, sources]

    def keep(self, requests: set[int]) -> None:
        for request in [r for r in self.places if r not in requests]:
            self.free.append(self.places.pop(request)[0])
