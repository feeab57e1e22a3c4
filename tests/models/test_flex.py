"""FlexAttention with the group's mask: what torch's padded attention computes. Only traced, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

from covey.models import flex
from covey.models.flex import BLOCK, MIN_BLOCKS, MIN_HEAD_WIDTH, FlexOps, group_mask
from covey.models.ops import Heads, Ops, TorchOps
from covey.models.ops_choice import pick_ops
from covey.models.packing import pack
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from tests.conftest import policy_of, random_prompts

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:The .grad attribute of a Tensor that is not"
)
PACKINGS: dict[str, tuple[tuple[int, ...], list[tuple[int, ...]]]] = {
    "ragged": ((3, 17, 1, 40), [(9, 1, 30), (), (2, 33), (17, 16, 15)]),
    "one token": ((1,), [()]),
    "nothing read of any completion": ((2, 1), [(1, 1, 1), (1,)]),
    "prompts alone": ((5, 64, 1), [(), (), ()]),
    "blocks exactly full": ((BLOCK, BLOCK), [(BLOCK + 1,), (BLOCK + 1, 2 * BLOCK + 1)]),
    "a completion far from its prompt": ((BLOCK + 3,), [(2, 3 * BLOCK, 1, 4)]),
}
CAPS = (None, 0.5)
"""Of scores, whose deviation is 1."""


def packing(name: str):
    prompts, groups = PACKINGS[name]
    answers = [random_prompts(*own, seed=s + 1) for s, own in enumerate(groups)]
    return pack(random_prompts(*prompts), answers)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch compiles it for no CPU's backward, and refuses. Its plain form has one, which is wrong where
    # layers are recomputed and scores capped; traced as for a compiler it is right.
    made = torch.compile(torch_flex.flex_attention, backend="aot_eager", dynamic=True, fullgraph=True)
    monkeypatch.setattr(flex, "compiled_attention", lambda: made)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()  # it also counts recompilations of this form


def visible(spans: list[list[int]], tokens: int) -> np.ndarray:
    """Who sees whom, one pair at a time."""
    seen = np.zeros((tokens, tokens), bool)
    for prompt, prompt_length, start, length in spans:
        for query in range(start, start + length):
            seen[query, prompt : prompt + prompt_length] = True
            seen[query, start : query + 1] = True
    return seen


@pytest.mark.parametrize("name", PACKINGS)
def test_the_mask_is_prompt_and_self_and_leaves_out_only_blocks_without_any(name: str) -> None:
    packed = packing(name)
    tokens = len(packed.tokens)
    mask = group_mask(packed.sequences)
    expected = visible(packed.sequences.spans.tolist(), tokens)
    zero, places = torch.tensor(0), torch.arange(tokens)
    assert np.array_equal(mask.mask_mod(zero, zero, places[:, None], places), expected)
    count = max(MIN_BLOCKS, -(-tokens // BLOCK))
    whole = visible([*packed.sequences.spans.tolist(), [0, 0, tokens, count * BLOCK - tokens]], count * BLOCK)
    blocks = whole.reshape(count, BLOCK, count, BLOCK).any((1, 3))
    assert np.array_equal(mask.to_dense()[0, 0].bool(), blocks)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("name", PACKINGS)
def test_values_and_gradients_are_those_of_padded_attention(
    name: str, cap: float | None, traced: None
) -> None:
    packed = packing(name)
    torch.manual_seed(0)
    inputs = [torch.randn(len(packed.tokens), n, 16, requires_grad=True) for n in (6, 2, 2)]
    weights = torch.randn(len(packed.tokens), 6, 16)

    def run(ops: Ops) -> list[torch.Tensor]:
        out = ops.attention(packed.sequences)(*inputs, Heads(6, 2, 16, cap=cap))
        return [out, *torch.autograd.grad((out * weights).sum(), inputs)]

    for expected, got in zip(run(TorchOps()), run(FlexOps()), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", ["qwen2", "gemma2"])
def test_a_model_with_it_scores_and_learns_the_same(model: str, recompute: bool, traced: None) -> None:
    packed = packing("ragged")

    def run(ops: Ops) -> list[torch.Tensor]:
        policy = policy_of(model)
        policy.decoder.ops, policy.decoder.recompute = ops, recompute
        outputs = policy.token_outputs(packed, 0.8)
        (outputs.logprobs + 0.3 * outputs.entropy).sum().backward()
        return [outputs.logprobs.detach(), *(p.grad for p in policy.parameters if p.grad is not None)]

    for expected, got in zip(run(TorchOps()), run(FlexOps()), strict=True):
        assert float((got - expected).norm() / expected.norm()) < 2e-5


def test_a_sampler_reads_its_prompts_with_it(traced: None) -> None:
    def sampled(ops: Ops) -> list[list[int]]:
        policy = policy_of("mistral")
        policy.decoder.ops = ops
        requests = [Request(p, [i, i + 10]) for i, p in enumerate(random_prompts(4, 19, 1))]
        found = LocalSampler(policy).sample(requests, SamplingParams(12))
        return [c.tokens.tolist() for _, _, c in sorted(found, key=lambda s: s[:2])]

    assert sampled(TorchOps()) == sampled(FlexOps())


@pytest.mark.slow
@pytest.mark.parametrize("cap", CAPS)
@torch.no_grad()
def test_compiled_it_is_the_same_for_packings_of_all_lengths(cap: float | None) -> None:
    flex.compiled_attention.cache_clear()
    torch._dynamo.reset()
    for name in PACKINGS:
        sequences = packing(name).sequences
        inputs = [torch.randn(int(sequences.spans[:, 3].sum()), n, 32) for n in (4, 2, 2)]
        heads = Heads(4, 2, 32, cap=cap)
        expected, got = (ops.attention(sequences)(*inputs, heads) for ops in (TorchOps(), FlexOps()))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("name", PACKINGS)
def test_on_a_gpu_values_and_gradients_are_those_of_padded_attention(name: str, cap: float | None) -> None:
    packed = packing(name).to(torch.device("cuda"))
    torch.manual_seed(0)
    shapes = [(len(packed.tokens), n, 64) for n in (6, 2, 2)]
    inputs = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    weights = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)

    def run(ops: Ops) -> list[torch.Tensor]:
        out = ops.attention(packed.sequences)(*inputs, Heads(6, 2, 64, cap=cap))
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]

    for expected, got in zip(run(TorchOps()), run(FlexOps()), strict=True):
        assert float((got - expected).norm()) < 1e-2 * float(expected.norm()) + 1e-3


def test_heads_too_narrow_for_it_attend_in_plain_torch(traced: None) -> None:
    packed = packing("ragged")
    heads = Heads(4, 2, MIN_HEAD_WIDTH // 2)
    inputs = [torch.randn(len(packed.tokens), n, heads.width) for n in (4, 2, 2)]
    expected, got = (ops.attention(packed.sequences)(*inputs, heads) for ops in (TorchOps(), FlexOps()))
    assert torch.equal(got, expected)


def test_a_gpu_gets_it_and_another_device_does_not() -> None:
    with FakeTensorMode():
        assert isinstance(pick_ops(torch.empty(4, 32, device="cuda"), ""), FlexOps)
    assert not isinstance(pick_ops(torch.empty(4, 32), ""), FlexOps)
