"""Compiled operations recorded once and run again on the same buffers, without the Python between them.

What a CUDA graph is on a GPU. A small model's decoding step is some thirty short operations, and to prepare
their arguments takes as long as they do.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # no public mode sees what torch computes

from covey.kernels.calls import Operation, noting, run_again

NEW = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
)
"""What torch may do in a recording: everything else would be missing when it runs again."""
Work = Callable[[Tensor], Tensor]
"""(rows, D) -> (rows, V), row by row."""


class _Recording(TorchDispatchMode):
    """Notes the compiled operations inside it, and lends them memory that nobody else gets.

    What is not held any more is lent again, as the allocator would, so that it stays in the processor's cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.whole = True
        """Whether torch computed nothing."""
        self.memory: list[Tensor] = []
        self._free = defaultdict[object, list[Tensor]](list)
        self._noting = noting(self.operations)

    def __enter__(self) -> _Recording:
        self._noting.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._noting.__exit__(kind, error, trace)

    def __torch_dispatch__(
        self,
        function: Callable[..., Tensor],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Tensor:
        """Called by torch for whatever it is asked to do."""
        made = function(*args, **(kwargs or {}))
        if function not in NEW:
            self.whole = False
            return made
        free = self._free[made.shape, made.dtype]
        if not free:
            self.memory.append(made)
        memory = free.pop() if free else made
        lent = memory.view(made.shape)
        weakref.finalize(lent, free.append, memory).atexit = False
        return lent


class Recorded:
    """Work on rows, of which each is computed alike and alone. Its result lasts until the next call.

    The work runs as it is where torch has a part in it.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.operations: list[Operation] | None = None
        self.memory: list[Tensor] = []
        self.input, self.result = torch.empty(0, 0), torch.empty(0, 0)

    def __call__(self, x: Tensor) -> Tensor:
        """As ``work``."""
        rows = len(x)
        if rows > len(self.input):
            return self._record(x)
        if self.operations is None:
            return self.work(x)
        self.input[:rows] = x
        run_again(self.operations, rows)
        return self.result[:rows]

    def _record(self, x: Tensor) -> Tensor:
        self.input = x.clone()
        with _Recording() as recording:
            self.result = self.work(self.input)
        self.operations, self.memory = recording.operations if recording.whole else None, recording.memory
        return self.result
