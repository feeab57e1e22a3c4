"""Our decoding engine: a key/value cache in slots under our own decoder forward.

A prompt is prefilled once for all its completions. The cache comes in two forms: for the compiled
operations, which share one copy of the prompt's keys, and in plain torch, where each slot has its own.
Shapes: B running slots, P prompt tokens, S completion tokens, K key/value heads, E head width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from covey.models.compiled import UNCAPPED, UNLIMITED
from covey.models.forward import Attend, Decoder
from covey.models.kernels.calls import NEIGHBOURS, call, key_columns
from covey.models.kernels.replay import Recording
from covey.models.live_memory import alive_bytes
from covey.models.ops import Heads, capped_attention
from covey.models.packing import Packed, pack
from covey.models.policy import Policy
from covey.sampling.compaction import Compaction
from covey.sampling.graphs import GraphStep, Step, cuda_recorder
from covey.system.device import device_memory

PREFILL_TOKENS = 4_096
"""Prompt tokens that go through the model at once; with more, the memory of their temporary results grows."""
MIN_SAVED = 32
"""Fewest tokens saved for which the beginning that prompts share is computed only once."""
KEPT_FRACTION = 1 / 16
"""Part of a device's memory that a cache may keep between rollouts, so that steps are recorded once."""
ROUNDING = 64
"""Cache lengths are multiples of this, so that vectors may read past the last token and kernels find
aligned rows."""


