"""The local sampler: our own generation loop on the policy's own parameters.

A waiting completion is admitted when a slot is free, running ones gain a token per step, and those that
end are evicted at once: the last slots move into the gaps, so running slots stay contiguous, and slot b of
an engine is row b of every tensor. An engine computes logits: ours (``cache``) for the shapes that
``models.forward`` knows, the Hugging Face modules (``modules``) for all others.

Shapes: B running completions, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from covey.errors import OutOfRoom, out_of_memory
from covey.fault_injection import Faults
from covey.kernels.calls import threads_lent
from covey.models.policy import Policy
from covey.rng import uniforms
from covey.sampling.base import Request, Sampled, SamplingParams, Weights
from covey.sampling.cache import CacheEngine
from covey.sampling.compaction import Compaction
from covey.sampling.draw import draw
from covey.sampling.modules import ModulesEngine
from covey.types import Completion, SamplingMask

Engine = CacheEngine | ModulesEngine


class LocalSampler:
    """Samples in this process from the policy that is trained; its weights are never stale.

    Out of memory halves how many completions run at once, from then on, and tells ``on_fewer``.
    """

    shares = True

    def __init__(
        self,
        policy: Policy,
        max_running: int = 256,
        faults: Faults | None = None,
        on_fewer: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.policy = policy
        self.max_running = max_running
        self.faults = faults or Faults()
        self.on_fewer = on_fewer
        self.version = 0
        self.most_memory = 0
        """Bytes that sampling has taken at the most."""

    @property
    def bit_exact(self) -> bool:
        """It samples from the trained policy itself: exact where that one is."""
        return self.policy.bit_exact

    def sync(self, weights: Weights) -> None:
        """Nothing to copy: it reads the very tensors that are trained."""
        self.version = weights.version

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Sampled]:
        """Yield completions as they end, in no particular order.

        Those that were running when memory ran out start again: draws are keyed, so they get the same
        tokens. Raises OutOfRoom where a single one does not fit.
        """
        unfinished = dict.fromkeys(
            (r, s) for r, request in enumerate(requests) for s in range(len(request.streams))
        )
        while unfinished:
            try:
                for sampled in self._pass(requests, params, deque(unfinished)):
                    del unfinished[sampled.request, sampled.sample]
                    yield sampled
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
            # Outside the handler, where the traceback no longer holds the tensors.
            if unfinished:
                self._halve(min(self.max_running, len(unfinished)))

    def _halve(self, running: int) -> None:
        if running == 1:
            raise OutOfRoom(
                "out of memory while sampling, even one completion at a time. Lower rollout.max_tokens, "
                "leave out the longest prompts, or take a smaller model"
            )
        self.max_running = running // 2
        torch.cuda.empty_cache()
        self.on_fewer(self.max_running)

    def _pass(
        self, requests: Sequence[Request], params: SamplingParams, waiting: deque[tuple[int, int]]
    ) -> Iterator[Sampled]:
        engine = self._engine(requests, params, min(self.max_running, len(waiting)))
        running = _Running(self.policy, params, min(self.max_running, len(waiting)))
        compiled = self.policy.decoder is not None and self.policy.decoder.all_compiled
        while waiting or running.owners:
            self.faults.in_memory("memory.sampling")
            with torch.no_grad(), threads_lent(compiled):
                logits = [engine.decode(running.last())] if running.owners else []
                count = min(engine.free_slots(running.count), len(waiting))
                admitted = [waiting.popleft() for _ in range(count)]
                for r, s in admitted:
                    running.admit((r, s), requests[r].streams[s])
                if admitted:
                    logits.append(engine.admit([r for r, _ in admitted]))
                running.draw(torch.cat(logits))
            if ended := running.ended():
                self.most_memory = max(self.most_memory, engine.memory)
                finished = [running.completed(slot, finish, self.version) for slot, finish in ended.items()]
                compaction = Compaction.after(ended, running.count)
                running.evict(compaction)
                engine.evict(compaction)
                yield from finished

    def _engine(self, requests: Sequence[Request], params: SamplingParams, slots: int) -> Engine:
        kind = ModulesEngine if self.policy.decoder is None else CacheEngine
        return kind(self.policy, [r.prompt for r in requests], slots, params.max_tokens)


class _Running:
    """What has been drawn for the running completions: row b belongs to slot b, column t to token t."""

    def __init__(self, policy: Policy, params: SamplingParams, slots: int) -> None:
        self.policy, self.params = policy, params
        shape = (slots, params.max_tokens)
        self.owners: list[tuple[int, int]] = []
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=policy.device)
        self.logprobs = torch.zeros(shape, device=policy.device)
        self.uniform = torch.zeros(shape, device=policy.device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=policy.device)
        self.slots = torch.arange(slots, device=policy.device)
        self.end_ids = torch.tensor(policy.end_ids, device=policy.device)
        self.kept: list[list[np.ndarray]] = []
        """For each slot and each of its tokens the ids that could be drawn; nothing where all could."""
        self.kept_now: Tensor | None = None
        """(B, V) bool: the same for the latest token, not yet copied to the host."""

    @property
    def count(self) -> int:
        return len(self.owners)

    def admit(self, owner: tuple[int, int], stream: int) -> None:
        self.uniform[self.count] = torch.from_numpy(uniforms(stream, self.params.max_tokens))
        self.lengths[self.count] = 0
        self.owners.append(owner)
        self.kept.append([])

    def last(self) -> Tensor:
        """(B,) the latest token of each slot."""
        rows = self.slots[: self.count]
        return self.tokens[rows, self.lengths[rows] - 1]

    def draw(self, logits: Tensor) -> None:
        rows = self.slots[: self.count]
        position = self.lengths[rows]
        drawn = draw(logits, self.uniform[rows, position], self.params)
        self.tokens[rows, position], self.logprobs[rows, position] = drawn.tokens, drawn.logprobs
        self.lengths[rows] += 1
        self.kept_now = drawn.kept

    def ended(self) -> dict[int, Literal["stop", "length"]]:
        """Slots whose completion ended with the latest token, and why. Here the host waits for the device."""
        if self.kept_now is not None:
            ids = self.kept_now.nonzero()[:, 1].int().cpu().numpy()
            ends = self.kept_now.sum(-1).cumsum(-1).tolist()
            for slot, kept in enumerate(np.split(ids, ends[:-1])):
                self.kept[slot].append(kept)
        stopped = torch.isin(self.last(), self.end_ids).tolist()
        full = (self.lengths[: self.count] == self.params.max_tokens).tolist()
        return {
            slot: "stop" if stop else "length"
            for slot in range(self.count)
            if (stop := stopped[slot] or self._stop_string(slot)) or full[slot]
        }

    def _stop_string(self, slot: int) -> bool:
        if not self.params.stop:
            return False
        most = max(map(len, self.params.stop)) + 8  # a token may hold only a part of a character
        tail = self.tokens[slot, : self.lengths[slot]][-most:]
        text = self.policy.decode(tail.tolist())
        return any(s in text for s in self.params.stop)

    def completed(self, slot: int, finish: Literal["stop", "length"], version: int) -> Sampled:
        """The completion in a slot."""
        length = int(self.lengths[slot])
        tokens = self.tokens[slot, :length].cpu().numpy().copy()
        logprobs = self.logprobs[slot, :length].cpu().numpy().copy()
        text = self.policy.decode(tokens.tolist())
        mask = SamplingMask.of(self.kept[slot]) if self.params.truncates else None
        return Sampled(*self.owners[slot], Completion(tokens, logprobs, text, finish, version, mask))

    def evict(self, compaction: Compaction) -> None:
        """Free the slots of completions that have ended."""
        for rows in (self.tokens, self.logprobs, self.uniform, self.lengths) if compaction.sources else ():
            rows[compaction.targets] = rows[compaction.sources]
        self.owners, self.kept = compaction.apply(self.owners), compaction.apply(self.kept)
