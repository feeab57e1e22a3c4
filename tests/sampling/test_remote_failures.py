"""Servers that fail: they talk nonsense, die, are busy or slow; the run continues or says why not."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from covey.config.sampling import Servers
from covey.errors import SamplersLost
from covey.models.policy import Policy
from covey.sampling.base import Request, SamplingParams
from covey.sampling.remote import RemoteSampler
from covey_verify.errors import ConfigError
from tests.conftest import policy_of, random_prompts
from tests.models.padded import padded
from tests.sampling.remote_samplers import PARAMS, Version, asked, moved, sampler, together
from tests.sampling.stub import ENDLESS, Reply, Stub, copied, running
from tests.sampling.waiting import only_after, soon


@pytest.fixture
def policy() -> Policy:
    return policy_of("qwen3")


Change = Callable[[list], list]


def in_first(
    ids: Change = list, logprobs: Change = list, finish: str | None = None
) -> Callable[[Reply], Reply]:
    """The reply, in the words of either kind, with other values in its first completion."""

    def spoil(reply: Reply) -> Reply:
        if "choices" in reply:
            one = reply["choices"][0]
            one["token_ids"] = ids(one["token_ids"])
            one["logprobs"]["token_logprobs"] = logprobs(one["logprobs"]["token_logprobs"])
            one["finish_reason"] = finish or one["finish_reason"]
        else:
            meta = (reply[0] if isinstance(reply, list) else reply)["meta_info"]
            values, tokens, _ = zip(*meta["output_token_logprobs"], strict=True)
            pairs = zip(logprobs(list(values)), ids(list(tokens)), strict=False)
            meta["output_token_logprobs"] = [[p, t, None] for p, t in pairs]
            meta["finish_reason"] = {"type": finish} if finish else meta["finish_reason"]
        return reply

    return spoil


SPOILED: dict[str, Callable[[Reply], Reply]] = {
    "wrong ids": in_first(ids=lambda ids: [300, *ids[1:]]),
    "no ids": in_first(ids=lambda ids: [None] * len(ids)),
    "text for ids": in_first(ids=lambda ids: ["x"] * len(ids)),
    "short": in_first(ids=lambda ids: ids[:1], finish="length"),
    "positive": in_first(logprobs=lambda p: [0.5, *p[1:]]),
    "no number": in_first(logprobs=lambda p: [float("nan"), *p[1:]]),
    "too few": lambda reply: {"choices": []} if "choices" in reply else [],
    "aborted": in_first(finish="abort"),
    "never ended": in_first(ids=lambda _: [5] * 3, logprobs=lambda _: [-1.0] * 3, finish="stop"),
    "garbage": lambda _: b"<html>hello</html>",
    "empty": lambda _: b"",
    "nested": lambda _: b"[" * 200_000,
    "endless": lambda _: ENDLESS,
}
both_kinds = pytest.mark.parametrize("speaks", ["vllm", "sglang"])


@both_kinds
@pytest.mark.parametrize("change", SPOILED)
def test_nonsense_is_never_trained_on_and_its_server_is_left_out(
    policy: Policy, tmp_path: Path, change: str, speaks: str
) -> None:
    good, bad = Stub(copied(policy), speaks), Stub(copied(policy), speaks)
    with running(good), running(bad):
        made = sampler(policy, [good, bad], tmp_path, timeout=2.0)
        list(made.sample(asked(1), PARAMS))
        bad.spoil = SPOILED[change]
        only_after(good, bad)
        found = together(list(made.sample(asked(8), PARAMS)))
        assert len(found) == 24
        alone = sampler(policy, [good], tmp_path)
        expected = together(list(alone.sample(asked(8), PARAMS)))
        assert all((found[k] == v).all() for k, v in expected.items()), "asked again with the same keys"
        assert len(made.said) == 1
        assert bad.url in made.said[0]


PLAUSIBLE: dict[str, Callable[[Reply], Reply]] = {
    "log-probs of something else": in_first(logprobs=lambda p: [x - 0.1 for x in p]),
    "ids of something else": in_first(ids=lambda ids: [5 + (t + 1) % 200 for t in ids[:-1]] + ids[-1:]),
}


@both_kinds
@pytest.mark.parametrize("change", PLAUSIBLE)
def test_numbers_that_could_be_true_and_are_not_are_found_before_a_group_is_asked(
    policy: Policy, tmp_path: Path, change: str, speaks: str
) -> None:
    good, bad = Stub(copied(policy), speaks), Stub(copied(policy), speaks, spoil=PLAUSIBLE[change])
    with running(good), running(bad):
        made = sampler(policy, [good, bad], tmp_path)
        assert len(list(made.sample(asked(8), PARAMS))) == 24
        assert bad.url in made.said[0]
        assert "nats on average from version 0" in made.said[0]


@both_kinds
def test_a_server_that_dies_in_the_middle_costs_nothing(policy: Policy, tmp_path: Path, speaks: str) -> None:
    good, other = Stub(copied(policy), speaks), Stub(copied(policy), speaks)
    with running(good):
        with running(other):
            made = sampler(policy, [good, other], tmp_path)
            assert not made.bit_exact, "both have proven themselves"
            alive = iter((None, None))
            other.before = lambda: next(alive, 500)
            good.before = lambda: soon(lambda: made.fleet.servers[1].excluded)  # or it might do all the work
            assert len(together(list(made.sample(asked(12), PARAMS)))) == 36
        with running(other, int(other.url.rpartition(":")[2])):
            other.before = good.before = lambda: None
            made.fleet.servers[1].last_tried = 0.0
            moved(policy)
            made.sync(Version(1))
            assert len(list(made.sample(asked(), PARAMS))) == 15
            assert "is back, with the weights of version 1" in made.said[-1]


@both_kinds
def test_a_busy_server_is_asked_again(policy: Policy, tmp_path: Path, speaks: str) -> None:
    with running(Stub(copied(policy), speaks)) as stub:
        made = sampler(policy, [stub], tmp_path)
        list(made.sample(asked(1), PARAMS))
        answers = iter([429, 503, 429])
        lock = threading.Lock()

        def busy() -> object:
            with lock:
                return next(answers, None)

        stub.before = busy
        assert len(list(made.sample(asked(4), PARAMS))) == 12
        assert made.said == []


@both_kinds
def test_a_slow_server_is_given_up_and_the_rest_goes_elsewhere(
    policy: Policy, tmp_path: Path, speaks: str
) -> None:
    good, slow = Stub(copied(policy), speaks), Stub(copied(policy), speaks)
    with running(good), running(slow):
        made = sampler(policy, [good, slow], tmp_path, timeout=1.5)
        list(made.sample(asked(1), PARAMS))
        slow.before = lambda: time.sleep(3)
        only_after(good, slow)
        assert len(list(made.sample(asked(8), PARAMS))) == 24
        assert slow.url in made.said[0]


def test_the_error_names_all_servers_if_none_is_left(policy: Policy, tmp_path: Path) -> None:
    servers = Servers(url=("http://127.0.0.1:9", "http://127.0.0.1:19"), patience=0.0)
    made = RemoteSampler(policy, servers, tmp_path, random_prompts(6), 1.0, 8)
    with pytest.raises(SamplersLost, match=r"127.0.0.1:9: .*127.0.0.1:19: .*repeat the command"):
        list(made.sample(asked(), PARAMS))


def test_something_else_at_the_address_is_said(policy: Policy, tmp_path: Path) -> None:
    stub = Stub(policy)
    stub.speaks = "smtp"  # no route of it answers
    with running(stub), pytest.raises(SamplersLost, match="not a server of `covey serve`, vLLM or SGLang"):
        list(sampler(policy, [stub], tmp_path).sample(asked(), PARAMS))


def test_what_top_p_left_must_be_known(policy: Policy, tmp_path: Path) -> None:
    with running(Stub(copied(policy))) as stub, pytest.raises(ConfigError, match="Set top_p 1"):
        list(sampler(policy, [stub], tmp_path).sample(asked(), SamplingParams(10, top_p=0.9)))


def test_logprobs_before_temperature_are_recognized(policy: Policy, tmp_path: Path) -> None:
    cold = SamplingParams(10, temperature=0.5)

    def raw(reply: Reply) -> Reply:
        for choice in reply["choices"]:
            ids = np.concatenate([prompt, choice["token_ids"]])
            with torch.no_grad():
                logits = policy.model(torch.tensor(ids)[None]).logits[0, len(prompt) - 1 : -1]
            of_ids = torch.tensor(choice["token_ids"])[:, None]
            choice["logprobs"]["token_logprobs"] = logits.log_softmax(-1).gather(1, of_ids)[:, 0].tolist()
        return reply

    prompt = random_prompts(6)[0]
    with running(Stub(copied(policy), spoil=raw)) as stub:
        made = RemoteSampler(
            policy, Servers(url=(stub.url,), patience=0.0), tmp_path, [prompt], cold.temperature, 8
        )
        with pytest.raises(SamplersLost, match="processed_logprobs"):
            list(made.sample(asked(), cold))


def test_a_consumer_that_stops_leaves_no_thread_at_work(policy: Policy, tmp_path: Path) -> None:
    with running(Stub(copied(policy))) as stub:
        before = threading.active_count()
        work = sampler(policy, [stub], tmp_path).sample(asked(12), PARAMS)
        next(work)
        work.close()
        ends = time.monotonic() + 10
        while threading.active_count() > before and time.monotonic() < ends:
            time.sleep(0.05)
        assert threading.active_count() <= before


def test_a_mistake_of_ours_ends_the_run_instead_of_hanging_it(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Stub(copied(policy))) as stub:
        made = sampler(policy, [stub], tmp_path)
        list(made.sample(asked(1), PARAMS))
        monkeypatch.setattr(made.client, "complete", lambda *_: {}["nothing"])
        with pytest.raises(KeyError, match="nothing"):
            list(made.sample(asked(4), PARAMS))


def another_tokenizer(policy: Policy) -> Policy:
    """The same weights, whose ids mean other texts: each the next one's."""
    own = copied(policy)
    other = copy.deepcopy(own.tokenizer)
    size = len(other)
    other.decode = lambda ids, **more: policy.tokenizer.decode([(i + 1) % size for i in ids], **more)
    own.tokenizer = other
    return own