class CacheEngine:
    """Logits for completions in slots."""

    def __init__(self, policy: Policy, prompts: Sequence[np.ndarray], slots: int, max_tokens: int) -> None:
        assert policy.decoder is not None, "the modules engine serves all other architectures"
        self.policy = policy
        self.decoder = policy.decoder
        self.prompts = prompts
        self.slots = slots
        kind = _CompiledCache if policy.decoder.ops.compiled else _TorchCache
        longest = longest_of(prompts)
        self.room = (slots, longest + max_tokens)
        """Slots of the cache, and tokens of each."""
        # One page more than slots: the last prompt may still wait for its other completions to start.
        pages = min(slots, len(prompts)) + 1
        self.cache = kind(policy.decoder, slots, pages, longest, max_tokens)
        # The step holds the cache's buffers and no reference to this engine (see ``_step``).
        self.step: Step = _step(policy, policy.decoder, self.cache)
        if policy.device.type == "cuda":
            recorder = cuda_recorder(policy.device)
            self.step = GraphStep(
                self.step, recorder, slots, cache_length(longest + max_tokens), policy.device
            )
        # One entry per running slot: the number of its request, and how many tokens its cache holds.
        self.owners: list[int] = []
        self.lengths: list[int] = []
        # First logits (V,) of prompts that still have completions to start.
        self.logits: dict[int, Tensor] = {}
        self.on_layer: Callable[[], None] = lambda: None
        """Called before each layer of a prefill, which may take long; it may raise to stop."""

    @property
    def memory(self) -> int:
        """Bytes of the cache, and of the weights packed for the compiled operations."""
        # ``alive_bytes`` counts each storage once, so tensors that are views of others cost nothing.
        stores = [v for v in vars(self.cache).values() if isinstance(v, Tensor)]
        packed_weights = [linear.packed for linear in self.decoder.linears]
        return alive_bytes((*stores, *packed_weights))

    @property
    def worth_keeping(self) -> bool:
        """Whether it should serve the next rollout: it has recorded steps and is small for the device."""
        if not isinstance(self.step, GraphStep):
            return False
        return self.memory <= device_memory(self.policy.device) * KEPT_FRACTION

    def restart(self, prompts: Sequence[np.ndarray], slots: int, max_tokens: int) -> bool:
        """Serve other prompts from the same cache, by the recorded steps. False if they do not fit in."""
        if slots > self.room[0] or longest_of(prompts) + max_tokens > self.room[1]:
            return False
        self.prompts = prompts
        self.slots = slots
        self.owners = []
        self.lengths = []
        self.logits = {}
        self._forget_prompts()
        return True

    def free_slots(self, running: int) -> int:
        """Return how many completions may be admitted now."""
        return self.slots - running

    def admit(self, requests: Sequence[int]) -> Tensor:
        """Start one completion of each request in the next slots. Return the first logits (n, V)."""
        # A request occurs once per completion, next to its siblings; its prompt is prefilled once.
        requests = list(self._first_of_equals(requests))
        new_requests = [r for r in dict.fromkeys(requests) if r not in self.logits]
        for chunk in self._chunks(new_requests):
            self._prefill(chunk)
        self.cache.start(len(self.owners), requests)
        self.owners += requests
        self.lengths += [len(self.prompts[r]) for r in requests]
        first_logits = torch.stack([self.logits[r] for r in requests])
        # Requests come in order: only the last one may still have completions waiting.
        self.logits = {requests[-1]: self.logits[requests[-1]]}
        self._forget_prompts()
        return first_logits

    def _first_of_equals(self, requests: Sequence[int]) -> Iterator[int]:
        """Yield for each request the first of the neighbours that have its prompt, which is read only once.

        An evaluation asks for sampled completions and for the greedy one by two requests.
        """
        first = next(iter(self.logits), None)
        for request in requests:
            if first is None or not np.array_equal(self.prompts[first], self.prompts[request]):
                first = request
            yield first

    def decode(self, tokens: Tensor) -> Tensor:
        """Append a token (B,) to every running slot. Return the next logits (B, V)."""
        self.lengths = [n + 1 for n in self.lengths]
        # ``checked`` refuses a length at which sampling and training would rotate by different angles.
        logits = self.step(tokens, self.decoder.rotary.checked(max(self.lengths)))
        # Only now do the lengths in the cache move on: the step itself may have run twice (``graphs``).
        self.cache.advance(len(self.owners))
        return logits

    def evict(self, compaction: Compaction) -> None:
        """Free the slots of completions that have ended."""
        if compaction.sources:
            self.cache.move(compaction.sources, compaction.targets)
        self.owners = compaction.apply(self.owners)
        self.lengths = compaction.apply(self.lengths)
        self._forget_prompts()

    def _forget_prompts(self) -> None:
        # A prompt is still read while a completion of it runs, or while one waits to start.
        self.cache.keep_prompts(Counter(self.owners).keys() | self.logits.keys())

    def _chunks(self, requests: list[int]) -> Iterator[list[int]]:
        # Whole prompts, in order; one longer than ``PREFILL_TOKENS`` gets a chunk of its own.
        chunk = list[int]()
        tokens = 0
        for r in requests:
            if chunk and tokens + len(self.prompts[r]) > PREFILL_TOKENS:
                yield chunk
                chunk = []
                tokens = 0
            chunk.append(r)
            tokens += len(self.prompts[r])
        if chunk:
            yield chunk

    def _prefill(self, requests: list[int]) -> None:
        packed, positions = packed_prompts([self.prompts[r] for r in requests])
        packed = packed.to(self.policy.device)
        rotations = self.decoder.rotary.at(packed.positions)
        ops = self.decoder.ops
        attentions = self.decoder.attentions(packed.sequences)
        # Keys and values (T, K, E) of each layer, collected by ``attend`` in the order in which layers run.
        layers: list[tuple[Tensor, Tensor]] = []

        def attend(_: int, heads: Heads, qkv: Tensor) -> Tensor:
            self.on_layer()
            q, k, v = ops.split_heads(qkv, heads, rotations[heads.rotary])
            layers.append((k, v))
            return attentions[heads.window](q, k, v, heads).flatten(1)

        hidden = self.decoder(packed.tokens, attend)
        # Only the last token of each prompt needs the head: its logits draw the first token.
        last_tokens = torch.stack([prompt_positions[-1] for prompt_positions in positions]).to(hidden.device)
        logits = self.policy.head(hidden[last_tokens])
        keys, values = (torch.stack(tensors) for tensors in zip(*layers, strict=True))
        for request, prompt_positions, first_logits in zip(requests, positions, logits, strict=True):
            tokens = prompt_positions.to(hidden.device)
            self.cache.add_prompt(request, keys[:, tokens], values[:, tokens])
            self.logits[request] = first_logits


