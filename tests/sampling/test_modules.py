"""Sampling through Hugging Face modules: finished rows leave whatever an architecture keeps of a text."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BambaConfig,
    FalconH1Config,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    Mamba2Config,
    MambaConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
    RwkvConfig,
)

from covey.models.packing import pack
from covey.models.policy import Policy
from covey.rng import key
from covey.sampling.base import SamplingParams
from covey.sampling.local import LocalSampler
from covey.sampling.modules import check_sampling
from covey.types import Completion
from covey_verify.errors import ConfigError
from tests.conftest import SMALL, full_tokenizer, random_prompts, sharpened
from tests.sampling.naive import naive, requests, sampled

LINEAR = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
STATES = {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_n_heads": 4}
ALONE = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: dict[str, PretrainedConfig] = {
    # Linear attention or a convolution, and attention.
    "qwen3_5": Qwen3_5TextConfig(**SMALL, **LINEAR, layer_types=["linear_attention", "full_attention"]),
    "lfm2": Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
    # State spaces and attention, in layers of their own and side by side.
    "jamba": JambaConfig(
        **SMALL,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        num_experts=2,
        use_mamba_kernels=False,
    ),
    "bamba": BambaConfig(**SMALL, **STATES, mamba_d_head=16, attn_layer_indices=[1]),
    "falcon_h1": FalconH1Config(**SMALL, **STATES, head_dim=8, mamba_d_head=8, mamba_d_ssm=32),
    # State spaces alone.
    "mamba": MambaConfig(**ALONE, state_size=8),
    "mamba2": Mamba2Config(**ALONE, state_size=8, head_dim=16, num_heads=4, n_groups=1, chunk_size=8),
    # Its attention sees chunks, and its decoder has another name than `base_model` expects.
    "llama4": Llama4TextConfig(
        **SMALL, head_dim=8, num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=8
    ),
}


def policy_with(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Policy:
    policy = Policy(sharpened(config).to(dtype), full_tokenizer())
    policy.end_ids = list(range(0, 300, 4))  # so that completions have many lengths
    return policy


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_completions_are_those_that_each_would_be_alone(name: str) -> None:
    policy, params = policy_with(CONFIGS[name]), SamplingParams(max_tokens=12)
    prompts = random_prompts(2, 9, 5)
    found = sampled(policy, requests(prompts), params)
    assert len({len(c.tokens) for c in found.values()}) > 2
    for (r, s), completion in found.items():
        alone = naive(policy, prompts[r], key(7, 0, r, s), params)
        assert completion.tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(completion.logprobs, alone.logprobs, atol=2e-4)
    np.testing.assert_allclose(*scored_again(policy, prompts, found), atol=2e-4)


def scored_again(
    policy: Policy, prompts: list[np.ndarray], found: dict[tuple[int, int], Completion]
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs by a forward pass over the whole completions, and those recorded in sampling."""
    groups = [[found[r, s] for s in range(3)] for r in range(len(prompts))]
    outputs = policy.token_outputs(pack(prompts, [[c.tokens for c in group] for group in groups]), 1.0)
    recorded = np.concatenate([c.logprobs for group in groups for c in group])
    return outputs.logprobs.detach().numpy(), recorded


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_architectures_with_states_are_sampled_from_in_bfloat16(name: str) -> None:
    policy = policy_with(CONFIGS[name], torch.bfloat16)
    assert policy.plain_head  # also where the residual stream stays in float32
    prompts = random_prompts(2, 9, 5)
    found = sampled(policy, requests(prompts), SamplingParams(max_tokens=12))
    scores, recorded = scored_again(policy, prompts, found)
    # A state adds up the rounding of all tokens before, so single log-probs differ by a quarter of a nat.
    assert np.abs(scores - recorded).mean() < 0.05


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (RwkvConfig(**{**ALONE, "pad_token_id": None}), "rwkv .* no transformers cache"),
        (Lfm2Config(**SMALL, layer_types=["conv", "conv"]), "lfm2 .* fail with a cache .*get_seq_length"),
    ],
    ids=["own states", "no attention"],
)
def test_an_architecture_that_cannot_be_sampled_from_is_refused(config: PretrainedConfig, why: str) -> None:
    sampler = LocalSampler(policy_with(config))
    with pytest.raises(ConfigError, match=why):
        list(sampler.sample(requests(random_prompts(3)), SamplingParams(max_tokens=2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_architecture_whose_states_padding_would_change_is_refused(dtype: torch.dtype) -> None:
    policy = policy_with(CONFIGS["mamba2"], dtype)
    forward = policy.model.forward
    check_sampling(policy)

    @wraps(forward)
    def unmasked(attention_mask: object = None, **others: Any) -> Any:
        return forward(**others)

    policy.model.forward = unmasked
    with pytest.raises(ConfigError, match="prompts of several lengths"):
        check_sampling(policy)
