"""A decode step as CUDA graphs: recorded once per bucket of its sizes, replayed on the same buffers.

A small model's step is hundreds of short kernels; to start them one by one takes longer than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

Step = Callable[[Tensor, int], Tensor]
"""(a token per slot (B,), the most positions that one of them sees) -> logits (B, V).

Doing it twice must be doing it once.
"""
Work = Callable[[], Tensor]
FEWEST_ROWS, SHORTEST_REACH = 8, 256
"""The smallest buckets; each is twice the one before."""


class Replayed:
    """A step whose slots and reach are rounded up to a bucket. Its result lasts until the next call.

    The slots that this adds compute what nobody reads; they must hold something finite.
    """

    def __init__(
        self, step: Step, record: Callable[[Work], Work], slots: int, reach: int, device: torch.device
    ) -> None:
        self.step, self.record, self.most = step, record, (slots, reach)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.recorded: dict[tuple[int, int], Work] = {}

    def __call__(self, tokens: Tensor, reach: int) -> Tensor:
        """As ``step``."""
        self.tokens[: len(tokens)] = tokens
        rows = bucket(len(tokens), FEWEST_ROWS, self.most[0])
        seen = bucket(reach, SHORTEST_REACH, self.most[1])
        if (rows, seen) not in self.recorded:
            self.recorded[rows, seen] = self.record(partial(self.step, self.tokens[:rows], seen))
        return self.recorded[rows, seen]()[: len(tokens)]


def bucket(count: int, least: int, most: int) -> int:
    """The next power of two, between ``least`` and ``most``.

    >>> bucket(3, 8, 100), bucket(33, 8, 100), bucket(65, 8, 100)
    (8, 64, 100)
    """
    return min(max(least, 1 << (count - 1).bit_length()), most)


def cuda_recorder(device: torch.device) -> Callable[[Work], Work]:
    """Records work on fixed buffers as CUDA graphs, which share their memory: -> what does it again."""
    with torch.cuda.device(device):
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def record(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), _as_they_come():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # libraries prepare themselves at their first call, which cannot be recorded
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = work()

        def replay() -> Tensor:
            with torch.cuda.device(device):
                graph.replay()
            return result

        return replay

    return record


@contextmanager
def _as_they_come() -> Iterator[None]:
    """Without torch's deterministic forms: they would sort the cache's writes, which never collide."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
