"""Read-back of a model's saved weights, to find a disk or memory that changes bits."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Parameter

READ_AT_ONCE = 1 << 26
"""Bytes of a file that may be in memory besides the model."""


def check_written(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Compare a safetensors file with the tensors it was written from, bit by bit.

    Names that only one side has belong to tied or renamed weights, and are skipped. Raises OSError that names
    the file if it differs.
    """
    try:
        with safe_open(file, "pt") as stored:
            names = stored.keys()
        shared = [name for name in names if name in tensors]
        read_back = zip(shared, _read_tensors(file, shared), strict=True)
        differing = [name for name, tensor in read_back if _differs(tensor, tensors[name])]
    except SafetensorError as error:
        differing = [str(error)]
    if differing:
        reason = f"the disk, or the memory, does not give back what was written ({differing[0]})"
        raise OSError(errno.EIO, reason, str(file))


def check_folder(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Compare all weight files of a folder with the tensors they were written from, as ``check_written``."""
    for file in sorted(folder.glob("*.safetensors")):
        check_written(file, tensors)


def _read_tensors(file: Path, names: Iterable[str]) -> Iterator[Tensor]:
    """Yield tensors of a file.

    What is read of an open file stays in this process' memory until it is closed: at the end of a save the
    whole file would be there besides the model. So it is opened anew after every ``READ_AT_ONCE`` bytes.
    """
    waiting = deque(names)
    while waiting:
        with safe_open(file, "pt") as stored:
            size = 0
            while waiting and size < READ_AT_ONCE:
                tensor = stored.get_tensor(waiting.popleft())
                size += tensor.nbytes
                yield tensor


def _differs(stored: Tensor, expected: Tensor) -> bool:
    if type(expected) not in (Tensor, Parameter):  # split over processes: each has only its part
        return False
    expected_values = expected.detach().cpu().contiguous()
    if (stored.shape, stored.dtype) != (expected_values.shape, expected_values.dtype):
        return True
    # As bytes, because NaN differs from itself and -0 equals 0.
    return not torch.equal(
        stored.reshape(-1).view(torch.uint8), expected_values.reshape(-1).view(torch.uint8)
    )
