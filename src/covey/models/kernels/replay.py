"""Replay of kernels: operations are recorded once and run again on the same buffers, without Python.

This is the CPU's counterpart of a CUDA graph. A small model's decoding step has about thirty short
operations, and preparing their arguments takes as long as running them. Threads divide the rows of the whole
recording, not of each operation (`rows.c`).
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # no public mode sees what torch computes

from covey.models.kernels.calls import Operands, call, pass_calls_to

NEW = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
)
"""Torch functions that a recording may use; the work of any other would be missing in a replay."""
BY_ROW = {
    "add_norm": (0, 1, 5, 6),
    "decode_attend": (0, 7, 8, 9, 12, 13, 16),
    "gate_mul": (0, 3),
    "product": (0, 3),
}
"""Operations that compute each row alone -> the indices of arguments that have one row for each."""
Work = Callable[[Tensor], Tensor]
"""Function (rows, D) -> (rows, V) that computes each row alone."""


class _RecordedCall(ctypes.Structure):
    """A call that can be repeated for some of its rows: `struct noted` in rows.c."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("values", ctypes.c_long * 24),
        ("strides", ctypes.c_long * 24),
        ("rows_at", ctypes.c_long),
        ("factors", ctypes.c_float * 4),
    )

    @classmethod
    def from_arguments(cls, name: str, address: ctypes.c_void_p, arguments: Operands) -> _RecordedCall:
        # Integers and pointers go by one list and floats by another: so the C calling convention says.
        # A stride of 0 bytes is an argument that all rows share.
        factors = [a for a in arguments if isinstance(a, float)]
        values = list[int]()
        strides = list[int]()
        for index, a in enumerate(arguments):
            if isinstance(a, Tensor):
                values.append(a.data_ptr())
                strides.append(a.stride(0) * a.element_size() if index in BY_ROW[name] else 0)
            elif not isinstance(a, float):
                values.append(a or 0)
                strides.append(0)
        rows_at = len(values) - sum(isinstance(a, int) for a in arguments)  # sizes come last, rows first
        return cls(address, tuple(values), tuple(strides), rows_at, tuple(factors))


class _Lending(TorchDispatchMode):
    """A mode that lends memory to the tensors created inside it.

    Memory of tensors that are gone is lent again, as an allocator would do, although recorded operations
    still have its address. So a step's memory stays small enough for the processor's cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alone = True
        """Whether only operations were used that can be replayed by rows."""
        self._free = defaultdict[object, list[Tensor]](list)

    def __torch_dispatch__(
        self,
        function: Callable[..., Tensor],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Tensor:
        """Handle a torch function, which torch passes here instead of running it."""
        tensor = function(*args, **(kwargs or {}))
        self.alone = self.alone and function in NEW
        # Other functions may return a view of memory that is lent out, so nothing is lent from here on.
        if not self.alone:
            return tensor
        free = self._free[tensor.shape, tensor.dtype]
        memory = free.pop() if free else tensor
        # The work gets a view; when the last holder drops that, its memory is free for the next tensor.
        view = memory.view(tensor.shape)
        weakref.finalize(view, free.append, memory).atexit = False
        return view


class Recording:
    """Recorded work that computes each row alike and alone. A result is valid until the next call.

    If torch has a part in the work, it is not replayed but called each time.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.operations: ctypes.Array[_RecordedCall] | None = None
        self.memory: list[torch.UntypedStorage] = []
        """Storages behind the recorded addresses, held so that none is freed, for example a packed weight."""
        self.input = torch.empty(0, 0)
        self.result = torch.empty(0, 0)

    def __call__(self, x: Tensor) -> Tensor:
        """Do the work, by replay if there is a recording for so many rows."""
        rows = len(x)
        # A recording serves all smaller numbers of rows; a larger one replaces it.
        if rows > len(self.input):
            return self._record(x)
        if self.operations is None:
            return self.work(x)
        self.input[:rows] = x
        call("run_again", ctypes.addressof(self.operations), len(self.operations), rows)
        return self.result[:rows]

    def _record(self, x: Tensor) -> Tensor:
        # A buffer of our own: callers' tensors come and go, and a replay reads this address.
        self.input = x.clone()
        self.memory = []
        recorded_calls = list[_RecordedCall]()
        memory = list[torch.UntypedStorage]()
        lending = _Lending()

        def note(name: str, address: ctypes.c_void_p, arguments: Operands) -> None:
            if name not in BY_ROW:
                lending.alone = False
                return
            recorded_calls.append(_RecordedCall.from_arguments(name, address, arguments))
            memory.extend(a.untyped_storage() for a in arguments if isinstance(a, Tensor))

        # `note` sees the C operations, `lending` all that torch is asked for meanwhile.
        with pass_calls_to(note), lending:
            self.result = self.work(self.input)
        self.operations = None
        if lending.alone:
            self.operations = (_RecordedCall * len(recorded_calls))(*recorded_calls)
            self.memory = memory
        return self.result
