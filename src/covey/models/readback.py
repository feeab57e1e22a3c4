"""Read-back of a model's saved weights, to find a disk or memory that changes bits."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Parameter

MAX_BYTES_AT_ONCE = 1 << 26
"""Bytes of a file that may be in memory besides the model."""


def check_written(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Compare a safetensors file with the tensors it was written from, bit by bit.

    Names that only one side has belong to tied or renamed weights, and are skipped. Raises OSError that names
    the file if it differs.
    """
    # Tensors that are split over processes are left out: each process has only its part.
    whole = {name: t for name, t in tensors.items() if type(t) in (Tensor, Parameter)}
    try:
        with safe_open(file, "pt") as stored:
            names = stored.keys()
            shapes = {name: stored.get_slice(name).get_shape() for name in names if name in whole}
        differing = [name for name, shape in shapes.items() if shape != [*whole[name].shape]]
        if not differing:
            pieces = [piece for name in shapes for piece in _pieces(name, whole[name])]
            read_back = zip(pieces, _read_tensors(file, pieces), strict=True)
            differing = [p.name for p, read in read_back if _differs(read, whole[p.name][p.rows])]
    except SafetensorError as error:
        differing = [str(error)]
    if differing:
        reason = f"the disk, or the memory, does not give back what was written ({differing[0]})"
        raise OSError(errno.EIO, reason, str(file))


def check_folder(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Compare all weight files of a folder with the tensors they were written from, as ``check_written``."""
    for file in sorted(folder.glob("*.safetensors")):
        check_written(file, tensors)


class TensorPiece(NamedTuple):
    """A tensor of a file, or some rows of it."""

    name: str
    rows: slice | EllipsisType
    size: int


def _pieces(name: str, tensor: Tensor) -> Iterator[TensorPiece]:
    """Yield a tensor as pieces of at most ``MAX_BYTES_AT_ONCE`` bytes, or of one row."""
    if tensor.nbytes <= MAX_BYTES_AT_ONCE or not tensor.dim():
        yield TensorPiece(name, ..., tensor.nbytes)
        return
    row_bytes = tensor.nbytes // len(tensor)
    count = max(1, MAX_BYTES_AT_ONCE // row_bytes)
    for start in range(0, len(tensor), count):
        yield TensorPiece(name, slice(start, min(start + count, len(tensor))), count * row_bytes)


def _read_tensors(file: Path, pieces: Iterable[TensorPiece]) -> Iterator[Tensor]:
    """Yield pieces of a file.

    What is read of an open file stays in this process' memory until it is closed: at the end of a save the
    whole file would be there besides the model. So it is opened anew after every ``MAX_BYTES_AT_ONCE`` bytes.
    """
    waiting = deque(pieces)
    while waiting:
        with safe_open(file, "pt") as stored:
            size = 0
            while waiting and size < MAX_BYTES_AT_ONCE:
                name, rows, bytes_read = waiting.popleft()
                size += bytes_read
                yield stored.get_tensor(name) if rows is ... else stored.get_slice(name)[rows]


def _differs(stored: Tensor, expected: Tensor) -> bool:
    expected_values = expected.detach().cpu().contiguous()
    if stored.dtype != expected_values.dtype:
        return True
    # As bytes, because NaN differs from itself and -0 equals 0.
    return not torch.equal(
        stored.reshape(-1).view(torch.uint8), expected_values.reshape(-1).view(torch.uint8)
    )
