"""Named tensors of a checkpoint, as one process reads what several have written."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from covey.runs.tensors import load_tensors


def test_one_process_reads_the_parts_of_several_without_a_warning(tmp_path: Path) -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(4.0)}
    writer = HuggingFaceStorageWriter(str(tmp_path / "optimizer"), save_distributed=True)
    with warnings.catch_warnings(action="ignore"):
        save(dict(weights), storage_writer=writer, no_dist=True)
    found = load_tensors(tmp_path / "optimizer", weights.__getitem__)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
