"""Decoding by recorded steps: what a CUDA graph would do, played on the CPU and on fake CUDA tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from transformers import AutoModelForCausalLM

from covey.config.schema import Train
from covey.learner.optimizer import Optimizer
from covey.models.ops import TorchOps
from covey.models.policy import Policy
from covey.rng import key
from covey.sampling import draw
from covey.sampling.base import Request, SamplingParams
from covey.sampling.cache import CacheEngine, _step, _TorchCache
from covey.sampling.graphs import GraphStep, Work, cuda_recorder
from covey.sampling.local import LocalSampler, _RunningCompletions
from tests.conftest import CONFIGS, policy_of, random_prompts
from tests.sampling.naive import SETTINGS

Record = Callable[[Work], Work]


class Recorder:
    """Stands in for CUDA graphs: what was recorded runs again into the very tensor of the first time."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def __call__(self, work: Work) -> Work:
        self.works.append(work)
        work()  # as a graph's recording does: twice, and only the second result stays
        result = work()

        def replay() -> Tensor:
            result.fill_(torch.nan)
            return result.copy_(work())

        return replay


class ReplayingSampler(LocalSampler):
    """Samples as on a GPU, with a recorder of the test's."""

    def __init__(self, policy: Policy, slots: int, record: Record) -> None:
        super().__init__(policy, slots)
        self.record = record

    def _engine(self, prompts: Sequence[np.ndarray], params: SamplingParams, slots: int) -> CacheEngine:
        engine = super()._engine(prompts, params, slots)
        assert isinstance(engine, CacheEngine)
        if not isinstance(engine.step, GraphStep):  # else it served before
            direct = _step(self.policy, self.policy.decoder, engine.cache)
            engine.step = GraphStep(direct, self.record, *engine.room, self.policy.device)
        self.seen = weakref.ref(engine.cache)
        return engine


def on_torch(name: str) -> Policy:
    policy = policy_of(name)
    policy.decoder.ops = TorchOps()
    policy.end_ids = list(range(0, 300, 12))  # so that lengths differ
    return policy


def sampled(sampler: LocalSampler, params: SamplingParams) -> dict:
    """Ragged groups, far more than slots, so that waiting ones take the places of those that ended."""
    prompts = random_prompts(3, 17, 1, 40, 9)
    sizes = (5, 1, 12, 3, 7)
    requests = [
        Request(p, [key(3, i, g) for g in range(n)])
        for i, (p, n) in enumerate(zip(prompts, sizes, strict=True))
    ]
    found = {(r, s): c for r, s, c in sampler.sample(requests, params)}
    assert len(found) == sum(sizes)
    return found


@pytest.mark.parametrize("params", [SamplingParams(50), SamplingParams(30, top_k=5, temperature=0.7)])
@pytest.mark.parametrize(("name", "slots"), [("qwen2", 11), ("qwen3", 3), ("llama", 64)])
def test_a_replayed_step_draws_the_bits_of_a_direct_one(
    name: str, slots: int, params: SamplingParams
) -> None:
    policy, recorder = on_torch(name), Recorder()
    direct = sampled(ReplayingSampler(policy, slots, lambda work: work), params)
    replayed = sampled(ReplayingSampler(policy, slots, recorder), params)
    exact = sampled(LocalSampler(policy, slots), params)
    assert len({len(c.tokens) for c in direct.values()}) > 3, "lengths shall differ"
    assert 0 < len(recorder.works) <= 4
    for who, completion in direct.items():
        assert np.array_equal(replayed[who].tokens, completion.tokens)
        assert np.array_equal(replayed[who].logprobs, completion.logprobs)
        assert np.array_equal(exact[who].tokens, completion.tokens)  # sizes not rounded up
        np.testing.assert_allclose(exact[who].logprobs, completion.logprobs, atol=5e-5)


def test_long_rollouts_are_recorded_once_per_bucket() -> None:
    asked: list[tuple[int, int]] = []

    def step(tokens: Tensor, kv_length: int) -> Tensor:
        asked.append((len(tokens), kv_length))
        return tokens[:, None].float()

    replayed = GraphStep(step, Recorder(), slots=100, kv_length=700, device=torch.device("cpu"))
    for running in range(100, 0, -1):
        tokens = torch.arange(running)
        assert replayed(tokens, max(1, 700 - running * 7))[:, 0].tolist() == tokens.tolist()
    assert set(asked) == {(100, 256), (64, 256), (64, 512), (32, 512), (32, 700), (16, 700), (8, 700)}


