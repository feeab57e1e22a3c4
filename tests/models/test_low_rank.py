"""Adapters in our own forward: one matrix, W + s B A, with which a token is sampled and trained."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.config.python_objects import ModelObject
from covey.config.schema import Lora
from covey.models.load import with_lora
from covey.models.model_objects import policy_of as policy_of_given
from covey.models.ops import TorchOps
from covey.models.packing import Packed, pack
from covey.models.policy import Policy, save_policy
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from covey_verify.errors import ConfigError
from tests.conftest import CONFIGS, policy_of, random_prompts, sharpened

pytest.importorskip("peft")
from peft import LoraConfig, get_peft_model


def adapted(
    rank: int, targets: str | tuple[str, ...] = "all-linear", dtype: torch.dtype = torch.float32
) -> Policy:
    """With adapters that have learned something; at first B is 0."""
    policy = with_lora(
        sharpened(CONFIGS["qwen3"]).to(dtype), policy_of("qwen3").tokenizer, Lora(rank=rank, targets=targets)
    )
    torch.manual_seed(0)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return policy


def sequences() -> Packed:
    return pack(random_prompts(5, 9), [random_prompts(7, 12, seed=1), random_prompts(3, 20, seed=2)])


def scored(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradients of some sum of them."""
    policy.model.zero_grad()
    found = policy.token_outputs(sequences(), 1.0).logprobs
    (found * torch.linspace(-1, 1, len(found))).sum().backward()
    return found.detach(), {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj"), ("q_proj", "lm_head")])
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_values_and_gradients_are_those_of_the_layers_of_peft(rank: int, targets: str) -> None:
    policy = adapted(rank, targets)
    assert policy.decoder.ops.compiled
    ours, gradients = scored(policy)
    policy.decoder.ops = TorchOps()
    theirs, expected = scored(policy)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert gradients.keys() == expected.keys()
    assert all("lora_" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], atol=1e-5 * float(expected[name].abs().max()), rtol=1e-4
        )


@pytest.mark.parametrize("relative", ["use_dora", "lora_bias"])
def test_relatives_of_lora_are_computed_by_peft(relative: str) -> None:
    """DoRA scales each row of the sum; as W + s B A another model was sampled, and its scales untrained."""
    adapter = get_peft_model(
        sharpened(CONFIGS["qwen2"]), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **{relative: True})
    )
    torch.manual_seed(0)
    for name, parameter in adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    given = ModelObject(adapter, policy_of("qwen2").tokenizer)
    policy = policy_of_given(given)
    ids = torch.tensor([random_prompts(12)[0].tolist()])
    with torch.no_grad():
        expected = adapter(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    found = policy.token_outputs(pack([ids[0, :1].numpy()], [[ids[0, 1:].numpy()]]), 1.0).logprobs
    torch.testing.assert_close(found.detach(), expected, atol=1e-5, rtol=0)
    found.sum().backward()
    assert all(p.grad is not None for p in adapter.parameters() if p.requires_grad)


def test_adapters_that_would_not_be_trained_are_refused() -> None:
    tokenizer = policy_of("qwen3").tokenizer
    layers = LoraConfig(r=4, target_modules=["q_proj"])
    merged = get_peft_model(sharpened(CONFIGS["qwen3"]), layers)
    merged.merge_adapter()
    with pytest.raises(ConfigError, match="its adapter is merged into the weights"):
        policy_of_given(ModelObject(merged, tokenizer))
    named = get_peft_model(sharpened(CONFIGS["qwen3"]), layers, adapter_name="mine")
    with pytest.raises(ConfigError, match="its active adapter is mine"):
        policy_of_given(ModelObject(named, tokenizer))
    with_bias = LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True)
    with warnings.catch_warnings(action="ignore"):  # peft says so too
        biased = get_peft_model(sharpened(CONFIGS["qwen3"]), with_bias)
    with pytest.raises(ConfigError, match="q_proj has no bias that the adapter's could be merged into"):
        policy_of_given(ModelObject(biased, tokenizer))


def test_a_frozen_adapter_is_refused_with_the_argument_that_peft_has_for_it() -> None:
    adapter = get_peft_model(sharpened(CONFIGS["qwen3"]), LoraConfig(r=4, target_modules=["q_proj"]))
    adapter.requires_grad_(False)  # as PeftModel.from_pretrained leaves it
    with pytest.raises(ConfigError, match=r"PeftModel.from_pretrained\(..., is_trainable=True\)"):
        policy_of_given(ModelObject(adapter, policy_of("qwen3").tokenizer))


