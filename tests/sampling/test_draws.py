"""Servers that draw from another distribution than they report, and requests that leave nothing to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.errors import SamplersLost
from covey.models.policy import Policy
from covey.rng import key
from covey.sampling import servers
from covey.sampling.base import Request
from covey.sampling.dialects import SGLANG, VLLM
from covey.sampling.probes import MIN_P_VALUE, p_value
from covey.sampling.remote import RemoteSampler
from covey_verify.web import ask
from tests.conftest import policy_of
from tests.sampling.remote_samplers import PARAMS, Version, asked, moved, sampler
from tests.sampling.stub import Stub, copied, running

both_kinds = pytest.mark.parametrize("speaks", ["vllm", "sglang"])

VLLM_FIELDS = """
    presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs skip_special_tokens logit_bias
    spaces_between_special_tokens include_stop_str_in_output structured_outputs allowed_token_ids bad_words
    thinking_token_budget repetition_detection watermarking n model prompt echo stream suffix use_beam_search
    length_penalty truncate_prompt_tokens response_format return_token_ids request_id
"""
"""Of CompletionRequest in vLLM 0.33, as far as they say what is drawn and reported."""
VLLM_OTHERS = {
    "user": "who asks",
    "stream_options": "nothing is streamed",
    "stream_interval": "nothing is streamed",
    "truncation_side": "nothing is truncated",
    "prompt_logprobs": "more in the reply",
    "logprob_token_ids": "more in the reply",
    "return_tokens_as_token_ids": "how the reply spells tokens",
    "return_token_offsets": "more in the reply",
    "return_mm_kwargs": "of images",
    "routed_experts_prompt_start": "more in the reply",
    "prompt_embeds": "the prompt is ids",
    "add_special_tokens": "the prompt is ids",
    "priority": "order of the work",
    "session_id": "where the work is done",
    "cache_salt": "what is shared in a cache",
    "kv_transfer_params": "where the work is done",
    "ec_transfer_params": "where the work is done",
    "vllm_xargs": "of extensions that nobody knows",
}
SGLANG_FIELDS = """
    max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
    presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos
    skip_special_tokens spaces_between_special_tokens no_stop_trim custom_params logit_bias sampling_seed
"""
"""Of SamplingParams in SGLang 0.5.23; `stream_interval` is about streams."""


def test_a_request_leaves_no_field_of_sampling_to_the_server() -> None:
    request = Request(np.array([5, 6]), [key(1)])
    body = VLLM.body(request, PARAMS, "policy", [2, 3]) | {VLLM.id_field: "a"}
    assert set(body) == set(VLLM_FIELDS.split())
    assert not set(body) & set(VLLM_OTHERS)
    sampling = SGLANG.body(request, PARAMS, "policy", [2, 3])["sampling_params"]
    assert set(sampling) == set(SGLANG_FIELDS.split())


@pytest.mark.parametrize("dialect", [VLLM, SGLANG], ids=lambda d: d.name)
def test_a_server_is_told_all_end_tokens_and_each_segment_draws_anew(dialect) -> None:
    def body(begun: int) -> dict:
        made = dialect.body(Request(np.array([5, 6]), [key(1)], begun), PARAMS, "policy", [2, 3])
        return made.get("sampling_params", made)

    assert body(0)["stop_token_ids"] == [2, 3]
    seeds = [body(begun).get("seed", body(begun).get("sampling_seed")) for begun in (0, 256, 512, 512)]
    assert len(set(seeds)) == 3
    assert seeds[2] == seeds[3]


def penalty(by: float) -> Callable[[Tensor, Tensor], Tensor]:
    """vLLM's repetition penalty: on what was read, the prompt included."""

    def alters(logits: Tensor, ids: Tensor) -> Tensor:
        own = logits[ids]
        logits[ids] = torch.where(own > 0, own / by, own * by)
        return logits

    return alters


