"""Measured memory of a model: the bytes behind live tensors and activations, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from covey.models.internals import version_of
from covey.models.sharded import local_part
from covey.system.processes import world_size


def alive_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors' storages; views of the same storage count once."""
    storages = (local_part(t).untyped_storage() for t in tensors if t is not None)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class Activations:
    """The most memory that any forward pass keeps for its backward pass."""

    def __init__(self) -> None:
        self.peak = 0
        """Peak in bytes."""

    @contextmanager
    def count_forward(self, device: torch.device, weights: Iterable[Tensor]) -> Iterator[None]:
        """Count the forward pass inside the block; ``weights`` are in memory anyway and do not count.

        On a GPU the allocator knows. On a CPU the tensors that autograd saves are counted, but only if
        weights are not split: gathered weights would count as activations.
        """
        if not torch.is_grad_enabled() or (world_size() > 1 and device.type == "cpu"):
            yield
            return
        if device.type == "cuda":
            allocated = torch.cuda.memory_allocated(device)
            yield
            self.peak = max(self.peak, torch.cuda.memory_allocated(device) - allocated)
            return
        weight_storages = {w.untyped_storage().data_ptr() for w in weights}
        saved_bytes = dict[int, int]()

        # autograd calls this for every tensor that it saves; views and repeats share a storage.
        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weight_storages:
                saved_bytes[storage.data_ptr()] = storage.nbytes()
            # The tensor itself would keep its own graph alive.
            return tensor.detach(), version_of(tensor)

        # With hooks autograd does not check that a tensor still is as it was saved.
        def unpack(packed: tuple[Tensor, int]) -> Tensor:
            tensor, version = packed
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"a tensor of the shape {tuple(tensor.shape)} was modified by an inplace operation"
                )
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self.peak = max(self.peak, sum(saved_bytes.values()))
