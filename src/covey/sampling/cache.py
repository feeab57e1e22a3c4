"""Our decoding engine: a key/value cache in slots under our own decoder forward.

A prompt is prefilled once for all its completions. Shapes: B running slots, S cache positions,
P prompt tokens, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from covey.models.forward import PackedAttention, grouped_attention
from covey.models.packing import pack
from covey.models.policy import Policy


@dataclass(frozen=True)
class _Prefix:
    """A prefilled prompt: keys and values (layers, P, K, E), logits (V,) of the first token."""

    keys: Tensor
    values: Tensor
    logits: Tensor


class CacheEngine:
    """Slots of keys and values, (layers, slots, S, K, E), read in place."""

    def __init__(self, policy: Policy, prompts: Sequence[np.ndarray], slots: int, max_tokens: int) -> None:
        assert policy.decoder is not None, "the modules engine serves architectures we do not know"
        self.policy, self.decoder, self.prompts, self.slots = policy, policy.decoder, prompts, slots
        longest = max(map(len, prompts), default=0) + max_tokens
        weight = policy.model.get_input_embeddings().weight
        shape = (
            len(self.decoder.layers),
            slots,
            longest,
            self.decoder.kv_heads,
            self.decoder.head_dim,
        )
        # Zeros, not empty: a masked position weighs 0, and 0 times a stray NaN would be NaN.
        self.keys, self.values = weight.new_zeros(shape), weight.new_zeros(shape)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=weight.device)
        self.rows = torch.arange(slots, device=weight.device)
        self.span = torch.arange(longest, device=weight.device)
        self.count = 0
        self.prefix: tuple[int, _Prefix] | None = None

    def room(self, running: int) -> int:
        """Free slots."""
        return self.slots - running

    def join(self, requests: Sequence[int]) -> Tensor:
        """Fill the next slots with the requests' prompts. -> first logits (n, V)."""
        prefixes = self._prefill(list(dict.fromkeys(requests)))
        for r in requests:
            length = len(self.prompts[r])
            self.keys[:, self.count, :length] = prefixes[r].keys
            self.values[:, self.count, :length] = prefixes[r].values
            self.lengths[self.count] = length
            self.count += 1
        # A prompt may be split between joins only at the end: requests come in order.
        self.prefix = (requests[-1], prefixes[requests[-1]])
        return torch.stack([prefixes[r].logits for r in requests])

    def _prefill(self, requests: list[int]) -> dict[int, _Prefix]:
        known = dict([self.prefix] if self.prefix and self.prefix[0] in requests else [])
        new = [r for r in requests if r not in known]
        if not new:
            return known
        prompts = [self.prompts[r] for r in new]
        packed = pack(prompts, [[] for _ in prompts]).to(self.policy.device)
        attend = _Recording(PackedAttention(packed.blocks))
        hidden = self.decoder(packed.tokens, packed.positions, attend)
        ends = np.cumsum([len(p) for p in prompts])
        logits = self.policy.head(hidden[torch.from_numpy(ends - 1).to(hidden.device)])
        keys, values = torch.stack(attend.keys), torch.stack(attend.values)
        for r, end, first in zip(new, ends, logits, strict=True):
            span = slice(end - len(self.prompts[r]), end)
            known[r] = _Prefix(keys[:, span], values[:, span], first)
        return known

    def decode(self, tokens: Tensor) -> Tensor:
        """Append a token (B,) to every running slot. -> next logits (B, V)."""
        position = self.lengths[: self.count]
        span = int(position.max()) + 1
        visible = (self.span[:span] <= position[:, None])[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[self.rows[: self.count], position] = k
            values[self.rows[: self.count], position] = v
            seen_keys, seen_values = keys[: self.count, :span], values[: self.count, :span]
            return grouped_attention(q[:, None], seen_keys, seen_values, visible)[:, 0]

        hidden = self.decoder(tokens, position, attend)
        self.lengths[: self.count] += 1
        return self.policy.head(hidden)

    def leave(self, slot: int) -> None:
        """Free a slot: the last running one moves into it."""
        self.count -= 1
        length = int(self.lengths[self.count])
        for store in (self.keys, self.values):
            store[:, slot, :length] = store[:, self.count, :length]
        self.lengths[slot] = length


class _Recording:
    """Attention that keeps the keys and values it saw, layer by layer, each (T, K, E)."""

    def __init__(self, attend: PackedAttention) -> None:
        self.attend = attend
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        return self.attend(layer, q, k, v)
