"""The optimizer by itself: what a checkpoint keeps of it, its size, and what is said without its library."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.train.test_runs import start
from torch import nn

from covey.config.schema import Train
from covey.errors import ConfigError
from covey.training.optimizer import Optimizer

EIGHT_BIT = pytest.param(
    "adamw_8bit",
    marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
)
SHAPES = ((80, 80), (33,), (4097, 3), (1, 1))


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def updated(optimizer: Optimizer, steps: range) -> list[torch.Tensor]:
    """Parameters after some steps, whose gradients follow from their numbers."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in optimizer.parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.accumulate()
        optimizer.step(step)
    return [p.detach().clone() for p in optimizer.parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", EIGHT_BIT])
def test_a_restored_optimizer_goes_on_with_the_same_bits(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    train = Train(optimizer=kind, lr=1e-2, weight_decay=0.1)
    whole = Optimizer(parameters(dtype), train)
    half = updated(whole, range(3))
    save_file(whole.state(), tmp_path / "optimizer.safetensors")
    expected = updated(whole, range(3, 6))
    again = Optimizer([nn.Parameter(p) for p in half], train)
    again.load(load_file(tmp_path / "optimizer.safetensors"))
    for got, want in zip(updated(again, range(3, 6)), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", [EIGHT_BIT])
def test_eight_bit_moments_take_a_quarter_and_step_alike(kind: str) -> None:
    full, small = (
        Optimizer([nn.Parameter(torch.ones(512, 512))], Train(optimizer=k)) for k in ("adamw", kind)
    )
    (after,), (alike,) = (updated(o, range(5)) for o in (full, small))
    assert float((after - alike).norm() / (after - 1).norm()) < 0.05
    sizes = [sum(v.numel() * v.element_size() for v in o.state().values()) for o in (full, small)]
    assert 0.25 < sizes[1] / sizes[0] < 0.27


def test_without_its_library_the_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs bitsandbytes: pip install 'covey\[adam8bit\]'"):
        start(tmp_path / "run", train={"optimizer": "adamw_8bit"})
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_go_on_with_another_optimizer(tmp_path: Path) -> None:
    start(tmp_path / "run", train={"steps": 1})
    with pytest.raises(ConfigError, match=r"train\.optimizer is adamw there, adamw_8bit here \(refused\)"):
        start(tmp_path / "run", train={"steps": 1, "optimizer": "adamw_8bit"})
