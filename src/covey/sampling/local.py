"""The local sampler: our own generation loop on the policy's own parameters.

A waiting completion is admitted when a slot is free. Running completions gain a token per step. A completion
that ends is evicted at once: the last slot moves into its slot. So running slots stay contiguous, and slot b
of an engine is row b of every tensor. An engine computes logits: ours (``cache``) for the architectures that
``models.forward`` knows, the Hugging Face modules (``modules``) for all others.

Shapes: B running completions, V vocabulary.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from covey.errors import OutOfRoom, out_of_memory
from covey.models.kernels.calls import threads_lent
from covey.models.logprobs import exclude_unknown
from covey.models.policy import Policy, copy_trained
from covey.rng import uniforms_of
from covey.sampling.base import Request, SampledCompletion, SamplerMonitor, SamplingParams, Weights
from covey.sampling.cache import CacheEngine
from covey.sampling.compaction import Compaction
from covey.sampling.draw import GREEDY, draw
from covey.sampling.modules import ModulesEngine, check_sampling
from covey.sampling.stops import has_stop, tail_length
from covey.system.fault_injection import Faults
from covey.types import Completion, Provenance, SamplingMask

Engine = CacheEngine | ModulesEngine
Owner = tuple[int, int]
"""The number of a request, and the number of a completion of it."""


class LocalSampler:
    """Samples in this process: from the policy that is trained, or from a snapshot of it.

    A snapshot changes between two tokens only: completions under way then continue from their tokens under
    the new weights, keys and values computed anew, so that each token is drawn from exactly one version.
    Out of memory halves how many completions run at once, from then on.
    """

    samples_on_every_rank = True

    def __init__(
        self,
        policy: Policy,
        max_running: int = 256,
        faults: Faults | None = None,
        monitor: SamplerMonitor | None = None,
        from_snapshot: bool = False,
    ) -> None:
        self.policy = policy
        self.from_snapshot = from_snapshot
        self.max_running = max_running
        self.faults = faults or Faults()
        self.monitor = monitor or SamplerMonitor()
        self.version = 0
        self._reusable = deque[CacheEngine](maxlen=1)
        """The engine of the last rollout, if its recorded steps can serve the next one."""
        self.most_memory = 0
        """Most bytes that sampling has taken."""
        # ``_weights`` is held while a token is drawn, or while the snapshot changes. Locks are not fair, and
        # sampling takes it again at once: ``_sync_gate`` lets ``sync`` in between two tokens, as
        # ``_weights_locked`` explains.
        self._sync_gate = threading.Lock()
        self._weights = threading.Lock()
        self._checked = policy.decoder is not None
        """Whether the engine is known to be correct for this architecture: ours is, the modules are tried."""

    @property
    def bit_exact(self) -> bool:
        """Whether log-probs are bit-exact: if the policy's are, and the policy itself is sampled from."""
        return self.policy.bit_exact and not self.from_snapshot

    def sync(self, weights: Weights) -> None:
        """Follow new weights. Without a snapshot nothing is copied: the trained tensors are sampled from."""
        if not self.from_snapshot:
            self.version = weights.version
            return
        with self._sync_gate, self._weights:
            copy_trained(weights.network.unsharded, self.policy)
            self.version = weights.version

    @contextmanager
    def _weights_locked(self) -> Iterator[None]:
        """Keep the weights from changing inside the block."""
        # A thread that waits to change the weights holds the gate, so it comes before the next token.
        with self._sync_gate:
            pass
        with self._weights:
            yield

    def check(self) -> None:
        """Raise ConfigError for an architecture that cannot be sampled from."""
        if not self._checked:
            with self._weights_locked():
                check_sampling(self.policy)
            self._checked = True

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        """Yield completions as they end, in no particular order.

        Those that were running when memory ran out start again: draws are keyed, so they get the same
        tokens. Raises OutOfRoom where a single one does not fit, ConfigError for an architecture that
        cannot be sampled from.
        """
        self.check()
        # A dict as an ordered set: removal is O(1), and a retry keeps the order of requests.
        unfinished = dict.fromkeys(
            (r, s) for r, request in enumerate(requests) for s in range(len(request.streams))
        )
        # Completions that new weights interrupted, with their tokens under the old weights.
        partials: dict[Owner, _PartialCompletion] = {}
        while unfinished:
            out_of_space = False
            try:
                for sampled in self._pass(requests, params, list(unfinished), partials):
                    owner = (sampled.request, sampled.sample)
                    del unfinished[owner]
                    partials.pop(owner, None)
                    yield sampled
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                out_of_space = True
            # Outside the handler, where the traceback no longer holds the tensors.
            if out_of_space and unfinished:
                # No more than the unfinished ones can have run at once, so half of these is a smaller number.
                self._halve(min(self.max_running, len(unfinished)))

    def _halve(self, running: int) -> None:
        if running == 1:
            raise OutOfRoom(
                "out of memory while sampling, even with one completion at a time. Lower "
                "rollout.max_tokens, drop the longest prompts, or use a smaller model"
            )
        self.max_running = running // 2
        torch.cuda.empty_cache()
        self.monitor.fewer_running(self.max_running)

    def _pass(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        unfinished: Sequence[Owner],
        partials: dict[Owner, _PartialCompletion],
    ) -> Iterator[SampledCompletion]:
        """Complete the unfinished. If new weights end the pass early, ``partials`` has the tokens so far."""
        # Interrupted ones first: they are the oldest.
        waiting = deque([*partials, *(owner for owner in unfinished if owner not in partials)])
        slots = min(self.max_running, len(waiting))
        version = self.version
        running = _Running(self.policy, requests, params, slots, partials)
        engine = self._engine(running.prompts, params, slots)
        compiled = self.policy.decoder is not None and self.policy.decoder.all_compiled
        tokens_drawn = 0
        most_tokens = sum(requests[r].limit(params) for r, _ in waiting)
        while waiting or running.owners:
            self.monitor.tokens_drawn(tokens_drawn, most_tokens - tokens_drawn)
            self.faults.in_memory("memory.sampling")
            with self._weights_locked(), torch.no_grad(), threads_lent(compiled):
                # Weights changed between two tokens; the caller starts another pass with a new cache.
                if self.version != version:
                    partials |= running.partial_completions()
                    break
                count = min(engine.free_slots(running.count), len(waiting))
                running.step(engine, [waiting.popleft() for _ in range(count)], version)
                tokens_drawn += running.count
                finished = running.pop_finished(engine, by_token=self.from_snapshot)
                if finished:
                    self.most_memory = max(self.most_memory, engine.memory)
            most_tokens -= sum(requests[s.request].limit(params) - s.completion.length for s in finished)
            # Outside of the lock: the consumer may take long, or may be what changes the weights.
            yield from finished
        if isinstance(engine, CacheEngine) and engine.worth_keeping:
            self._reusable.append(engine)

    def _engine(self, prompts: Sequence[np.ndarray], params: SamplingParams, slots: int) -> Engine:
        if self.policy.decoder is None:
            return ModulesEngine(self.policy, prompts, slots, params.max_tokens)
        engine = self._restart_engine(prompts, params, slots)
        if engine is None:
            engine = CacheEngine(self.policy, prompts, slots, params.max_tokens)
        engine.on_layer = partial(self.monitor.tokens_drawn, 0, 0)
        return engine

    def _restart_engine(
        self, prompts: Sequence[np.ndarray], params: SamplingParams, slots: int
    ) -> CacheEngine | None:
        """Return the last rollout's engine for other prompts, or None. One that is too small is freed."""
        try:
            # Removed, because another thread's rollout may begin before this one ends.
            engine = self._reusable.pop()
        except IndexError:
            return None
        return engine if engine.restart(prompts, slots, params.max_tokens) else None