@pytest.mark.parametrize("params", SETTINGS)
def test_a_step_waits_for_no_value(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values: whatever would make the host wait for a GPU has none to return."""
    monkeypatch.setattr(draw, "candidates", lambda probs, _: probs.shape[-1])  # as on a GPU
    tokenizer = policy_of("qwen2").tokenizer
    with FakeTensorMode(), torch.no_grad():
        # Not float32, which the compiled operations would take by address.
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen2"], dtype=torch.float64)
        policy = Policy(model, tokenizer, through_modules=False)
        cache = _TorchCache(policy.decoder, 8, 9, 20, 30)
        running = _RunningCompletions(policy, [], params, 8, {})
        running.owners = [(0, i) for i in range(6)]
        step = GraphStep(_step(policy, policy.decoder, cache), Recorder(), 8, 50, policy.device)
        for _ in range(2):
            logits = step(running.slots.latest[: running.count], 40)
            cache.advance(6)
            running._draw(logits, 0)
        assert logits.shape == (6, 300)
        assert isinstance(running.slots.logprobs, FakeTensor)
        with pytest.raises(DataDependentOutputException):
            int(cache.lengths.max())
        with pytest.raises(DynamicOutputShapeException):
            _ = logits[logits > 0]


class FakeCuda:
    """torch.cuda as far as recording needs it; it notes what happens in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        self.log.append(name)
        yield
        self.log.append(f"end {name}")

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        assert device.index == 1
        return nullcontext()

    def stream(self, stream: SimpleNamespace) -> AbstractContextManager[None]:
        return self.within("side stream")

    def graph(self, graph: SimpleNamespace, **settings: object) -> AbstractContextManager[None]:
        assert settings["pool"] == "pool"
        return self.within("recording")

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self) -> None:
        self.log.append("main stream")

    def Stream(self) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace(wait_stream=lambda _: self.log.append("waits"))

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace(replay=lambda: self.log.append("replay"))


def test_work_is_recorded_after_a_first_call_without_deterministic_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    result = torch.ones(2)

    def work() -> Tensor:
        assert not torch.are_deterministic_algorithms_enabled()
        cuda.log.append("work")
        return result

    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        replay = cuda_recorder(torch.device("cuda", 1))(work)
        assert torch.get_deterministic_debug_mode() == 1
    finally:
        torch.set_deterministic_debug_mode(before)
    first = ["main stream", "waits", "side stream", "work", "end side stream"]
    assert cuda.log == [*first, "recording", "work", "end recording"]
    assert replay() is result
    assert cuda.log[-1] == "replay" and cuda.log.count("work") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [3, 64])
def test_on_a_gpu_recorded_steps_draw_what_direct_ones_draw(slots: int) -> None:
    policy = policy_of("qwen3")
    policy = Policy(policy.model.cuda(), policy.tokenizer)
    policy.end_ids = list(range(0, 300, 12))
    direct = sampled(ReplayingSampler(policy, slots, lambda work: work), SamplingParams(50))
    recorded = sampled(LocalSampler(policy, slots), SamplingParams(50))
    for who, completion in direct.items():
        assert np.array_equal(recorded[who].tokens, completion.tokens)
        np.testing.assert_allclose(recorded[who].logprobs, completion.logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "compiled", "replayed"])
def test_a_large_cache_is_freed_with_the_last_completion(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.sampling.cache.KEPT_FRACTION", 0.0)
    policy = policy_of("qwen3") if kind == "compiled" else on_torch("qwen3")
    sampler = ReplayingSampler(policy, 4, Recorder() if kind == "replayed" else lambda work: work)
    gc.collect()
    gc.disable()
    try:
        sampled(sampler, SamplingParams(5))
        if isinstance(sampler.record, Recorder):
            sampler.record.works.clear()  # a graph does not keep what it recorded
        assert sampler.seen() is None
    finally:
        gc.enable()


def test_a_small_cache_and_its_recorded_steps_serve_the_next_rollouts() -> None:
    policy, recorder = on_torch("qwen3"), Recorder()
    sampler = ReplayingSampler(policy, 8, recorder)

    def tokens(by: LocalSampler, lengths: tuple[int, ...], most: int, copies: int) -> list[list[int]]:
        prompts = enumerate(random_prompts(*lengths))
        requests = [Request(p, [key(5, i, g) for g in range(copies)]) for i, p in prompts]
        done = sorted(by.sample(requests, SamplingParams(most)), key=lambda s: (s.request, s.sample))
        return [s.completion.tokens.tolist() for s in done]

    for lengths, most, copies, served in [
        ((3, 40, 9), 50, 5, False),
        ((3, 40, 9), 50, 5, True),
        ((30, 2), 20, 3, True),  # fewer and shorter ones
        ((60, 2), 50, 3, False),
    ]:
        recorded = len(recorder.works)
        found = tokens(sampler, lengths, most, copies)
        assert (len(recorder.works) == recorded) == served
        assert found == tokens(ReplayingSampler(policy, 8, lambda work: work), lengths, most, copies)
        with torch.no_grad():  # as an update does
            for parameter in policy.parameters:
                parameter.mul_(0.9)


def test_rollouts_under_way_at_once_do_not_share_a_cache() -> None:
    sampler = ReplayingSampler(on_torch("qwen3"), 8, lambda work: work)
    requests = [Request(p, [key(5, i)]) for i, p in enumerate(random_prompts(4, 9))]
    alone = {s.request: s.completion.tokens.tolist() for s in sampler.sample(requests, SamplingParams(30))}
    first, second = (sampler.sample(requests, SamplingParams(30)) for _ in range(2))
    together = [s for both in zip(first, second, strict=True) for s in both]
    found = [(s.request, s.completion.tokens.tolist()) for s in together]
    assert sorted(found) == sorted([*alone.items()] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_leaves_the_weights_where_the_sampler_reads_them(dtype: torch.dtype) -> None:
    policy = on_torch("qwen3")
    policy.model.to(dtype)
    before = [(p.data_ptr(), p.detach().clone()) for p in policy.parameters]
    optimizer = Optimizer(policy.parameters, Train(lr=1e-2))
    for parameter in policy.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.accumulate()
    optimizer.step(1e-2)
    for parameter, (address, old) in zip(policy.parameters, before, strict=True):
        assert parameter.data_ptr() == address
        assert not torch.equal(parameter, old)
