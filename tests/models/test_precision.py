"""`precision: bfloat16`: rounded products between float32 weights, the same bits in sampling and training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import covey
from covey.config.load import load_config
from covey.learner.process import restore_process_settings
from covey.models.kernels.calls import MIXED_PRODUCTS, available, follow, rounding_pays
from covey.models.linear import FusedLinear
from covey.models.load import load_policy
from covey.models.packing import pack
from covey.models.policy import Policy
from covey.models.reference import Reference
from covey.models.reward_model import with_head
from covey.models.value_head import value_model_from
from covey.rng import key
from covey.runs.reader import read_environment
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from covey_verify.errors import ConfigError
from tests.conftest import policy_of, random_prompts

pytestmark = pytest.mark.skipif(
    not available(torch.bfloat16, torch.device("cpu")), reason="no C compiler on this machine"
)


def rounded(name: str) -> Policy:
    whole = policy_of(name)
    return Policy(whole.model, whole.tokenizer, rounds=True)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "granite"])
def test_sampled_log_probs_are_the_trainers_bits(name: str) -> None:
    policy, prompts = rounded(name), random_prompts(3, 17)
    assert policy.bit_exact and policy.parameters[0].dtype == torch.float32
    requests = [Request(p, [key(0, i, g) for g in range(3)]) for i, p in enumerate(prompts)]
    groups: list[list] = [[] for _ in prompts]
    for request, _, completion in LocalSampler(policy, 4).sample(requests, SamplingParams(20)):
        groups[request].append(completion)
    packed = pack(prompts, [[c.tokens for c in group] for group in groups])
    found = policy.token_outputs(packed, 1.0).logprobs.detach().numpy()
    assert np.array_equal(found, np.concatenate([c.logprobs for group in groups for c in group]))


def test_values_and_gradients_are_near_those_of_float32_and_differ() -> None:
    packed = pack(random_prompts(5, 8), [random_prompts(9, 30, seed=1), random_prompts(4, seed=2)])
    outcomes = []
    for policy in (policy_of("qwen3"), rounded("qwen3")):
        logprobs = policy.token_outputs(packed, 1.0).logprobs
        logprobs.sum().backward()
        outcomes.append([logprobs.detach(), *(p.grad for p in policy.parameters)])
    assert all(x.dtype == torch.float32 for x in outcomes[1])
    for exact, near in zip(*outcomes, strict=True):
        assert 0 < float((exact - near).norm() / exact.norm()) < 6e-2


def test_the_reference_rounds_as_the_policy_does() -> None:
    policy = rounded("qwen3")
    packed = pack(random_prompts(5), [random_prompts(9, seed=1)])
    with torch.no_grad(), Reference(policy).active() as reference:
        assert torch.equal(
            reference.token_outputs(packed, 1.0).logprobs, policy.token_outputs(packed, 1.0).logprobs
        )


def test_nothing_but_the_factors_is_rounded() -> None:
    layer = nn.Linear(48, 40)  # widths that fill no tile
    joined, x, grad = FusedLinear(layer), torch.randn(70, 48), torch.randn(70, 40)
    joined.rounds = True
    a, w, g = (t.detach().bfloat16().double() for t in (x, layer.weight, grad))
    with torch.no_grad():
        torch.testing.assert_close(joined.product(x), (a @ w.T + layer.bias).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined.product_back(grad), (g @ w).float(), rtol=1e-5, atol=1e-5)
    into = torch.ones(40, 48)
    joined.add_gradient(grad, x, into)
    torch.testing.assert_close(into, (1 + g.T @ a).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("pays", "asked"), [(True, "auto"), (False, "auto"), (True, "float32")])
def test_auto_rounds_where_that_was_measured_to_pay(monkeypatch, pays: bool, asked: str) -> None:
    monkeypatch.setattr("covey.models.load.rounding_pays", lambda: pays)
    values = {"data": {"task": "arithmetic"}, "precision": asked}
    policy = load_policy(load_config(values=values), ["1+1=2"] * 5)
    assert policy.rounds is (pays and asked == "auto")
    assert policy.deep_copy().rounds is policy.snapshot().rounds is policy.rounds
    assert value_model_from(policy).decoder.ops.products == (
        MIXED_PRODUCTS if policy.rounds else torch.float32
    )
    assert with_head(policy, "reward_model").deep_copy().rounds is policy.rounds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_rounds_under_adapters_too(monkeypatch, dtype: str) -> None:
    monkeypatch.setattr("covey.models.load.rounding_pays", lambda: True)
    values = {"data": {"task": "arithmetic"}, "lora": {"rank": 2}, "dtype": dtype}
    assert load_policy(load_config(values=values), ["1+1=2"] * 5).rounds is (dtype == "float32")


def test_a_run_continues_as_it_began(monkeypatch, tmp_path) -> None:
    """Also where it would round, or not, if it began now: the record decides, not the measurement."""
    values = {
        "model": "tiny",
        "data": {"task": "last_digit"},
        "rollout": {"max_tokens": 5, "prompts_per_step": 2, "group_size": 2},
        "train": {"steps": 2},
        "output": str(tmp_path / "run"),
    }
    for steps, pays in ((1, True), (2, False)):
        monkeypatch.setattr("covey.runs.arithmetic.rounding_pays", lambda pays=pays: pays)
        values["train"] = {"steps": steps}
        covey.train(quiet=True, rewards=[lambda completion: float(len(completion) % 2)], **values)
        assert read_environment(tmp_path / "run")["rounds_products"] is True


def test_it_is_refused_where_products_cannot_be_rounded(monkeypatch) -> None:
    monkeypatch.setattr("covey.models.forward.passes_known_answers", lambda *_: False)
    resolved = load_config(values={"data": {"task": "arithmetic"}, "precision": "bfloat16"})
    with pytest.raises(ConfigError, match="precision"):
        load_policy(resolved, ["1+1=2"] * 5)


def test_the_next_run_in_a_process_does_not_follow_the_one_before() -> None:
    with restore_process_settings():
        follow(None, rounding=True)
        assert rounding_pays()
    assert not rounding_pays()