@pytest.mark.parametrize(("module", "layer"), [("lm_head", "output layer"), ("embed_tokens", "embedding")])
def test_adapters_that_merging_would_put_into_another_layer_too_are_refused(module: str, layer: str) -> None:
    layers = LoraConfig(r=4, target_modules=["q_proj", module])
    with warnings.catch_warnings(action="ignore"):  # peft says so too
        tied, own = (get_peft_model(sharpened(CONFIGS[name]), layers) for name in ("qwen2", "qwen3"))
    tokenizer = policy_of("qwen3").tokenizer
    with pytest.raises(ConfigError, match=f"its adapter includes the {layer}, whose weights .* share"):
        policy_of_given(ModelObject(tied, tokenizer))
    policy_of_given(ModelObject(own, tokenizer))


@pytest.mark.parametrize("precision", ["float32", "rounded", "bfloat16"])
def test_a_token_is_sampled_and_trained_by_the_same_bits(precision: str) -> None:
    policy = adapted(4, dtype=torch.bfloat16 if precision == "bfloat16" else torch.float32)
    if precision == "rounded":
        policy.round_products()
    assert policy.bit_exact
    requests = [Request(p, [key(1, i, g) for g in range(3)]) for i, p in enumerate(random_prompts(5, 9))]
    for found in LocalSampler(policy).sample(requests, SamplingParams(max_tokens=12)):
        prompt, completion = requests[found.request].prompt, found.completion
        with torch.no_grad():
            again = policy.token_outputs(pack([prompt], [[completion.tokens]]), 1.0).logprobs
        np.testing.assert_array_equal(again.numpy(), completion.logprobs)


def test_packed_copies_are_kept_neither_by_loading_nor_while_adapters_are_merged(tmp_path: Path) -> None:
    """A run of SmolLM2-135M took its most memory, 2.4 GB, where it wrote its model."""
    policy = adapted(4)
    assert packed_copies(policy) == 0
    before = generated(policy)
    assert packed_copies(policy) > 0
    save_policy(policy, tmp_path / "final")
    assert packed_copies(policy) == 0
    assert generated(policy) == before


def generated(policy: Policy) -> list[list[int]]:
    requests = [Request(p, [key(1, i)]) for i, p in enumerate(random_prompts(5, 9))]
    sampled = LocalSampler(policy).sample(requests, SamplingParams(max_tokens=12))
    return [s.completion.tokens.tolist() for s in sorted(sampled, key=lambda s: s.request)]


def packed_copies(policy: Policy) -> int:
    assert policy.decoder is not None
    return sum(linear.packed is not None for linear in policy.decoder.linears)


def test_gradients_do_not_depend_on_threads() -> None:
    policy, found = adapted(4), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(scored(policy))
    for logprobs, gradients in found[1:]:
        assert torch.equal(logprobs, found[0][0])
        assert all(torch.equal(g, found[0][1][n]) for n, g in gradients.items())


def test_the_reference_is_the_model_without_them_and_they_come_back() -> None:
    policy = adapted(4)
    with torch.no_grad():
        on = policy.token_outputs(sequences(), 1.0).logprobs
        with policy.adapter.disable_adapter():
            off = policy.token_outputs(sequences(), 1.0).logprobs
        assert torch.equal(off, policy_of("qwen3").token_outputs(sequences(), 1.0).logprobs)
        assert torch.equal(on, policy.token_outputs(sequences(), 1.0).logprobs)
        assert not torch.equal(on, off)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_in_bfloat16_adapters_are_columns_of_the_product(rank: int, targets: str) -> None:
    """A sum with bfloat16 weights would lose small updates; values agree with peft's up to rounding."""
    policy = adapted(rank, targets, dtype=torch.bfloat16)
    assert policy.decoder.ops.compiled
    ours, gradients = scored(policy)
    policy.decoder.ops = TorchOps()
    theirs, expected = scored(policy)
    torch.testing.assert_close(ours, theirs, atol=0.1, rtol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert float((gradient - expected[name]).norm()) < 0.1 * float(expected[name].norm()), name


def test_an_update_that_bfloat16_weights_would_lose_has_its_effect() -> None:
    policy = adapted(4, dtype=torch.bfloat16)
    layer = policy.decoder.layers[0].down
    weight = layer.modules[0].weight
    a, b = layer.low_rank[0].parameters
    signs = torch.tensor([1.0, -1.0]).repeat(weight.shape[1] // 2)  # the product with ones is 0
    with torch.no_grad():
        weight.copy_(signs)
        a.fill_(1.0)
        b.fill_(5e-5)
        out = layer.product_once(torch.ones(3, weight.shape[1], dtype=torch.bfloat16))
        update = layer.low_rank[0].scale * (b @ a)
        assert torch.equal((weight + update).to(torch.bfloat16), weight)
    expected = update.sum(1).to(torch.bfloat16).expand(3, -1)
    torch.testing.assert_close(out, expected, atol=0, rtol=0.01)
