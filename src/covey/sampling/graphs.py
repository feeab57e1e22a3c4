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
"""(a token per slot (B,), the longest KV length among them) -> logits (B, V).

The step must be idempotent: the first call of a bucket runs it twice, to warm up and to replay.
"""
Work = Callable[[], Tensor]
FEWEST_SLOTS, SHORTEST_KV = 8, 256
"""The smallest buckets; each is twice the one before."""


class Replayed:
    """A step whose slots and KV length are rounded up to a bucket. Its result lasts until the next call.

    Padding slots produce unused results; their contents must be finite.
    """

    def __init__(
        self, step: Step, record: Callable[[Work], Work], slots: int, kv_length: int, device: torch.device
    ) -> None:
        self.step, self.record, self.most = step, record, (slots, kv_length)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.recorded: dict[tuple[int, int], Work] = {}

    def __call__(self, tokens: Tensor, kv_length: int) -> Tensor:
        """As ``step``."""
        self.tokens[: len(tokens)] = tokens
        rows = bucket(len(tokens), FEWEST_SLOTS, self.most[0])
        length = bucket(kv_length, SHORTEST_KV, self.most[1])
        if (rows, length) not in self.recorded:
            self.recorded[rows, length] = self.record(partial(self.step, self.tokens[:rows], length))
        return self.recorded[rows, length]()[: len(tokens)]


def bucket(count: int, least: int, most: int) -> int:
    """The next power of two, between ``least`` and ``most``.

    >>> bucket(3, 8, 100), bucket(33, 8, 100), bucket(65, 8, 100)
    (8, 64, 100)
    """
    return min(max(least, 1 << (count - 1).bit_length()), most)


def cuda_recorder(device: torch.device) -> Callable[[Work], Work]:
    """Turns work on fixed buffers into a CUDA graph and returns its replay. The graphs share their memory."""
    with torch.cuda.device(device):
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def record(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), _nondeterministic():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # libraries initialize at their first call, which cannot be recorded
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = work()

        def replay() -> Tensor:
            with torch.cuda.device(device):
                graph.replay()
            return result

        return replay

    return record


@contextmanager
def _nondeterministic() -> Iterator[None]:
    """Without torch's deterministic algorithms: they would sort the cache's writes, which never collide."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
