"""The compiled operations against their torch forms, and their promise of the same bits everywhere."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from covey.models.compiled import CompiledOps
from covey.models.kernels import build
from covey.models.kernels.calls import available
from covey.models.linear import FusedLinear, PackedWeight, outer_sum
from covey.models.ops import Norm, TorchOps
from covey.models.packing import pack
from covey.models.policy import Policy
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from covey.types import Completion, SamplingMask
from tests.conftest import EXACT, policy_of, random_prompts

pytestmark = pytest.mark.skipif(
    not available(torch.float32, torch.device("cpu")), reason="no C compiler on this machine"
)
FAMILIES = ("llama", "qwen3")


def lengths_in_groups() -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    prompts = random_prompts(3, 17, 1, 40)
    groups = [random_prompts(*own, seed=s) for s, own in enumerate([(9, 1, 30), (), (2, 33), (17, 16, 15)])]
    return prompts, groups


@pytest.mark.parametrize("name", EXACT)
def test_the_models_of_these_tests_use_them(name: str) -> None:
    assert policy_of(name).bit_exact
    assert not policy_of("mistral").bit_exact


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)])
def test_values_and_gradients_are_those_of_torch(name: str, dtype: torch.dtype, close: float) -> None:
    template = policy_of(name)
    packed = pack(*lengths_in_groups())

    def run(compiled: bool) -> tuple[torch.Tensor, ...]:
        model = copy.deepcopy(template.model).to(dtype if compiled else torch.float32)
        policy = Policy(model, template.tokenizer)
        assert policy.decoder is not None
        policy.decoder.ops = policy.decoder.ops if compiled else TorchOps()
        outputs = policy.token_outputs(packed, 0.8)
        weights = torch.linspace(-1, 1, len(outputs.logprobs))
        ((outputs.logprobs + 0.3 * outputs.entropy) * weights).sum().backward()
        gradients = (p.grad.float() for p in policy.parameters if p.grad is not None)
        return outputs.logprobs.detach(), outputs.entropy.detach(), outputs.collision.detach(), *gradients

    plain, ours = run(compiled=False), run(compiled=True)
    assert len(plain) == len(ours) > 10
    for expected, got in zip(plain, ours, strict=True):
        assert float((expected - got).norm() / expected.norm()) < close


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}, {"top_k": 4}])
@pytest.mark.parametrize(("lengths", "most"), [((3, 17, 1, 70), 50), ((3, 40), 80)], ids=["prompts", "own"])
def test_sampled_log_probs_are_the_trainers_bits(
    name: str, dtype: torch.dtype, lengths: tuple[int, ...], most: int, truncation: dict[str, Any]
) -> None:
    """Also beyond 64 keys, of the prompt and of the completion: so many are read at once."""
    policy = policy_of(name)
    policy.model.to(dtype)
    policy = Policy(policy.model, policy.tokenizer)
    policy.end_ids = [] if most > 64 else policy.end_ids
    prompts = random_prompts(*lengths)
    requests = [Request(p, [key(0, i, g) for g in range(5)]) for i, p in enumerate(prompts)]
    sampled: list[list[Completion]] = [[] for _ in prompts]
    torch.set_num_threads(2)
    for request, _, completion in LocalSampler(policy, 7).sample(
        requests, SamplingParams(most, 0.9, **truncation)
    ):
        sampled[request].append(completion)
    torch.set_num_threads(1)
    every = [c for group in sampled for c in group]
    mask = SamplingMask.join([c.sampling_mask for c in every if c.sampling_mask is not None])
    packed = pack(prompts, [[c.tokens for c in group] for group in sampled], mask if truncation else None)
    found = policy.token_outputs(packed, 0.9).logprobs.detach().numpy()
    assert np.array_equal(found, np.concatenate([c.logprobs for c in every]))


@pytest.mark.parametrize("name", sorted({*EXACT} - {*FAMILIES}))
def test_the_bits_of_every_family(name: str) -> None:
    test_sampled_log_probs_are_the_trainers_bits(name, torch.float32, (3, 17, 1, 70), 50, {})


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_the_bits_of_bfloat16_weights_that_are_differences_from_one(name: str) -> None:
    policy = policy_of(name)
    policy = Policy(copy.deepcopy(policy.model).to(torch.bfloat16), policy.tokenizer)
    assert policy.decoder is not None and policy.decoder.ops.compiled and policy.decoder.all_compiled
    test_sampled_log_probs_are_the_trainers_bits(name, torch.bfloat16, (3, 17, 1, 70), 50, {})


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 4}])
def test_the_bits_of_capped_logits_under_a_mask(truncation: dict[str, Any]) -> None:
    """What is excluded is so behind the cap, in both."""
    test_sampled_log_probs_are_the_trainers_bits("gemma2", torch.float32, (3, 40), 80, truncation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_does_not_depend_on_company_or_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(67, 96).to(dtype), torch.randn(150, 96).to(dtype)
    packed = PackedWeight.pack(weight)
    whole = packed.product(x, None)
    for rows in (slice(0, 1), slice(5, 18), slice(60, 67)):
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(packed.product(x[rows].contiguous(), None), whole[rows])
    exact = x.double() @ weight.double().t()
    assert float((whole.double() - exact).norm() / exact.norm()) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 95, 200])
def test_training_and_sampling_make_the_same_product(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    joined = FusedLinear(
        torch.nn.Linear(33, 150, dtype=dtype), torch.nn.Linear(33, 10, bias=False, dtype=dtype)
    )
    x = torch.randn(rows, 33).to(dtype)
    assert torch.equal(joined.product(x), joined.product_once(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 31, 600])
def test_outer_sums_of_any_strides(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    a, b = torch.randn(rows, 150).to(dtype), torch.randn(rows, 96).to(dtype)
    exact = a.double().t() @ b.double()
    found, transposed = torch.zeros(150, 96), torch.ones(150, 96)
    outer_sum(a, b, found)
    outer_sum(a.t().contiguous().t(), b, transposed)
    assert float((found.double() - exact).norm() / exact.norm()) < 1e-6
    torch.testing.assert_close(transposed, found + 1)


def test_a_changed_weight_is_packed_again() -> None:
    layer = torch.nn.Linear(16, 32)
    joined, x = FusedLinear(layer), torch.randn(3, 16)
    joined.product(x)
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.zero_()
    torch.testing.assert_close(joined.product(x), x @ layer.weight.t(), atol=1e-5, rtol=1e-5)


def test_without_a_compiler_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.OFF, "0")
    build.library.cache_clear()
    try:
        policy = policy_of("qwen3")
        assert policy.decoder is not None
        assert isinstance(policy.decoder.ops, TorchOps) and not policy.bit_exact
        (done,) = LocalSampler(policy).sample([Request(random_prompts(4)[0], [1])], SamplingParams(5))
        assert len(done.completion.tokens) > 0
    finally:
        monkeypatch.undo()
        build.library.cache_clear()


def test_head_widths_and_dtypes_that_do_not_fit_are_left_to_torch() -> None:
    policy = policy_of("qwen3")
    assert isinstance(Policy(policy.model.double(), policy.tokenizer).decoder.ops, TorchOps)
    assert isinstance(Policy(policy.model.float(), policy.tokenizer).decoder.ops, CompiledOps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_plain_torch_sums_the_residual_stream_of_coarse_models_in_float32(dtype: torch.dtype) -> None:
    norm = Norm(Qwen3RMSNorm(64).to(dtype))
    wide = torch.promote_types(dtype, torch.float32)
    torch.manual_seed(0)
    x, *deltas = (torch.randn(5, 64).to(dtype) for _ in range(9))
    total, normed = TorchOps().add_norm(x, None, norm)
    expected = x.double()
    for delta in deltas:
        total, normed = TorchOps().add_norm(total, delta, norm)
        expected = expected + delta.double()
        assert (total.dtype, normed.dtype) == (wide, dtype)
    # Sums of bfloat16, of about 3, would be off by some thousandths.
    torch.testing.assert_close(total.double(), expected, atol=1e-5, rtol=0)