class _PartialCompletion(NamedTuple):
    """A completion under way: one value per token, and the ids that could be drawn."""

    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    drawable: list[np.ndarray]


@dataclass(frozen=True)
class SlotTensors:
    """The running completions on the device: row b belongs to slot b, column t to token t."""

    tokens: Tensor
    """(slots, max_tokens) int64, as ``versions``."""
    logprobs: Tensor
    """(slots, max_tokens) float32, as ``uniforms``."""
    versions: Tensor
    uniforms: Tensor
    """The number with which each token is drawn."""
    lengths: Tensor
    """(slots,) int64, as ``limits`` and ``latest``: tokens so far, most tokens, latest token."""
    limits: Tensor
    latest: Tensor

    @classmethod
    def empty(cls, slots: int, max_tokens: int, device: torch.device) -> SlotTensors:
        """Return the tensors of slots without completions."""
        shape = (slots, max_tokens)
        floats = partial(torch.zeros, device=device)
        integers = partial(floats, dtype=torch.int64)
        return cls(
            tokens=integers(shape),
            logprobs=floats(shape),
            versions=integers(shape),
            uniforms=floats(shape),
            lengths=integers(slots),
            limits=integers(slots),
            latest=integers(slots),
        )

    def evict(self, compaction: Compaction) -> None:
        """Move the last slots into those of completions that have ended."""
        if compaction.sources:
            for rows in vars(self).values():
                rows[compaction.targets] = rows[compaction.sources]


