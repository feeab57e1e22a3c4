"""The local sampler: what it draws depends on the keys alone, and it reports true log-probs."""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from covey.models.packing import pack
from covey.models.policy import Policy
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.sampling.cache import CacheEngine
from covey.sampling.draw import kept_tokens
from covey.sampling.local import LocalSampler
from covey.system.fault_injection import Faults
from tests.conftest import policy_of, random_prompts
from tests.sampling.naive import SETTINGS, naive, requests, sampled
from tests.sampling.remote_samplers import Listener


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "gpt2", "gemma2", "qwen3_moe"])
def test_equals_a_naive_loop_token_for_token(name: str, params: SamplingParams) -> None:
    policy = policy_of(name)
    prompts = random_prompts(2, 9, 5)
    found = sampled(policy, requests(prompts), params, slots=4)
    for (r, s), completion in found.items():
        expected = naive(policy, prompts[r], key(7, 0, r, s), params)
        assert completion.tokens.tolist() == expected.tokens.tolist()
        assert completion.finish == expected.finish
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=2e-4)


def test_a_completion_keeps_its_own_limit_when_it_moves_into_the_slot_of_another() -> None:
    policy, params = policy_of("qwen3"), SamplingParams(max_tokens=30)
    prompts, rooms = random_prompts(3, 4, 5, 6), (2, 25, 11, 7)
    asked = [replace(r, max_tokens=n) for r, n in zip(requests(prompts, size=1), rooms, strict=True)]
    for (r, _), completion in sampled(policy, asked, params).items():
        whole = naive(policy, prompts[r], key(7, 0, r, 0), params).tokens[: rooms[r]]
        assert completion.tokens.tolist() == whole.tolist()


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_sampler_that_runs_out_of_memory_says_the_same_with_fewer_at_once(name: str) -> None:
    policy, params, listener = policy_of(name), SamplingParams(max_tokens=20), Listener()
    asked = requests(random_prompts(4, 11, 7, 3), size=5)
    sampler = LocalSampler(policy, 16, Faults("memory.sampling@3,memory.sampling@12-13"), listener)
    found = {(r, s): c for r, s, c in sampler.sample(asked, params)}
    assert listener.running == [8, 4, 2]
    for place, completion in sampled(policy, asked, params).items():
        assert found[place].tokens.tolist() == completion.tokens.tolist()
        np.testing.assert_allclose(found[place].logprobs, completion.logprobs, atol=5e-4)


@pytest.mark.slow  # what fits depends on what other tests have left in the heap
@pytest.mark.skipif(sys.platform != "linux", reason="address space is counted by Linux only")
def test_memory_that_is_really_used_up(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, asked, params = Listener(), requests(random_prompts(4, 11), size=8), SamplingParams(200_000)
    monkeypatch.setattr(policy, "end_ids", list(range(300)))  # every completion is one token long
    expected = sampled(policy, asked, SamplingParams(8))
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 29), before[1]))  # 16 caches need 3.2 GiB
    try:
        found = {(r, s): c for r, s, c in LocalSampler(policy, monitor=listener).sample(asked, params)}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert listener.running[:1] == [8]
    assert all(found[place].tokens == c.tokens for place, c in expected.items())