def test_a_server_with_another_tokenizer_ends_at_other_places_and_is_left_out(
    policy: Policy, tmp_path: Path
) -> None:
    params = replace(PARAMS, stop=tuple("0123456789"))
    honest, other = Stub(copied(policy)), Stub(another_tokenizer(policy))
    with running(honest), running(other):
        made = sampler(policy, [honest, other], tmp_path)
        assert not made.bit_exact, "both have proven themselves: their weights are right"
        # or it may be done with everything before the other has been asked
        honest.before = lambda: soon(lambda: bool(made.said))
        assert len(list(made.sample(asked(8), params))) == 24
        (said,) = made.said
        assert other.url in said
        assert "does it have another tokenizer?" in said


def test_tokens_without_a_word_are_said_once(tmp_path: Path) -> None:
    own = padded()
    with running(Stub(copied(own))) as stub:
        made = sampler(own, [stub], tmp_path)
        found = [np.concatenate([x.completion.tokens for x in made.sample(asked(), PARAMS)]) for _ in "ab"]
        unread = int((found[0] >= len(own.tokenizer)).sum())
        assert unread > 10
        (said,) = made.said
        assert said.startswith(f"{unread} of {len(found[0])} tokens")
        assert f"from {len(own.tokenizer)} on" in said


def test_a_server_may_stop_at_padding_and_where_a_character_is_known_to_be_broken(
    policy: Policy, tmp_path: Path
) -> None:
    """As a real vLLM does: it reads padding by its name, and waits for the rest of a character."""
    ids = {word: policy.tokenizer.convert_tokens_to_ids(word) for word in ("x", "y", "<|pad|>", "Ã")}
    ends: dict[tuple[str, ...], tuple[str, bool]] = {
        ("x", "<|pad|>"): ("ad|", True),
        ("x", "Ã", "y"): ("\N{REPLACEMENT CHARACTER}", True),
        ("Ã", "Ã", "y", "x"): ("\N{REPLACEMENT CHARACTER}", False),
        ("x", "y", "<|pad|>"): ("x", False),
        ("x", "y"): ("ad|", False),
    }
    for words, (stop, right) in ends.items():
        tokens = [ids[word] for word in words]
        with running(Stub(copied(policy))) as stub:
            made = sampler(policy, [stub], tmp_path, patience=0.0)
            assert not made.bit_exact, "it has proven itself"
            stub.spoil = in_first(lambda _, t=tokens: t, lambda _, t=tokens: [-1.0] * len(t), "stop")
            request = [Request(np.array([5, 6]), [1])]
            if right:
                (found,) = made.sample(request, replace(PARAMS, stop=(stop,)))
                assert found.completion.tokens.tolist() == tokens
            else:
                with pytest.raises(SamplersLost, match="another tokenizer"):
                    list(made.sample(request, replace(PARAMS, stop=(stop,))))