class _Running:
    """The completions that are being sampled."""

    def __init__(
        self,
        policy: Policy,
        requests: Sequence[Request],
        params: SamplingParams,
        slots: int,
        partials: Mapping[Owner, _PartialCompletion],
    ) -> None:
        """``partials``: completions that new weights interrupted, which continue."""
        self.policy = policy
        self.requests = requests
        self.params = params
        self.partials = partials
        # An interrupted completion gets another prompt, listed after the requests' prompts. It ends with the
        # completion's tokens, which are prefilled under the new weights.
        self.prompts = [request.prompt for request in requests]
        self.extended_prompts = {owner: len(requests) + n for n, owner in enumerate(partials)}
        for (request, _), completion in partials.items():
            tokens = completion.tokens.cpu().numpy()
            self.prompts.append(np.concatenate([requests[request].prompt, tokens]))
        # All on the device, so that a step needs no transfer; the host waits only in ``_ended_slots``.
        self.slots = SlotTensors.empty(slots, params.max_tokens, policy.device)
        self.owners: list[Owner] = []
        self.starts = params.max_tokens * torch.arange(slots, device=policy.device)
        """(slots,) index of each slot's first token in the flattened (slots, max_tokens) tensors."""
        self.end_ids = torch.tensor(params.ends_of(policy), device=policy.device)
        self.drawable: list[list[np.ndarray]] = []
        """The ids that could be drawn, for each slot and token; empty lists where all could."""
        self.latest_drawable: Tensor | None = None
        """(B, V) bool: the same for the latest token, not yet copied to the host."""

    @property
    def count(self) -> int:
        return len(self.owners)

    def step(self, engine: Engine, admitted: Sequence[Owner], version: int) -> None:
        """Draw the next token of every running completion, and the first token of each admitted one."""
        # New slots come after the running ones, so concatenating keeps slot b in row b.
        logits = [engine.decode(self.slots.latest[: self.count])] if self.owners else []
        if admitted:
            self._admit(admitted)
            logits.append(engine.admit([self.extended_prompts.get(owner, owner[0]) for owner in admitted]))
        self._draw(torch.cat(logits), version)

    def pop_finished(self, engine: Engine, by_token: bool) -> list[SampledCompletion]:
        """Return the completions that ended with the latest token, and free their slots."""
        ended = self._ended_slots()
        completions = self._make_completions(ended, by_token) if ended else []
        if ended:
            compaction = Compaction.after(ended, self.count)
            self.slots.evict(compaction)
            self.owners = compaction.apply(self.owners)
            self.drawable = compaction.apply(self.drawable)
            engine.evict(compaction)
        return completions

    def _admit(self, owners: Sequence[Owner]) -> None:
        """Give completions the next slots; interrupted ones have tokens already."""
        rows = slice(self.count, self.count + len(owners))
        own_requests = [self.requests[r] for r, _ in owners]
        streams = [request.streams[s] for request, (_, s) in zip(own_requests, owners, strict=True)]
        # (n, max_tokens): uniform t of each stream; a completion that began elsewhere starts at a later t.
        first_draws = [request.prefix_tokens for request in own_requests]
        draws = uniforms_of(streams, self.params.max_tokens, first_draws)
        draws[[request.greedy for request in own_requests]] = GREEDY
        self.slots.uniforms[rows] = torch.from_numpy(draws)
        self.slots.limits[rows] = torch.tensor([request.limit(self.params) for request in own_requests])
        self.slots.lengths[rows] = 0
        for slot, owner in enumerate(owners, start=self.count):
            completion = self.partials.get(owner)
            if completion is None:
                self.drawable.append([])
                continue
            self.slots.lengths[slot] = length = len(completion.tokens)
            self.slots.tokens[slot, :length] = completion.tokens
            self.slots.logprobs[slot, :length] = completion.logprobs
            self.slots.versions[slot, :length] = completion.versions
            self.drawable.append(list(completion.drawable))
        self.owners += owners

    def partial_completions(self) -> dict[Owner, _PartialCompletion]:
        """Return copies of the tokens drawn for each running completion."""
        copies = {}
        for slot, (owner, length) in enumerate(zip(self.owners, self.slots.lengths.tolist(), strict=False)):
            part = (slot, slice(length))
            copies[owner] = _PartialCompletion(
                self.slots.tokens[part].clone(),
                self.slots.logprobs[part].clone(),
                self.slots.versions[part].clone(),
                self.drawable[slot],
            )
        return copies

    def _draw(self, logits: Tensor, version: int) -> None:
        # (B,) where each slot's next token lies in the flattened tensors: one indexed write for all rows.
        index = self.starts[: self.count] + self.slots.lengths[: self.count]
        logits = exclude_unknown(logits, self.policy.drawable_ids)
        tokens, logprobs, drawable = draw(logits, self.slots.uniforms.view(-1)[index], self.params)
        self.slots.tokens.view(-1)[index] = tokens
        self.slots.logprobs.view(-1)[index] = logprobs
        self.slots.versions.view(-1)[index] = version
        self.slots.lengths[: self.count] += 1
        self.slots.latest[: self.count] = tokens
        self.latest_drawable = drawable

    def _ended_slots(self) -> dict[int, Literal["stop", "length"]]:
        """Return the slots that ended with the latest token, and why. Here the host waits for the device."""
        if self.latest_drawable is not None:
            # nonzero lists the ids row by row; the running sum of their counts is where each row ends.
            ids = self.latest_drawable.nonzero()[:, 1].int().cpu().numpy()
            ends = self.latest_drawable.sum(-1).cumsum(-1).tolist()
            for slot, slot_ids in enumerate(np.split(ids, ends[:-1])):
                self.drawable[slot].append(slot_ids)
        stopped = torch.isin(self.slots.latest[: self.count], self.end_ids)
        if self.params.stop:
            by_string = [self._has_stop_string(slot) for slot in range(self.count)]
            stopped |= torch.tensor(by_string, device=stopped.device)
        reached_limit = self.slots.lengths[: self.count] == self.slots.limits[: self.count]
        # One that stops with its last token has stopped: "stop" comes before "length".
        slots = (stopped | reached_limit).nonzero()[:, 0]
        return {
            slot: "stop" if stop else "length"
            for slot, stop in zip(slots.tolist(), stopped[slots].tolist(), strict=True)
        }

    def _has_stop_string(self, slot: int) -> bool:
        stop = self.params.stop
        tail = self.slots.tokens[slot, : self.slots.lengths[slot]][-tail_length(stop) :]
        # With padding at the end, which no completion shows: a stop string may be the name of that token.
        return has_stop(self.policy.decode.text_with_specials, tail.tolist(), stop)

    def _make_completions(
        self, ended: Mapping[int, Literal["stop", "length"]], by_token: bool
    ) -> list[SampledCompletion]:
        """Return the completions in these slots; with the version of each token if ``by_token``."""
        slots = list(ended)
        results = list[SampledCompletion]()
        # One transfer for all that ended; ``copy`` below frees completions from the whole array.
        arrays = [
            rows[slots].cpu().numpy()
            for rows in (self.slots.tokens, self.slots.logprobs, self.slots.versions)
        ]
        for row, length in enumerate(self.slots.lengths[slots].tolist()):
            slot = slots[row]
            tokens, logprobs, versions = (rows[row, :length].copy() for rows in arrays)
            text = self.policy.decode(tokens.tolist())
            mask = SamplingMask.of(self.drawable[slot]) if self.params.truncates else None
            # ``version`` is the version of the first token, the oldest.
            provenance = Provenance(int(versions[0]), versions if by_token else None)
            completion = Completion(tokens, logprobs, text, ended[slot], provenance, sampling_mask=mask)
            results.append(SampledCompletion(*self.owners[slot], completion))
        return results