def min_p(least: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, _: logits.masked_fill(logits < logits.max() + np.log(least), -1e9)


def top_k(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, _: logits.masked_fill(logits < logits.topk(count).values[-1], -1e9)


def bias(token: int, by: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, _: logits + by * (torch.arange(len(logits)) == token)


ALTERS = {
    "repetition_penalty 1.3": penalty(1.3),
    "min_p .05": min_p(0.05),
    "temperature .7": lambda logits, _: logits / 0.7,
    "temperature 1.3": lambda logits, _: logits / 1.3,
    "top_k 20": top_k(20),
    "logit_bias": bias(7, 4.0),
}


SERVER = "http://server"
"""The address by which the draws of a stub are keyed, whose port is another each time.

A server at temperature 1.3 is found by 1536 draws in 58 of 60 starts, and by those of this address. A test
whose draws differ from run to run would fail once in thirty.
"""


def at_server(policy: Policy, stub: Stub, folder: Path, **settings: object) -> RemoteSampler:
    """Samples from the stub, by that address."""

    def asking(url: str, *arguments: Any) -> object:
        return ask(url.replace(SERVER, stub.url), *arguments)

    return sampler(policy, [replace(stub, url=SERVER)], folder, asking, patience=0.0, **settings)


@both_kinds
@pytest.mark.parametrize("name", ALTERS)
def test_a_server_that_alters_the_distribution_is_found_though_its_logprobs_are_right(
    policy: Policy, tmp_path: Path, name: str, speaks: str
) -> None:
    with running(Stub(copied(policy), speaks, alters=ALTERS[name])) as stub:
        made = at_server(policy, stub, tmp_path)
        with pytest.raises(SamplersLost, match="alters the distribution") as caught:
            list(made.sample(asked(1), PARAMS))
        assert SERVER in str(caught.value)


@both_kinds
def test_an_honest_server_passes_and_later_proofs_are_cheap(
    policy: Policy, tmp_path: Path, speaks: str
) -> None:
    with running(Stub(copied(policy), speaks, alters=lambda logits, _: logits)) as stub:
        made = sampler(policy, [stub], tmp_path)
        list(made.sample(asked(1), PARAMS))
        first = len(stub.bodies)
        moved(policy)
        made.sync(Version(1))
        list(made.sample(asked(1), PARAMS))
        assert made.said == []
    probes = 3
    assert first == 3 * probes + 1, "log-probs, greedy, frequencies; then the group"
    assert len(stub.bodies) - first == probes + 2, "log-probs, greedy once; then the group"


def test_a_server_that_alters_the_distribution_after_a_restart_is_found(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "restarted"
    stub = Stub(copied(policy), takes_weights="says so")

    def freshly_started() -> None:
        if flag.exists():
            stub.policy.load_weights(Path(flag.read_text()))
            stub.alters = ALTERS["temperature .7"]
            flag.unlink()

    stub.before = freshly_started
    with running(stub):
        monkeypatch.setattr(servers, "ask", lambda url, **more: ask(url.replace(SERVER, stub.url), **more))
        made = at_server(policy, stub, tmp_path, restart=f'printf %s "$COVEY_MODEL" > {flag}')
        list(made.sample(asked(1), PARAMS))
        moved(policy)
        made.sync(Version(1))
        with pytest.raises(SamplersLost, match="alters the distribution"):
            list(made.sample(asked(1), PARAMS))


@pytest.mark.parametrize("sharp", [0.3, 1.0, 3.0, 12.0])
def test_right_draws_are_rarely_rare(sharp: float) -> None:
    """At the bound of one in a million there is no room for a test: at one in a hundred the rate is that."""
    random, found = np.random.default_rng(0), []
    logits = random.normal(size=(4, 300)) * sharp
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for _ in range(1500):
        counts = np.stack([random.multinomial(512, p) for p in probabilities]).astype(float)
        found.append(p_value(probabilities, counts))
    rate = np.mean(np.array(found) < 0.01)
    assert rate < 0.05, "three tests and both tails"
    assert min(found) > MIN_P_VALUE


def test_a_token_from_nowhere_is_rare_where_the_policy_is_certain() -> None:
    certain = np.array([[1 - 1e-6, *[1e-6 / 9] * 9]])
    assert p_value(certain, np.array([[256.0, *[0.0] * 9]])) > 0.1
    assert p_value(certain, np.array([[253.0, 3.0, *[0.0] * 8]])) < MIN_P_VALUE


@pytest.fixture
def policy() -> Policy:
    return policy_of("qwen3")
