"""Calls of the kernels with torch tensors: pointers, sizes, threads, and the choice of products."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from covey.models.kernels.build import library, tested_kernels
from covey.models.kernels.choice import MAX_DECODING_ROWS, MIN_SPEEDUP
from covey.models.kernels.known_answers import first_incorrect

LANES = 16
"""Floats in a vector of the C code; the sizes that operations run over are multiples of it."""
MIXED_PRODUCTS: Literal["mixed"] = "mixed"
"""Products of float32 whose factors are rounded to bfloat16 on the way; sums and results are float32."""
Numbers = torch.dtype | Literal["mixed"]
DTYPES: Mapping[Numbers, str] = {torch.float32: "f32", torch.bfloat16: "bf16", MIXED_PRODUCTS: "mixed"}
MAX_HEAD_WIDTH = 1024
"""Largest head width of the attention operations."""
PANEL = 64
"""Outputs that the matrix product computes together; packed weights are padded to a multiple of it."""

NEIGHBOURS = 16
"""Keys that are adjacent in the cache of `decode_attend`, for each feature."""


def key_columns(keys: Tensor) -> Tensor:
    """Keys in the layout of `decode_attend`, with zeros after the last. (n, K, E) -> (K, n / 16, E, 16)."""
    full = F.pad(keys, (0, 0, 0, 0, 0, -len(keys) % NEIGHBOURS))
    return full.unflatten(0, (-1, NEIGHBOURS)).permute(2, 0, 3, 1)


def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether compiled operations exist for tensors of this kind."""
    return device.type == "cpu" and dtype in DTYPES and library() is not None and passes_known_answers(dtype)


@cache
def passes_known_answers(numbers: Numbers) -> bool:
    """Whether every operation gives its known answer; checked once, in a few milliseconds."""
    operation = first_incorrect(call, packed_size, numbers)
    if operation is not None:
        name = DTYPES[numbers]
        warnings.warn(f"{operation}_{name} computes incorrect values here; torch does the work", stacklevel=3)
    return operation is None


def memory_of(numbers: Numbers) -> torch.dtype:
    """The dtype of the tensors in memory: float32 for mixed products."""
    return numbers if isinstance(numbers, torch.dtype) else torch.float32


def name_of_numbers(numbers: Numbers) -> str:
    """The name of these numbers in records."""
    return str(numbers).removeprefix("torch.")


def by_torch(kind: str, numbers: Numbers) -> bool:
    """Whether torch does products of this kind (`choice.PRODUCT_KINDS`)."""
    return kind in _kinds_of_torch(numbers)


@cache
def _kinds_of_torch(numbers: Numbers) -> Sequence[str]:
    return products().get(name_of_numbers(numbers), ())


def same_bits(numbers: Numbers) -> bool:
    """Whether sampling and training compute a token's result to the same bits."""
    tested = tested_kernels()
    return tested is None or not tested.trial.differs[name_of_numbers(numbers)]


def forward_kind(rows: int) -> str:
    """The kind of a product with so many rows: sampling has few, training many."""
    return "decode" if rows <= MAX_DECODING_ROWS else "forward"


def products() -> Mapping[str, Sequence[str]]:
    """Map each dtype to the kinds of products that torch does in this process."""
    # A resumed run keeps the choices that it began with, whatever this machine measured.
    if _followed is not None:
        return _followed
    kernels = tested_kernels()
    return {} if kernels is None else kernels.trial.choice()


def rounding_pays() -> bool:
    """Whether products round to bfloat16 with `precision: auto`."""
    return rounding_is_faster() if _rounding is None else _rounding


def rounding_is_faster() -> bool:
    """Whether rounding was measured to be much faster on this machine."""
    tested = tested_kernels()
    return tested is not None and tested.trial.rounding_gain > MIN_SPEEDUP


def follow(recorded: Mapping[str, Sequence[str]] | None, rounding: bool | None = None) -> None:
    """Take the choices that a run began with, so that its bits stay the same; None: the measured choices."""
    global _followed, _rounding  # noqa: PLW0603 - like the number of threads they are the process's
    _followed = recorded
    _rounding = rounding
    _kinds_of_torch.cache_clear()


def followed_choices() -> tuple[Mapping[str, Sequence[str]] | None, bool | None]:
    """The choices that `follow` was given last."""
    return _followed, _rounding


_followed: Mapping[str, Sequence[str]] | None = None
_rounding: bool | None = None


def packed_size(outputs: int, inputs: int, numbers: Numbers) -> int:
    """Bytes of a packed weight."""
    kernels = library()
    assert kernels is not None
    function = getattr(kernels, f"packed_size_{DTYPES[numbers]}")
    function.restype = ctypes.c_long
    return int(function(ctypes.c_long(outputs), ctypes.c_long(inputs)))


def call(name: str, *arguments: Tensor | float | None, dtype: Numbers | None = None) -> None:
    """Run an operation; tensors go by address and must be contiguous, floats as C floats, ints as longs."""
    kernels = library()
    assert kernels is not None, "check `available` first"
    _set_threads(kernels)
    function = getattr(kernels, f"{name}_{DTYPES[dtype]}" if dtype is not None else name)
    # ctypes keeps one function object a name, so its types are set at the first call; None is a null pointer.
    if function.argtypes is None:
        function.argtypes = [_c_type(a) for a in arguments]
    values = [_address(a) if isinstance(a, Tensor) else a for a in arguments]
    function(*values)
    note = _note.get()
    if note is not None:
        note(name, ctypes.cast(function, ctypes.c_void_p), arguments)


Operands = Sequence[Tensor | float | None]
"""The arguments of an operation, in C's order."""
Note = Callable[[str, ctypes.c_void_p, Operands], None]
"""Function that gets the name of an operation, its address and its arguments."""
_note: ContextVar[Note | None] = ContextVar("note", default=None)


@contextmanager
def pass_calls_to(note: Note) -> Iterator[None]:
    """Pass this thread's calls to ``note`` inside the block."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)


@contextmanager
def threads_lent(lend: bool) -> Iterator[None]:
    """Give torch's threads to the compiled operations, where these do nearly all the work (``lend``).

    Torch's threads wait for each other after every small operation. While other programs run, that takes many
    times as long as the work. Ours do not wait so (`team.c`).
    """
    global _lent  # noqa: PLW0603 - like the number of threads it is the process's
    count = torch.get_num_threads()
    if not lend or count == 1:
        yield
        return
    _lent = count
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
        _lent = 0


def _set_threads(kernels: ctypes.CDLL) -> None:
    """Give the library as many threads as torch has or has lent."""
    global _threads  # noqa: PLW0603 - the library's, known here so that it is told of changes only
    count = _lent or torch.get_num_threads()
    if count != _threads:
        kernels.team_size(ctypes.c_long(count))
        _threads = count


_lent = 0
_threads = 1


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous(), "an address says nothing about strides"
    return tensor.data_ptr()


def _c_type(value: Tensor | float | None) -> type[ctypes.c_void_p | ctypes.c_float | ctypes.c_long]:
    if isinstance(value, Tensor) or value is None:
        return ctypes.c_void_p
    return ctypes.c_float if isinstance(value, float) else ctypes.c_long
