"""What was written is read back bit by bit, and a large tensor in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from covey.models import readback
from covey.models.readback import check_written

WEIGHTS = {
    "large": torch.arange(40.0).view(10, 4),
    "small": torch.tensor([float("nan"), -0.0]),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "rounded": torch.arange(40).view(8, 5).to(torch.bfloat16),
}


def written(folder: Path, **changed: Tensor) -> Path:
    save_file({**WEIGHTS, **changed}, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.fixture(params=[1, 40, 1 << 26])
def _bytes_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readback, "MAX_BYTES_AT_ONCE", request.param)


@pytest.mark.usefixtures("_bytes_at_once")
def test_a_file_as_it_was_written_passes(tmp_path: Path) -> None:
    check_written(written(tmp_path), {**WEIGHTS, "tied": WEIGHTS["large"]})


@pytest.mark.usefixtures("_bytes_at_once")
@pytest.mark.parametrize("name", ["large", "scalar", "rounded", "small"])
def test_a_bit_of_the_last_row_that_has_changed_is_found(tmp_path: Path, name: str) -> None:
    changed = WEIGHTS[name].clone()
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    with pytest.raises(OSError, match=rf"does not give back what was written \({name}\)"):
        check_written(written(tmp_path, **{name: changed}), WEIGHTS)


@pytest.mark.parametrize("changed", [torch.zeros(11, 4), torch.arange(40.0), torch.arange(40).view(10, 4)])
def test_another_shape_or_type_is_found(tmp_path: Path, changed: Tensor) -> None:
    with pytest.raises(OSError, match=r"\(large\)"):
        check_written(written(tmp_path, large=changed), WEIGHTS)
