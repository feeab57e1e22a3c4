"""The local sampler: our own generation loop on the policy's own parameters.

A waiting completion joins when a slot is free, running ones gain a token per step, and those that
end leave at once: the last slots move into their places, so running slots stay contiguous. What
it takes to compute the logits is the engine's business: ours (``cache``) for the shapes
``models.forward`` knows, the Hugging Face modules (``modules``) for all others.

Shapes: B running completions, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from covey.errors import OutOfRoom, out_of_memory
from covey.fault_injection import Faults
from covey.models.policy import Policy
from covey.rng import uniforms
from covey.sampling.base import Moves, Request, Sampled, SamplingParams, Weights
from covey.sampling.cache import CacheEngine
from covey.sampling.draw import draw
from covey.sampling.modules import ModulesEngine
from covey.types import Completion, SamplingMask


class Engine(Protocol):
    """Logits for the running completions; slot b of the engine is row b of every tensor."""

    def room(self, running: int) -> int:
        """How many completions may join now."""
        ...

    def join(self, requests: Sequence[int]) -> Tensor:
        """Put one completion of each request into the next slots. -> first logits (n, V)."""
        ...

    def decode(self, tokens: Tensor) -> Tensor:
        """Append the last drawn token (B,) of every slot. -> next logits (B, V)."""
        ...

    def leave(self, moves: Moves) -> None:
        """Free the slots of completions that have ended."""
        ...


class LocalSampler:
    """Samples in this process from the policy that is trained; its weights are never stale.

    Out of memory halves how many completions run at once, from then on, and tells ``on_fewer``.
    """

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

    @property
    def bit_exact(self) -> bool:
        """It samples from the trained policy itself: exact where that one is."""
        return self.policy.exact

    def sync(self, weights: Weights) -> None:
        """Nothing to copy: it reads the very tensors that are trained."""
        self.version = weights.version

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Sampled]:
        """Yield completions as they end, in no particular order.

        Those that were running when memory ran out are begun again: draws are keyed, so they say the
        same. Raises OutOfRoom where a single one does not fit.
        """
        left = dict.fromkeys(
            (r, s) for r, request in enumerate(requests) for s in range(len(request.streams))
        )
        while left:
            try:
                for sampled in self._pass(requests, params, deque(left)):
                    del left[sampled.request, sampled.sample]
                    yield sampled
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
            # Outside the handler, where the traceback no longer holds the tensors.
            if left:
                self._halve(min(self.max_running, len(left)))

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
        while waiting or running.owners:
            self.faults.in_memory("memory.sampling")
            with torch.no_grad():
                logits = [engine.decode(running.last())] if running.owners else []
                joining = [waiting.popleft() for _ in range(min(engine.room(running.count), len(waiting)))]
                for r, s in joining:
                    running.add((r, s), requests[r].streams[s])
                if joining:
                    logits.append(engine.join([r for r, _ in joining]))
                running.draw(torch.cat(logits))
            if ended := running.ended():
                finished = [running.completed(slot, finish, self.version) for slot, finish in ended.items()]
                moves = Moves.after(ended, running.count)
                running.leave(moves)
                engine.leave(moves)
                yield from finished

    def _engine(self, requests: Sequence[Request], params: SamplingParams, slots: int) -> Engine:
        kind = ModulesEngine if self.policy.decoder is None else CacheEngine
        return kind(self.policy, [r.prompt for r in requests], slots, params.max_tokens)


class _Running:
    """What has been drawn for the running completions: row b belongs to slot b."""

    def __init__(self, policy: Policy, params: SamplingParams, slots: int) -> None:
        self.policy, self.params = policy, params
        shape = (slots, params.max_tokens)
        self.owners: list[tuple[int, int]] = []
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=policy.device)
        self.logprobs = torch.zeros(shape, device=policy.device)
        self.uniform = torch.zeros(shape, device=policy.device)
        self.drawn = torch.zeros(slots, dtype=torch.int64, device=policy.device)
        self.slots = torch.arange(slots, device=policy.device)
        self.end_ids = torch.tensor(policy.end_ids, device=policy.device)
        self.kept: list[list[np.ndarray]] = []
        """(B,) of (drawn,) the ids that could be drawn; nothing where all could."""
        self.kept_now: Tensor | None = None
        """(B, V) bool: the same of the token drawn last, not yet read back."""

    @property
    def count(self) -> int:
        return len(self.owners)

    def add(self, owner: tuple[int, int], stream: int) -> None:
        self.uniform[self.count] = torch.from_numpy(uniforms(stream, self.params.max_tokens))
        self.drawn[self.count] = 0
        self.owners.append(owner)
        self.kept.append([])

    def last(self) -> Tensor:
        """(B,) the token drawn last in each slot."""
        rows = self.slots[: self.count]
        return self.tokens[rows, self.drawn[rows] - 1]

    def draw(self, logits: Tensor) -> None:
        rows = self.slots[: self.count]
        at = self.drawn[rows]
        drawn = draw(logits, self.uniform[rows, at], self.params)
        self.tokens[rows, at], self.logprobs[rows, at] = drawn.tokens, drawn.logprobs
        self.drawn[rows] += 1
        self.kept_now = drawn.kept

    def ended(self) -> dict[int, Literal["stop", "length"]]:
        """Slots whose completion ended with the token drawn last, and why. Here the host waits."""
        if self.kept_now is not None:
            ids = self.kept_now.nonzero()[:, 1].int().cpu().numpy()
            ends = self.kept_now.sum(-1).cumsum(-1).tolist()
            for slot, kept in enumerate(np.split(ids, ends[:-1])):
                self.kept[slot].append(kept)
        stopped = torch.isin(self.last(), self.end_ids).tolist()
        full = (self.drawn[: self.count] == self.params.max_tokens).tolist()
        return {
            slot: "stop" if stop else "length"
            for slot in range(self.count)
            if (stop := stopped[slot] or self._stop_string(slot)) or full[slot]
        }

    def _stop_string(self, slot: int) -> bool:
        if not self.params.stop:
            return False
        reach = max(map(len, self.params.stop)) + 8  # a token may hold only a part of a character
        tail = self.tokens[slot, : self.drawn[slot]][-reach:]
        text = self.policy.decode(tail.tolist())
        return any(s in text for s in self.params.stop)

    def completed(self, slot: int, finish: Literal["stop", "length"], version: int) -> Sampled:
        """What stands in a slot."""
        length = int(self.drawn[slot])
        tokens = self.tokens[slot, :length].cpu().numpy().copy()
        logprobs = self.logprobs[slot, :length].cpu().numpy().copy()
        text = self.policy.decode(tokens.tolist())
        mask = SamplingMask.of(self.kept[slot]) if self.params.truncates else None
        return Sampled(*self.owners[slot], Completion(tokens, logprobs, text, finish, version, mask))

    def leave(self, moves: Moves) -> None:
        """As the engine's."""
        for rows in (self.tokens, self.logprobs, self.uniform, self.drawn) if moves.sources else ():
            rows[moves.targets] = rows[moves.sources]
        self.owners, self.kept = moves.of(self.owners), moves.of(self.kept)
