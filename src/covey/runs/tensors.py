"""The named tensors of a checkpoint, saved and loaded: one file, or a folder with the parts of processes.

torch.distributed.checkpoint writes and reads the parts, as safetensors. The number of processes that read may
differ from the number that wrote.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.models.readback import check_written
from covey.runs.atomic import committed_folder
from covey.system.processes import objects_group, on_rank_zero, world_size


@contextmanager
def folder_of_all(target: Path) -> Iterator[Path]:
    """``committed_folder`` that all processes write into; the first one makes and commits it."""
    with ExitStack() as stack:
        # Only the first process enters the context and, on success, closes it: that renames the folder. If
        # the block raises, the ExitStack of the first process removes the temporary folder instead.
        yield on_rank_zero(lambda: stack.enter_context(committed_folder(target)))
        on_rank_zero(stack.close)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to ``path``.safetensors, or with several processes, which all call it, to a folder."""
    if world_size() == 1:
        file = path.with_suffix(".safetensors")
        save_file(dict(tensors), file)
        check_written(file, tensors)
        return
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    with _plain_errors():
        save(dict(tensors), storage_writer=writer, process_group=objects_group())


def load_tensors(path: Path, split_as: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
    """Load the tensors of ``save_tensors``; of those shaped as ``split_as`` this process' part only."""
    file = path.with_suffix(".safetensors")
    if file.exists():
        return load_file(file)
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(path))
    tensors: dict[str, Tensor] = {}
    for name, saved in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata), "safetensors hold nothing else"
        like = split_as(name)
        dtype = saved.properties.dtype
        # The saved shape is the global one. If the learner's tensor has it too, `like` may be a DTensor, and
        # zeros_like gives a DTensor with the same placement: the reader then fills this process' part only.
        split = like.shape == saved.size
        tensors[name] = (
            torch.zeros_like(like, dtype=dtype, requires_grad=False)
            if split
            else torch.zeros(saved.size, dtype=dtype)
        )
    with _plain_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for
        load(tensors, storage_reader=reader, process_group=objects_group(), no_dist=world_size() == 1)
    return tensors


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise on all processes the error of the process that failed, instead of torch's report about it."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as report:
        raise next(iter(report.failures.values()))[0] from None