def test_an_error_that_is_not_about_memory_is_not_tried_again(policy: Policy, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(policy, "head", broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        list(LocalSampler(policy).sample(requests(random_prompts(4)), SamplingParams(max_tokens=4)))


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_batch_order_and_company_do_not_matter(name: str) -> None:
    policy, params = policy_of(name), SamplingParams(max_tokens=20)
    prompts = random_prompts(4, 11, 7, 3)
    together = sampled(policy, requests(prompts, size=5), params)
    crowded = sampled(policy, requests(prompts, size=5), params, slots=3)
    asked = requests(prompts, size=5)
    backwards = sampled(policy, asked[::-1], params)
    for (r, s), completion in together.items():
        alone = sampled(policy, [Request(prompts[r], [asked[r].streams[s]])], params)[0, 0]
        for other in (crowded[r, s], backwards[len(prompts) - 1 - r, s], alone):
            assert completion.tokens.tolist() == other.tokens.tolist()


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("truncated", [{}, {"top_k": 5}, {"top_p": 0.9}])
@pytest.mark.parametrize("compiled", [True, False])
def test_greedy_completions_beside_drawn_ones(
    name: str, truncated: dict, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("covey.sampling.draw.available", lambda *_: False)
    policy, params = policy_of(name), SamplingParams(max_tokens=20, temperature=1.3, **truncated)
    asked = requests(random_prompts(4, 11, 7), size=3)
    greedy = [replace(r, streams=r.streams[:1], greedy=True) for r in asked]
    together = sampled(policy, [*asked, *greedy], params, slots=5)
    drawn = sampled(policy, asked, params)
    likeliest = sampled(policy, greedy, replace(params, temperature=0.0))
    for (r, s), completion in together.items():
        alone = drawn[r, s] if r < len(asked) else likeliest[r - len(asked), s]
        assert completion.tokens.tolist() == alone.tokens.tolist()


def test_log_probs_are_those_of_the_trainer(policy: Policy) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8)
    prompts = random_prompts(6, 13)
    for (r, _), completion in sampled(policy, requests(prompts), params).items():
        packed = pack([prompts[r]], [[completion.tokens]])
        scored = policy.token_outputs(packed, params.temperature).logprobs.detach().numpy()
        np.testing.assert_allclose(completion.logprobs, scored, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_what_could_be_drawn_is_recorded_with_every_token(name: str) -> None:
    policy, prompts = policy_of(name), random_prompts(4, 11, 7)
    params = SamplingParams(max_tokens=15, temperature=0.8, top_k=6, top_p=0.9)
    asked = requests(prompts, size=4)
    for (r, _), completion in sampled(policy, asked, params, slots=5).items():
        mask, done = completion.sampling_mask, list(prompts[r])
        assert mask is not None and len(mask.ends) == len(completion.tokens)
        assert mask.ids.dtype == np.int32
        for ids, token, recorded in zip(
            np.split(mask.ids, mask.ends[:-1]), completion.tokens, completion.logprobs, strict=True
        ):
            with torch.no_grad():
                logits = policy.model(torch.tensor([done])).logits[0, -1] / params.temperature
            assert ids.tolist() == kept_tokens(logits[None], params).nonzero()[:, 1].tolist()
            level = logits[torch.from_numpy(ids).long()].logsumexp(0)
            assert recorded == pytest.approx(float(logits[token] - level), abs=2e-4)
            done.append(token)


def test_without_truncation_nothing_is_recorded(policy: Policy) -> None:
    for params in (SamplingParams(5), SamplingParams(5, temperature=0.0, top_p=0.5, top_k=3)):
        for completion in sampled(policy, requests(random_prompts(4)), params).values():
            assert completion.sampling_mask is None


def test_the_end_token_is_kept_and_ends_the_completion(policy: Policy) -> None:
    found = sampled(policy, requests(random_prompts(5), size=64), SamplingParams(max_tokens=60))
    finishes = [c.finish for c in found.values()]
    assert {"stop", "length"} == set(finishes)
    for completion in found.values():
        ends = np.isin(completion.tokens, policy.end_ids)
        assert not ends[:-1].any()
        assert ends[-1] == (completion.finish == "stop")
        assert completion.finish == "stop" or len(completion.tokens) == 60


def test_an_end_token_at_the_last_position_is_no_truncation(policy: Policy, monkeypatch) -> None:
    asked = requests(random_prompts(5), size=16)
    drawn = sampled(policy, asked, SamplingParams(max_tokens=3))
    monkeypatch.setattr(policy, "end_ids", [int(drawn[0, 0].tokens[2])])
    completion = sampled(policy, asked, SamplingParams(max_tokens=3))[0, 0]
    assert len(completion.tokens) == 3
    assert completion.finish == "stop"


def test_stop_strings_end_with_the_token_that_completes_them(policy: Policy) -> None:
    free = SamplingParams(max_tokens=40)
    found = sampled(policy, requests(random_prompts(5), size=8), free)
    text = next(c.text for c in found.values() if len(c.text) > 12)
    stop = text[5:8]
    stopped = sampled(policy, requests(random_prompts(5), size=8), SamplingParams(40, stop=(stop,)))
    for name, completion in stopped.items():
        whole = found[name]
        assert whole.tokens.tolist()[: len(completion.tokens)] == completion.tokens.tolist()
        if stop in whole.text:
            assert stop in completion.text
            assert stop not in policy.decode(completion.tokens[:-1].tolist())
            assert completion.finish == "stop"


def test_the_name_of_the_padding_may_be_a_stop_string(policy: Policy) -> None:
    """No text shows padding at its end; the token ends the completion itself, not with the next one."""
    pad = policy.tokenizer.pad_token_id
    assert pad not in policy.end_ids
    asked = requests(random_prompts(5), size=64)
    found = sampled(policy, asked, SamplingParams(60))
    first = {name: c.tokens.tolist().index(pad) for name, c in found.items() if pad in c.tokens}
    stopped = sampled(policy, asked, SamplingParams(60, stop=(policy.tokenizer.pad_token,)))
    assert first
    for name, place in first.items():
        assert stopped[name].tokens.tolist() == found[name].tokens[: place + 1].tolist()
        assert stopped[name].finish == "stop"


class BytesText:
    """The decoder of a tokenizer whose tokens are bytes."""

    def __call__(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    text_with_specials = __call__


def test_a_stop_string_is_found_where_every_byte_is_a_token(policy: Policy, monkeypatch) -> None:
    stop = "最后的答案到此为止了"
    drawn = list(f"so {stop} and more".encode())
    # Byte by byte, as by a tokenizer without merges for this script.
    monkeypatch.setattr(policy, "decode", BytesText())
    bias = torch.full((len(drawn), policy.drawable_ids), -1e9)
    for place, token in enumerate(drawn):
        bias[place, token] = 1e9
    places = iter(bias)
    monkeypatch.setattr("covey.sampling.local.exclude_unknown", lambda logits, _: next(places)[None])
    params = SamplingParams(len(drawn), stop=(stop,))
    completion = sampled(policy, requests(random_prompts(5), size=1), params)[0, 0]
    assert completion.text == f"so {stop}"


def test_frequencies_follow_the_distribution(policy: Policy) -> None:
    prompt = random_prompts(4)[0]
    found = sampled(policy, requests([prompt], size=4000), SamplingParams(max_tokens=1), slots=4000)
    counts = np.bincount([c.tokens[0] for c in found.values()], minlength=300) / 4000
    probs = policy.model(torch.tensor(prompt)[None]).logits[0, -1].softmax(-1).detach().numpy()
    likely = probs > 0.005
    assert likely.sum() > 20
    deviation = (counts - probs)[likely] / np.sqrt(probs[likely] * (1 - probs[likely]) / 4000)
    assert np.abs(deviation).max() < 4.5


def test_no_requests_is_no_work(policy: Policy) -> None:
    assert list(LocalSampler(policy).sample([], SamplingParams())) == []


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_requests_with_one_prompt_read_it_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation's sampled and greedy completions of a problem are two requests."""
    policy, prefilled_requests = policy_of(name), list[int]()
    prefill = CacheEngine._prefill
    monkeypatch.setattr(
        CacheEngine, "_prefill", lambda self, rs: (prefilled_requests.extend(rs), prefill(self, rs))
    )
    asked = [
        r for p in random_prompts(5, 9) for r in (Request(p, [1, 2]), Request(p.copy(), [1], greedy=True))
    ]
    for slots in (1, 2, 5, 6):
        prefilled_requests.clear()
        completions = sampled(policy, asked, SamplingParams(8), slots=slots)
        assert prefilled_requests == [0, 2]
        for (r, s), completion in completions.items():
            request = replace(asked[r], streams=asked[r].streams[s : s + 1])
            repetition = sampled(policy, [request], SamplingParams(8))[0, 0]
            assert np.array_equal(completion.tokens, repetition.tokens)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3", "gemma", "gemma2"])
@pytest.mark.parametrize("shared", [4, 60])
def test_prompts_that_begin_alike_are_read_as_if_each_were_alone(name: str, shared: int) -> None:
    policy, start = policy_of(name), random_prompts(shared)[0]
    prompts = [np.concatenate((start, rest)) for rest in random_prompts(1, 9, 30, seed=1)]
    requests = [Request(p, [1, 2]) for p in prompts]
    drawn = LocalSampler(policy).sample(requests, SamplingParams(8))
    together = {(s.request, s.sample): s.completion for s in drawn}
    for r, request in enumerate(requests):
        for s in LocalSampler(policy).sample([request], SamplingParams(8)):
            found = together[r, s.sample]
            assert (found.tokens == s.completion.tokens).all()
            if policy.bit_exact:
                assert np.array_equal(found.logprobs, s.completion.logprobs)
            assert np.allclose(found.logprobs, s.completion.logprobs, atol=1e-5)
