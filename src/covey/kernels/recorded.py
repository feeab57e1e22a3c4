"""Compiled operations recorded once and run again on the same buffers, without the Python between them.

What a CUDA graph is on a GPU. A small model's decoding step is some thirty short operations, and to prepare
their arguments takes as long as they do.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

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


class _Lending(TorchDispatchMode):
    """Lends memory for the tensors that are made inside it.

    What is not held any more is lent again, as the allocator would, though operations that were noted keep
    it: so a step's memory stays small, and in the processor's cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alone = True
        """Whether torch computed nothing."""
        self._free = defaultdict[object, list[Tensor]](list)

    def __torch_dispatch__(
        self,
        function: Callable[..., Tensor],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Tensor:
        """Called by torch for whatever it is asked to do."""
        made = function(*args, **(kwargs or {}))
        self.alone = self.alone and function in NEW
        if not self.alone:  # what torch makes of lent memory may be a view of it
            return made
        free = self._free[made.shape, made.dtype]
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
        operations, lending = list[Operation](), _Lending()
        with noting(operations), lending:
            self.result = self.work(self.input)
        self.operations = operations if lending.alone else None
        return self.result