def longest_of(prompts: Sequence[np.ndarray]) -> int:
    """Return the length of the longest prompt."""
    return max(map(len, prompts), default=0)


def packed_prompts(prompts: Sequence[np.ndarray]) -> tuple[Packed, list[Tensor]]:
    """Pack prompts, a common start only once. Return the row, and where each prompt's tokens are in it."""
    shared = common_start(prompts)
    # The shared beginning is packed as a prompt, the rest of each as a completion of it. A completion's last
    # token is never read, so each rest gets a token more.
    if shared:
        packed = pack([prompts[0][:shared]], [[np.append(p[shared:], 0) for p in prompts]])
    else:
        packed = pack(prompts, [[] for _ in prompts])
    # (start, length) of the tokens that a prompt does not share; a shared beginning is the first span.
    spans = packed.sequences.spans[1 if shared else 0 :, 2:].tolist()
    shared_positions = torch.arange(shared)
    return packed, [torch.cat((shared_positions, torch.arange(start, start + n))) for start, n in spans]


def common_start(prompts: Sequence[np.ndarray]) -> int:
    """Count the tokens that all prompts begin with, such as a system prompt; 0 if few would be saved.

    >>> common_start([np.arange(40), np.arange(50)]), common_start([np.arange(9), np.arange(9)])
    (39, 0)
    """
    # At least one token of each prompt is not shared, for its last logits.
    limit = min(map(len, prompts)) - 1
    # (limit,) bool: the prompts differ from the first False on.
    agrees = np.logical_and.reduce([p[:limit] == prompts[0][:limit] for p in prompts])
    count = limit if agrees.all() else int(agrees.argmin())
    saved = count * (len(prompts) - 1)  # tokens, as the beginning is computed once and not once a prompt
    return count if saved >= MIN_SAVED else 0


