"""`precision: bfloat16`: rounded products between float32 weights, the same bits in sampling and training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from covey.config.load import load_config
from covey.errors import ConfigError
from covey.kernels.calls import available
from covey.models.load import load_policy
from covey.models.packing import pack
from covey.models.policy import Policy
from covey.models.reference import Reference
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from tests.conftest import policy_of, random_prompts

pytestmark = pytest.mark.skipif(
    not available(torch.bfloat16, torch.device("cpu")), reason="no C compiler on this machine"
)


def rounded(name: str) -> Policy:
    whole = policy_of(name)
    return Policy(whole.model, whole.tokenizer, rounds=True)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "granite"])
def test_sampled_log_probs_are_the_trainers_bits(name: str) -> None:
    policy, prompts = rounded(name), random_prompts(3, 17)
    assert policy.bit_exact and policy.parameters[0].dtype == torch.float32
    requests = [Request(p, [key(0, i, g) for g in range(3)]) for i, p in enumerate(prompts)]
    groups: list[list] = [[] for _ in prompts]
    for request, _, completion in LocalSampler(policy, 4).sample(requests, SamplingParams(20)):
        groups[request].append(completion)
    packed = pack(prompts, [[c.tokens for c in group] for group in groups])
    found = policy.score(packed, 1.0).logprobs.detach().numpy()
    assert np.array_equal(found, np.concatenate([c.logprobs for group in groups for c in group]))


def test_values_and_gradients_are_near_those_of_float32_and_differ() -> None:
    packed = pack(random_prompts(5, 8), [random_prompts(9, 30, seed=1), random_prompts(4, seed=2)])
    outcomes = []
    for policy in (policy_of("qwen3"), rounded("qwen3")):
        logprobs = policy.score(packed, 1.0).logprobs
        logprobs.sum().backward()
        outcomes.append([logprobs.detach(), *(p.grad for p in policy.parameters)])
    assert all(x.dtype == torch.float32 for x in outcomes[1])
    for exact, near in zip(*outcomes, strict=True):
        assert 0 < float((exact - near).norm() / exact.norm()) < 6e-2


def test_the_reference_rounds_as_the_policy_does() -> None:
    policy = rounded("qwen3")
    packed = pack(random_prompts(5), [random_prompts(9, seed=1)])
    with torch.no_grad(), Reference(policy).active() as reference:
        assert torch.equal(reference.score(packed, 1.0).logprobs, policy.score(packed, 1.0).logprobs)


@pytest.mark.parametrize("other", [{}, {"lora": {"rank": 2}}])
def test_it_is_refused_where_products_cannot_be_rounded(monkeypatch, other: dict, tmp_path) -> None:
    if not other:
        monkeypatch.setattr("covey.models.forward.correct", lambda *_: False)
    loaded = load_config(values={"data": {"task": "arithmetic"}, "precision": "bfloat16", **other})
    with pytest.raises(ConfigError, match="precision"):
        load_policy(loaded, ["1+1=2"] * 5)
