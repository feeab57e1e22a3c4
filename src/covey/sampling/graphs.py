"""The decode step as CUDA graphs: recorded once per bucket of its sizes, replayed on the same buffers.

A small model's step is hundreds of short kernels; launching them one by one takes longer than running them.
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
MIN_SLOTS = 8
"""The smallest bucket of slots. Each bucket is twice as large as the one before."""
MIN_KV = 256
"""The smallest bucket of KV lengths."""


class GraphStep:
    """A step whose slots and KV length are rounded up to a bucket. The next call overwrites its result.

    Padding slots produce unused results; their contents must be finite.
    """

    def __init__(
        self, step: Step, record: Callable[[Work], Work], slots: int, kv_length: int, device: torch.device
    ) -> None:
        self.step = step
        self.record = record
        self.limits = (slots, kv_length)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.recorded: dict[tuple[int, int], Work] = {}

    def __call__(self, tokens: Tensor, kv_length: int) -> Tensor:
        """Run the step; see ``Step`` for arguments and result."""
        # A graph reads the addresses that it was recorded with, so the tokens are copied there.
        self.tokens[: len(tokens)] = tokens
        rows = bucket(len(tokens), MIN_SLOTS, self.limits[0])
        length = bucket(kv_length, MIN_KV, self.limits[1])
        if (rows, length) not in self.recorded:
            self.recorded[rows, length] = self.record(partial(self.step, self.tokens[:rows], length))
        return self.recorded[rows, length]()[: len(tokens)]


def bucket(count: int, smallest: int, largest: int) -> int:
    """Return the next power of two, between ``smallest`` and ``largest``.

    >>> bucket(3, 8, 100), bucket(33, 8, 100), bucket(65, 8, 100)
    (8, 64, 100)
    """
    return min(max(smallest, 1 << (count - 1).bit_length()), largest)


def cuda_recorder(device: torch.device) -> Callable[[Work], Work]:
    """Return a function that captures work on fixed buffers as a CUDA graph; all share one memory pool."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        pool = torch.cuda.graph_pool_handle()

    def record(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), _nondeterministic():
            # Capture needs its own stream, which must not overtake the work of the current one.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # libraries initialize at their first call, which cannot be recorded
            # "thread_local": rewards or trackers in other threads may use CUDA during the capture.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = work()

        def replay() -> Tensor:
            with torch.cuda.device(device):
                graph.replay()
            # Replay writes into the tensor that the capture made.
            return result

        return replay

    return record


@contextmanager
def _nondeterministic() -> Iterator[None]:
    """Switch deterministic algorithms off: they would sort the cache's writes, which never collide."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