def cache_length(count: int) -> int:
    """Return the length of a cache for ``count`` tokens."""
    # Negating twice makes the floor division round up.
    return -(-count // ROUNDING) * ROUNDING


def _step(policy: Policy, decoder: Decoder, cache: _TorchCache | _CompiledCache) -> Step:
    # No method of the engine: it would keep the engine, and so its cache, alive until garbage collection.
    if isinstance(cache, _CompiledCache) and decoder.all_compiled and not decoder.hooked:
        # All operations after the embedding are ours, so the step is recorded once and then repeated from C.
        layers_and_head = Recording(
            lambda x: policy.head(decoder.through_layers(x, cache.attention(len(x), 0)))
        )
        return lambda tokens, _: layers_and_head(decoder.embedded(tokens))
    return lambda tokens, kv_length: policy.head(decoder(tokens, cache.attention(len(tokens), kv_length)))


class _TorchCache:
    """Keys and values (layers, slots, P + S, K, E), each slot with its own copy of the prompt.

    ``_CompiledCache`` has the same methods.
    """

    def __init__(self, decoder: Decoder, slots: int, _pages: int, longest: int, max_tokens: int) -> None:
        heads = decoder.heads
        weight = decoder.embed.weight
        kv_length = cache_length(longest + max_tokens)
        shape = (len(decoder.layers), slots, kv_length, heads.keys, heads.width)
        # Zeros, not empty: a masked position weighs 0, and 0 times a stray NaN would be NaN.
        self.keys = weight.new_zeros(shape)
        self.values = weight.new_zeros(shape)
        # Tokens in each slot, prompt included; on the device, because a CUDA graph reads it there.
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=weight.device)
        self.rows = torch.arange(slots, device=weight.device)
        self.positions = torch.arange(kv_length, device=weight.device)
        self.ops = decoder.ops
        self.tables = decoder.rotary.at(self.lengths, longest + max_tokens)
        # Per request the keys and values (layers, P, K, E).
        self.prompts: dict[int, tuple[Tensor, Tensor]] = {}

    def add_prompt(self, request: int, keys: Tensor, values: Tensor) -> None:
        """Store a prompt's keys and values, (layers, P, K, E) each."""
        self.prompts[request] = (keys, values)

    def start(self, first: int, requests: Sequence[int]) -> None:
        """Start completions of stored prompts in the slots from ``first`` on; siblings are neighbours."""
        for request, siblings in groupby(requests):
            keys, values = self.prompts[request]
            slots = slice(first, first + len(list(siblings)))
            length = keys.shape[1]
            # (layers, P, K, E) into positions 0 to P of every sibling's slot.
            self.keys[:, slots, :length] = keys[:, None]
            self.values[:, slots, :length] = values[:, None]
            self.lengths[slots] = length
            first = slots.stop

    def attention(self, rows: int, kv_length: int) -> Attend:
        """Return the attention of a step: it writes each slot's new token and reads ``kv_length`` positions.

        Lengths stay as they are until ``advance``, so that a step can be repeated.
        """
        slots = self.rows[:rows]
        position = self.lengths[:rows]
        columns = self.positions[:kv_length]
        # (rows, 1, 1, kv_length): true up to the new token itself, which is written before it is read.
        filled = (columns <= position[:, None])[:, None, None]
        # Each row turns by its own position: slots are at different lengths.
        rotations = {name: table._replace(positions=position) for name, table in self.tables.items()}

        def attend(layer: int, heads: Heads, qkv: Tensor) -> Tensor:
            q, k, v = self.ops.split_heads(qkv, heads, rotations[heads.rotary])
            visible = filled
            if heads.window is not None:
                visible = filled & (position[:, None] - columns < heads.window)[:, None, None]
            keys = self.keys[layer]
            values = self.values[layer]
            # (slots, kv_length, K, E) of this layer; the assignment writes into the cache in place.
            keys[slots, position] = k
            values[slots, position] = v
            queries = q.unflatten(1, (heads.keys, -1))  # the queries of a key head, as rows
            keys, values = (x[:rows, :kv_length].transpose(1, 2) for x in (keys, values))
            if heads.cap is not None:
                return capped_attention(queries, keys, values, visible, heads).flatten(1)
            mixed = F.scaled_dot_product_attention(queries, keys, values, visible, scale=heads.factor)
            return mixed.flatten(1)

        return attend

    def advance(self, rows: int) -> None:
        self.lengths[:rows] += 1

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        lengths = self.lengths[sources]
        # Only the positions in use are copied; those after them are masked.
        longest = int(lengths.max())
        for store in (self.keys, self.values):
            store[:, targets, :longest] = store[:, sources, :longest]
        self.lengths[targets] = lengths

    def keep_prompts(self, requests: set[int]) -> None:
        self.prompts = {r: p for r, p in self.prompts.items() if r in requests}


