"""Memory that is really alive, by what it is for: counted from the tensors themselves, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from covey.models.sharded import own
from covey.system.processes import size


def alive_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of their storages, each once however many views of it there are."""
    storages = (own(t).untyped_storage() for t in tensors if t is not None)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class Activations:
    """What forward passes leave behind for their backward pass: the most that was alive at once."""

    def __init__(self) -> None:
        self.most = 0
        """Bytes."""

    @contextmanager
    def counted(self, device: torch.device, weights: Iterable[Tensor]) -> Iterator[None]:
        """Count a forward pass inside the block; ``weights`` are there anyway.

        Of a GPU the allocator is asked. On a CPU every tensor that autograd saves is counted, where weights
        are not split: gathered ones would be counted as well.
        """
        if not torch.is_grad_enabled() or (size() > 1 and device.type == "cpu"):
            yield
            return
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            yield
            self.most = max(self.most, torch.cuda.memory_allocated(device) - before)
            return
        known = {w.untyped_storage().data_ptr() for w in weights}
        saved = dict[int, int]()

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # the tensor itself would keep its own graph alive

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            yield
        self.most = max(self.most, sum(saved.values()))
