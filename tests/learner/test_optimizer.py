"""The optimizer by itself: what a checkpoint keeps of it, its size, and what is said without its library."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import CONFIGS, sharpened
from tests.training.runs import start
from torch import nn

from covey.config.schema import Train
from covey.learner.batching import MicroBatch, given_batch
from covey.learner.learner import Learner, Requirements
from covey.learner.optimizer import Optimizer
from covey.learner.schedule import learning_rate
from covey.models.logprobs import TokenOutputs
from covey.models.policy import Policy
from covey.models.tiny import build_tokenizer
from covey.sampling.prompts import EncodedProblem, GivenAnswer
from covey.types import Problem
from covey_verify.errors import ConfigError

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
        optimizer.step(optimizer.train.lr)
    return [p.detach().clone() for p in optimizer.parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", EIGHT_BIT])
def test_what_has_never_learned_waits_whether_its_gradient_is_none_or_zero(
    kind: str, dtype: torch.dtype
) -> None:
    train = Train(optimizer=kind, lr=1e-2, weight_decay=0.1)
    ends = []
    for nothing in (lambda p: None, torch.zeros_like):
        body, head = parameters(dtype)[:2]
        optimizer = Optimizer([body], train, [head])
        for gradient in (nothing, nothing, torch.ones_like):
            body.grad, head.grad = gradient(body), torch.ones_like(head)
            optimizer.accumulate()
            before, head_before = body.detach().clone(), head.detach().clone()
            optimizer.step(train.lr)
            assert torch.equal(body, before) == (gradient is nothing)
            assert not torch.equal(head, head_before)
        ends.append((body.detach(), head.detach()))
    assert all(map(torch.equal, *ends))


@dataclass(frozen=True)
class Times:
    """The mean log-prob of given answers, times a factor."""

    factor: float
    requires = Requirements()

    def __call__(self, micro: MicroBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, str]:
        return self.factor * outputs.logprobs.mean(), "seen"


def test_an_update_counts_where_what_the_optimizer_remembers_moves_the_weights() -> None:
    """Who samples elsewhere asks by the count of updates whether there are new weights."""
    tokenizer = build_tokenizer(["1+2=3"] * 3, vocab_size=300)
    policy = Policy(sharpened(CONFIGS["qwen3"]), tokenizer)
    learner = Learner(policy, Train(lr=1e-2))
    answer = GivenAnswer(np.array([7, 8]), np.ones(2, dtype=bool))
    batch = given_batch([EncodedProblem(Problem("p", "p"), np.array([5, 6]), (answer,), (1.0,))])
    for factor, version in ((0.0, 0), (1.0, 1), (0.0, 2), (None, 2)):
        before = policy.parameters[0].detach().clone()
        if factor is not None:
            learner.forward_backward(batch, Times(factor))
        learner.step(1e-2)
        assert learner.version == version
        assert torch.equal(before, policy.parameters[0]) == (version == 0 or factor is None)


def test_matrices_of_bfloat16_sum_their_gradient_in_the_float32_copy_alone() -> None:
    """In bfloat16 in between it would take half its memory again, and lose its last digits."""
    tokenizer = build_tokenizer(["1+2=3"] * 3, vocab_size=300)
    policy = Policy(sharpened(CONFIGS["qwen3"]).to(torch.bfloat16), tokenizer)
    learner = Learner(policy, Train())
    answer = GivenAnswer(np.array([7, 8]), np.ones(2, dtype=bool))
    batch = given_batch([EncodedProblem(Problem("p", "p"), np.array([5, 6]), (answer,), (1.0,))])
    learner.forward_backward(batch, Times(1.0))
    sums = [m.grad.clone() for m in learner.optimizer.masters if m.grad is not None and m.ndim == 2]
    assert sums and any(not torch.equal(g, g.to(torch.bfloat16).float()) for g in sums)
    assert all(p.grad is None for p in policy.parameters)
    learner.forward_backward(batch, Times(1.0))
    double_sums = [m.grad for m in learner.optimizer.masters if m.grad is not None and m.ndim == 2]
    assert all(torch.allclose(b, 2 * a, rtol=1e-5) for a, b in zip(sums, double_sums, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", EIGHT_BIT])
def test_a_restored_optimizer_continues_with_the_same_bits(
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_by_hand(dtype: torch.dtype) -> None:
    """Two micro-batches an update, a warm-up, clipping at half of most norms, AdamW: in float64."""
    settings = {"betas": (0.8, 0.95), "weight_decay": 0.1, "grad_clip": 1.0, "warmup_steps": 2}
    train = Train(lr=1e-2, steps=5, schedule="linear", **settings)
    start = torch.tensor([[0.5, -1.0, 2.0, 0.25]], dtype=dtype)  # a matrix, which decays
    optimizer = Optimizer([nn.Parameter(start.clone())], train)
    w, first, second = start.double(), torch.zeros(1, 4).double(), torch.zeros(1, 4).double()
    for step, rate in enumerate([0.5, 1.0, 1.0, 2 / 3, 1 / 3]):
        pieces = [torch.tensor([1.0, -2.0, 0.5, 0.0]) * 4**-step, torch.tensor([0.25, 1.0, -1.0, 0.125])]
        for piece in pieces:
            (optimizer.parameters[0] * piece.to(dtype)).sum().backward()
            optimizer.accumulate()
        norm = optimizer.step(learning_rate(step, train))
        g = sum(piece.double() for piece in pieces)
        assert norm == pytest.approx(float(g.norm()), rel=1e-5)
        g = g * min(1.0, 1.0 / float(g.norm()))
        first, second = 0.8 * first + 0.2 * g, 0.95 * second + 0.05 * g**2
        move = first / (1 - 0.8 ** (step + 1)) / ((second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
        w = w * (1 - rate * 1e-2 * 0.1) - rate * 1e-2 * move
    torch.testing.assert_close(optimizer.masters[0].double(), w, rtol=0, atol=1e-6)
    torch.testing.assert_close(optimizer.parameters[0].data, w.to(dtype), rtol=0, atol=1e-6)


def test_norms_and_biases_do_not_decay() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    optimizer = Optimizer(parameters, Train(lr=0.5, weight_decay=0.5))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    parameters[0].grad = torch.tensor([[1.0, 0.0], [0.0, 0.0]])  # a gradient of 0 alone would not step
    optimizer.accumulate()
    optimizer.step(0.5)
    assert float(parameters[0].data[1, 1]) == 0.75
    assert torch.equal(parameters[1].data, torch.ones(2))


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


def test_a_run_does_not_continue_with_another_optimizer(tmp_path: Path) -> None:
    start(tmp_path / "run", train={"steps": 1})
    with pytest.raises(ConfigError, match=r"train\.optimizer is adamw there, adamw_8bit here \(refused\)"):
        start(tmp_path / "run", train={"steps": 1, "optimizer": "adamw_8bit"})