class _CompiledCache:
    """The layout of the compiled operation: prompts once for all their completions, keys as columns of 16.

    A completion's keys are in two blocks, its prompt's and its own, and the operation attends over both:

        prompt_keys        (layers, pages, K, P / 16, E, 16)  page = one prompt, shared by its completions
        prompt_values      (layers, pages, K, P, E)
        completion_keys    (layers, slots, K, S / 16, E, 16)  slot = one running completion
        completion_values  (layers, slots, K, S, E)
        metadata           (3, slots)                         page, prompt length, tokens so far

    Sixteen neighbouring keys are transposed: their scores are then one vector, sum_e q_e k[e, p:p+16], and
    the values' rows add up as vectors too. P and S are rounded up, so that the last vectors may read on.
    """

    def __init__(self, decoder: Decoder, slots: int, pages: int, longest: int, max_tokens: int) -> None:
        heads = decoder.heads
        weight = decoder.embed.weight
        p = cache_length(max(longest, 1))
        s = cache_length(max_tokens)
        layers = len(decoder.layers)
        k = heads.keys
        e = heads.width
        # Float32 whatever the model's dtype: converting at every read costs more than the memory. Nothing is
        # set to zero, because the keys after the last token are read but weigh nothing.
        self.prompt_keys = torch.empty(layers, pages, k, p // NEIGHBOURS, e, NEIGHBOURS)
        self.prompt_values = torch.empty(layers, pages, k, p, e)
        self.completion_keys = torch.empty(layers, slots, k, s // NEIGHBOURS, e, NEIGHBOURS)
        self.completion_values = torch.empty(layers, slots, k, s, e)
        stores = (self.prompt_keys, self.prompt_values, self.completion_keys, self.completion_values)
        self.layers = list(zip(*stores, strict=True))
        self.metadata = torch.zeros(3, slots, dtype=torch.int64)
        self.page, self.prompt_length, self.length = self.metadata
        self.tables = decoder.rotary.at(self.page, length=longest + max_tokens)
        self.sizes = (p, s)
        self.dtype = weight.dtype
        self.prompts: dict[int, tuple[int, int]] = {}
        """Page and length of each stored prompt."""
        self.free_pages = list(range(pages))

    def add_prompt(self, request: int, keys: Tensor, values: Tensor) -> None:
        page = self.free_pages.pop()
        length = keys.shape[1]
        self.prompts[request] = (page, length)
        for layer_keys, store in zip(keys, self.prompt_keys, strict=True):
            # (K, P / 16, E, 16): the transposed blocks of 16 keys described above.
            columns = key_columns(layer_keys)
            store[page, :, : columns.shape[1]] = columns
        self.prompt_values[:, page, :, :length] = values.transpose(1, 2)

    def start(self, first: int, requests: Sequence[int]) -> None:
        pages_and_lengths = torch.tensor([self.prompts[r] for r in requests]).t()
        slots = slice(first, first + len(requests))
        # Rows 0 and 1 are page and prompt length; a new completion has no tokens of its own yet.
        self.metadata[:2, slots] = pages_and_lengths
        self.length[slots] = 0

    def attention(self, rows: int, _kv_length: int) -> Attend:
        def attend(layer: int, heads: Heads, qkv: Tensor) -> Tensor:
            out = qkv.new_empty(rows, heads.queries * heads.width)
            # One call does all of it: norms of queries and keys, rotation, write into the cache, attention.
            norms = [n.weight if n else None for n in (heads.query_norm, heads.key_norm)]
            slot = (self.page, self.prompt_length, self.length)
            sizes = (rows, heads.queries, heads.keys, heads.width, *self.sizes, heads.window or UNLIMITED)
            cos, sin, _ = self.tables[heads.rotary]
            inputs = (qkv, *norms, *heads.norm_constants, cos, sin, *slot, *self.layers[layer])
            call("decode_attend", *inputs, heads.factor, heads.cap or UNCAPPED, out, *sizes, dtype=self.dtype)
            return out

        return attend

    def advance(self, rows: int) -> None:
        self.length[:rows] += 1

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        longest = int(self.length[sources].max())
        # Keys are moved by whole blocks of 16, rounded up.
        blocks = -(-longest // NEIGHBOURS)
        keys = self.completion_keys[..., :blocks, :, :]
        values = self.completion_values[..., :longest, :]
        for store in (keys, values, self.metadata):
            store[:, targets] = store[:, sources]

    def keep_prompts(self, requests: set[int]) -> None:
        for request in [r for r in self.prompts if r not in requests]:
            self.free_pages.append(self.prompts.pop(request)[0])
