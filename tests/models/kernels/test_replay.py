"""Steps that are recorded once and run again without Python between the operations."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.models.kernels.calls import call
from covey.models.kernels.replay import Recording
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.sampling.cache import _CompiledCache
from covey.sampling.local import LocalSampler
from tests.conftest import CONFIGS, policy_of, random_prompts

WEIGHT = torch.linspace(0.5, 2.0, 32)


def normed(x: Tensor) -> Tensor:
    """Two operations; the first one's sum is not held on, so that its memory is lent again."""
    for _ in range(3):
        total, out = torch.empty_like(x), x.new_empty(x.shape)
        call("add_norm", x, None, WEIGHT, 0.0, 1e-6, total, out, *x.shape, dtype=x.dtype)
        x = out
    return x


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_a_replay_gives_the_bits_of_the_work_for_as_many_rows_or_fewer() -> None:
    recorded = Recording(normed)
    for seed, count in enumerate((3, 3, 1, 2, 8, 5, 8, 9)):
        x = rows(count, seed)
        assert torch.equal(recorded(x), normed(x))
    assert recorded.operations is not None


@torch.no_grad()
def test_threads_take_some_rows_each_and_the_bits_stay_the_same() -> None:
    recorded = Recording(normed)
    recorded(rows(300))
    try:
        torch.set_num_threads(3)
        for count in (300, 299, 96, 95, 64, 63, 1):
            x = rows(count, count)
            assert torch.equal(recorded(x), normed(x))
    finally:
        torch.set_num_threads(1)


@torch.no_grad()
def test_work_that_is_not_row_by_row_is_not_run_by_rows() -> None:
    def work(x: Tensor) -> Tensor:
        out, weight = x.new_empty(len(x), 32), torch.eye(32)
        call("product_once", x, weight, 0, None, out, len(x), 32, 32, dtype=x.dtype)
        return out

    recorded = Recording(work)
    recorded(rows(4))
    assert recorded.operations is None
    assert not recorded.memory
    assert torch.equal(recorded(rows(3)), rows(3))


@torch.no_grad()
def test_nobody_else_gets_the_memory_of_a_recording() -> None:
    recorded = Recording(normed)
    recorded(rows(8))
    others = [torch.full((8, 32), torch.nan) for _ in range(50)]
    assert torch.equal(recorded(rows(8, 1)), normed(rows(8, 1)))
    assert all(o.isnan().all() for o in others)


@torch.no_grad()
def test_memory_that_is_not_held_is_lent_again() -> None:
    recorded = Recording(normed)
    recorded(rows(8))
    assert recorded.operations is not None
    assert (
        len({operation.values[place] for operation in recorded.operations for place in (3, 4)}) == 4
    )  # of 6


@torch.no_grad()
@pytest.mark.parametrize("extra", [lambda x: x * 2, lambda x: x[:, :16], lambda x: x.to(torch.bfloat16)])
def test_work_in_which_torch_has_a_part_runs_as_it_is(extra: Callable[[Tensor], Tensor]) -> None:
    def work(x: Tensor) -> Tensor:
        return extra(normed(x))

    recorded = Recording(work)
    for seed in range(3):
        assert torch.equal(recorded(rows(4, seed)), work(rows(4, seed)))
    assert recorded.operations is None


@torch.no_grad()
def test_views_of_lent_memory_stay_whole() -> None:
    def work(x: Tensor) -> Tensor:
        left = normed(x)[:, :16]
        return torch.cat((left, normed(x * 2)[:, 16:]), 1)

    assert torch.equal(Recording(work)(rows(4)), work(rows(4)))


@torch.no_grad()
def test_a_weight_that_is_dropped_is_kept_by_the_recording_and_goes_with_it() -> None:
    weight = [torch.full((32,), 2.0)]
    dropped = weakref.ref(weight[0].untyped_storage())

    def work(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        call("add_norm", x, None, weight[0], 0.0, 1e-6, torch.empty_like(x), out, *x.shape, dtype=x.dtype)
        return out

    recorded, x = Recording(work), rows(4)
    recorded(x)
    before = recorded(x).clone()
    weight.clear()
    others = [torch.full((32,), torch.nan) for _ in range(50)]
    assert torch.equal(recorded(x), before)
    assert others[0].isnan().all()
    assert dropped() is not None
    del recorded
    gc.collect()
    assert dropped() is None


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_sampling_draws_the_same_with_and_without_recording(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, params = policy_of(name), SamplingParams(max_tokens=12)
    requests = [Request(p, [key(0, i, g) for g in range(3)]) for i, p in enumerate(random_prompts(5, 9, 2))]

    def drawn() -> list[tuple[bytes, bytes]]:
        found = list(LocalSampler(policy, 4).sample(requests, params))
        found.sort(key=lambda s: (s.request, s.sample))
        return [(s.completion.tokens.tobytes(), np.asarray(s.completion.logprobs).tobytes()) for s in found]

    with_recording = drawn()
    monkeypatch.setattr(Recording, "__call__", lambda self, x: self.work(x))
    assert drawn() == with_recording


def test_old_contents_of_the_cache_do_not_change_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = random_prompts(5, 17, 32), SamplingParams(max_tokens=20)
    requests = [Request(p, [key(0, i, g) for g in range(2)]) for i, p in enumerate(prompts)]
    policy = policy_of("qwen3")

    def drawn() -> list[bytes]:
        found = sorted(LocalSampler(policy, 4).sample(requests, params), key=lambda s: (s.request, s.sample))
        return [s.completion.logprobs.tobytes() + s.completion.tokens.tobytes() for s in found]

    clean, made = drawn(), _CompiledCache.__init__

    def littered(self: _CompiledCache, *arguments: Any) -> None:
        made(self, *arguments)
        for tensor in (t for layer in self.layers for t in layer):
            tensor.fill_(torch.nan)

    monkeypatch.setattr(_CompiledCache, "__init__", littered)
    assert drawn() == clean
