"""A sampler whose weights change while completions are under way: each token is of exactly one version."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from covey.models.packing import pack
from covey.models.policy import Policy
from covey.rng import key
from covey.sampling.base import Request, SampledCompletion, SamplingParams
from covey.sampling.local import LocalSampler
from covey.system.fault_injection import Faults
from tests.conftest import policy_of, random_prompts

PARAMS = SamplingParams(max_tokens=24)


class Training:
    """A policy whose weights move, as a learner's do."""

    def __init__(self, policy: Policy) -> None:
        self.network, self.version = policy, 0
        self.begin_step = {0: policy.snapshot()}

    def update(self) -> None:
        with torch.no_grad():
            for number, parameter in enumerate(self.network.parameters):
                parameter.mul_(1.02 if number % 2 else 0.97)
        self.version += 1
        self.begin_step[self.version] = self.network.snapshot()


class Between(Faults):
    """New weights before some tokens."""

    def __init__(self, training: Training, *tokens: int) -> None:
        super().__init__()
        self.training, self.tokens, self.count = training, tokens, 0
        self.sampler = LocalSampler(training.network.snapshot(), faults=self, from_snapshot=True)

    def in_memory(self, place: str) -> None:
        self.count += 1
        if self.count in self.tokens:
            self.training.update()
            self.sampler.sync(self.training)


def asked(groups: int = 4, size: int = 3) -> list[Request]:
    prompts = random_prompts(*range(3, 3 + groups))
    return [Request(p, [key(5, i, g) for g in range(size)]) for i, p in enumerate(prompts)]


def scored(policy: Policy, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return policy.token_outputs(pack([prompt], [[tokens]]), 1.0).logprobs.numpy()


def agree(found: list[SampledCompletion], requests: list[Request], passed: Mapping[int, Policy]) -> set[int]:
    """Each token's log-prob is that of the weights it is said to be of; the versions there were."""
    seen = set[int]()
    for r, _, c in found:
        assert c.provenance.version == c.provenance.versions[0]
        assert (np.diff(c.provenance.versions) >= 0).all()
        for version in set(c.provenance.versions.tolist()):
            seen.add(version)
            own = c.provenance.versions == version
            theirs = scored(passed[version], requests[r].prompt, c.tokens)[own]
            if passed[version].bit_exact:
                assert (c.logprobs[own] == theirs).all(), "to the last bit"
            np.testing.assert_allclose(c.logprobs[own], theirs, atol=2e-4)
    return seen


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("slots", [256, 5])
def test_what_is_under_way_continues_under_new_weights(name: str, slots: int) -> None:
    training = Training(policy_of(name))
    sampler = Between(training, 4, 9, 10).sampler
    sampler.max_running = slots
    assert not sampler.bit_exact
    found = list(sampler.sample(asked(), PARAMS))
    assert len({(x.request, x.sample) for x in found}) == len(found) == 12
    assert agree(found, asked(), training.begin_step) >= {0, 1, 3}
    versions = [set(x.completion.provenance.versions.tolist()) for x in found]
    assert any(len(own) > 1 for own in versions), "some had begun before"


def test_without_new_weights_nothing_differs_from_the_trained_policy() -> None:
    policy = policy_of("qwen3")
    own = {(r, s): c for r, s, c in LocalSampler(policy).sample(asked(), PARAMS)}
    for r, s, c in LocalSampler(policy.snapshot(), from_snapshot=True).sample(asked(), PARAMS):
        assert (c.tokens == own[r, s].tokens).all()
        assert (c.logprobs == own[r, s].logprobs).all()
        assert own[r, s].provenance.versions is None
        assert set(c.provenance.versions.tolist()) == {0}


def test_the_tokens_that_could_be_drawn_are_kept_across_a_change() -> None:
    training, params = Training(policy_of("qwen3")), SamplingParams(24, top_k=3)
    for _, _, c in Between(training, 5).sampler.sample(asked(), params):
        assert c.provenance.versions.tolist() == [0] * 4 + [1] * (len(c.tokens) - 4) or len(c.tokens) < 5
        assert (np.diff(c.sampling_mask.ends, prepend=0) == 3).all()
        starts = np.concatenate([[0], c.sampling_mask.ends[:-1]])
        kept = [set(c.sampling_mask.ids[a : a + 3].tolist()) for a in starts]
        assert len(kept) == len(c.tokens)
        assert all(token in ids for token, ids in zip(c.tokens.tolist(), kept, strict=True))


def test_a_thread_never_sees_half_an_update() -> None:
    training = Training(policy_of("qwen3"))
    # With few slots it samples for long enough that a busy machine has time for updates.
    sampler = LocalSampler(training.network.snapshot(), max_running=4, from_snapshot=True)
    found, done = list[SampledCompletion](), threading.Event()

    def work() -> None:
        found.extend(sampler.sample(asked(12, 4), PARAMS))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        training.update()
        sampler.sync(training)
        done.wait(0.01)
    thread.join()
    assert len(agree(found, asked(12, 4), training.begin_step)) > 2


def test_a_snapshot_of_adapters_shares_what_is_not_trained() -> None:
    policy = policy_of("qwen3")
    for number, parameter in enumerate(policy.model.parameters()):
        parameter.requires_grad_(number % 3 == 0)
    copied = policy.snapshot()
    pairs = list(zip(policy.model.parameters(), copied.model.parameters(), strict=True))
    assert all((mine is theirs) == (not mine.requires_grad) for mine, theirs in pairs)
    assert not any(p.requires_grad for p in copied.model.parameters())
