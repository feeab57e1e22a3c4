"""The sampler over HTTP, against servers of both kinds that are slow, wrong, or gone."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from covey.config.sampling import Servers
from covey.errors import SamplersLost
from covey.models.packing import pack
from covey.models.policy import Policy
from covey.rng import key
from covey.sampling import fleet, remote
from covey.sampling.base import Request, Sampled, SamplingParams
from covey.sampling.dialects import Misbehaved
from covey.sampling.local import LocalSampler
from covey.sampling.probes import Probe, mean_difference, sample_probes
from covey.sampling.remote import RemoteSampler
from covey.sampling.servers import restart
from covey_verify.errors import ConfigError
from tests.conftest import policy_of, random_prompts
from tests.models.padded import padded
from tests.sampling.remote_samplers import PARAMS, Version, asked, moved, sampler, together
from tests.sampling.stub import ENDLESS, Reply, Stub, copied, running


@pytest.fixture
def policy() -> Policy:
    return policy_of("qwen3")


@pytest.mark.parametrize("speaks", ["vllm", "sglang"])
def test_both_kinds_of_server_answer_and_follow_the_weights(
    policy: Policy, tmp_path: Path, speaks: str
) -> None:
    with running(Stub(copied(policy), speaks)) as one, running(Stub(copied(policy), speaks)) as two:
        made = sampler(policy, [one, two], tmp_path)
        first = list(made.sample(asked(), PARAMS))
        assert len(together(first)) == 15
        assert not made.bit_exact, "its random numbers are its own"
        assert not (tmp_path / "sync").exists(), "they had the right weights from the beginning"
        moved(policy)
        made.sync(Version(1))
        second = list(made.sample(asked(), PARAMS))
        modes = {path.stat().st_mode for path in (tmp_path / "sync").glob("*/*")}
        assert len(modes) == 1, "a server may run as another user"
        assert {x.completion.provenance.version for x in second} == {1}
        assert any((together(first)[k] != v).any() for k, v in together(second).items() if len(v) == 10)
        for stub in (one, two):
            for a, b in zip(stub.policy.model.parameters(), policy.model.parameters(), strict=True):
                assert torch.equal(a, b)
        assert made.said == []


@pytest.mark.parametrize("speaks", ["vllm", "sglang"])
def test_greedy_completions_are_asked_for_at_temperature_0(
    policy: Policy, tmp_path: Path, speaks: str
) -> None:
    greedy = [replace(r, greedy=True) for r in asked(2)]
    with running(Stub(copied(policy), speaks)) as stub:
        found = together(list(sampler(policy, [stub], tmp_path).sample([*asked(2), *greedy], PARAMS)))
    alone = LocalSampler(policy).sample(greedy, PARAMS)
    assert all((found[2 + x.request, x.sample] == x.completion.tokens).all() for x in alone)
    assert any((found[r, 0] != found[r, 1]).any() for r in (0, 1) if len(found[r, 0]) == len(found[r, 1]))


def test_recorded_logprobs_are_those_of_the_weights(policy: Policy, tmp_path: Path) -> None:
    with running(Stub(copied(policy))) as stub:
        for x in sampler(policy, [stub], tmp_path).sample(asked(2), PARAMS):
            ids = np.concatenate([asked(2)[x.request].prompt, x.completion.tokens])
            logits = policy.model(torch.tensor(ids)[None]).logits[0, -len(x.completion.tokens) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(x.completion.tokens)[:, None])[:, 0]
            assert np.allclose(x.completion.logprobs, expected.detach(), atol=1e-4)
            assert x.completion.text == policy.decode(x.completion.tokens.tolist())


@pytest.mark.parametrize("speaks", ["vllm", "sglang"])
def test_a_server_that_says_it_took_the_weights_and_did_not_is_named(
    policy: Policy, tmp_path: Path, speaks: str
) -> None:
    honest, liar = Stub(copied(policy), speaks), Stub(copied(policy), speaks, takes_weights="says so")
    with running(honest), running(liar):
        made = sampler(policy, [honest, liar], tmp_path)
        list(made.sample(asked(), PARAMS))
        moved(policy)
        made.sync(Version(1))
        assert len(list(made.sample(asked(), PARAMS))) == 15
        (said,) = made.said
        assert liar.url in said
        assert "on average from version 1" in said
        moved(policy)
        made.sync(Version(2))
        list(made.sample(asked(), PARAMS))
        assert made.said == [said], "at each version the same complaint with other numbers"


def test_a_server_that_kept_a_little_of_its_weights_is_held_to_its_own_rounding(
    policy: Policy, tmp_path: Path
) -> None:
    """As vLLM on a CPU with its old output layer: 5e-5 nats off after an update, its rounding is 1e-7."""
    with running(Stub(copied(policy), takes_weights="says so")) as liar:
        made = sampler(policy, [liar], tmp_path)
        list(made.sample(asked(), PARAMS))
        with torch.no_grad():
            policy.model.get_input_embeddings().weight.mul_(1.0002)
        made.sync(Version(1))
        with pytest.raises(SamplersLost, match="on average from version 1") as caught:
            list(made.sample(asked(), PARAMS))
        off = float(re.search(r"(\S+) nats on average", str(caught.value))[1])
        assert 2 * fleet.ALWAYS_ALLOWED < off < fleet.FLOAT32_TOLERANCE


def test_a_server_restarted_between_its_proof_and_a_request_is_found(policy: Policy, tmp_path: Path) -> None:
    """vLLM's replies do not tell; it takes a minute to start, so that a request fails in between."""
    good, other = Stub(copied(policy), "sglang"), Stub(copied(policy), "sglang")
    with running(good), running(other):
        made = sampler(policy, [good, other], tmp_path)
        moved(policy)
        made.sync(Version(1))
        list(made.sample(asked(), PARAMS))
        other.policy, other.weight_version = copied(policy), "default"
        moved(other.policy)
        only_after(good, other)
        assert len(list(made.sample(asked(8), PARAMS))) == 24
        assert other.url in made.said[0]
        assert "restarted" in made.said[0]


def test_who_has_nothing_to_ask_leaves_servers_and_weights_alone(policy: Policy, tmp_path: Path) -> None:
    """Of several processes that train together the first asks for all of them."""
    with running(Stub(copied(policy))) as stub:
        made = sampler(policy, [stub], tmp_path)
        made.sync(Version(1))
        assert list(made.sample([], PARAMS)) == []
        assert stub.asked == []
    assert not (tmp_path / "sync").exists()


def test_wrong_weights_from_the_beginning_are_replaced(policy: Policy, tmp_path: Path) -> None:
    other = copied(policy)
    moved(other)
    with running(Stub(other)) as stub:
        assert len(list(sampler(policy, [stub], tmp_path).sample(asked(), PARAMS))) == 15
    assert all(torch.equal(a, b) for a, b in zip(other.parameters, policy.parameters, strict=True))


def test_without_a_way_to_take_weights_the_run_ends_with_the_remedy(policy: Policy, tmp_path: Path) -> None:
    with running(Stub(copied(policy), takes_weights="no route")) as stub:
        made = sampler(policy, [stub], tmp_path)
        list(made.sample(asked(1), PARAMS))
        made.sync(Version(1))
        moved(policy)
        with pytest.raises(SamplersLost, match=r"VLLM_SERVER_DEV_MODE=1.*restart"):
            list(made.sample(asked(1), PARAMS))


def test_a_restart_command_is_the_way_out(policy: Policy, tmp_path: Path) -> None:
    flag = tmp_path / "restarted"
    stub = Stub(copied(policy), takes_weights="says so")

    def freshly_started() -> None:
        if flag.exists():
            stub.policy.load_weights(Path(flag.read_text()))
            flag.unlink()

    stub.before = freshly_started
    with running(stub):
        made = sampler(policy, [stub], tmp_path, restart=f'printf %s "$COVEY_MODEL" > {flag}')
        list(made.sample(asked(1), PARAMS))
        moved(policy)
        made.sync(Version(1))
        assert len(list(made.sample(asked(), PARAMS))) == 15
        assert "restarting it" in made.said[0]


def test_what_a_restart_command_says_is_no_result(tmp_path: Path, capfd) -> None:
    with pytest.raises(OSError, match="no answer"):
        restart("echo packed", "http://127.0.0.1:9", tmp_path, 0.1)
    assert capfd.readouterr() == ("", "packed\n")


def test_a_restart_command_may_leave_a_server_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no answer"):
        restart(f"sleep 100 & echo $! > {tmp_path}/pid", "http://127.0.0.1:9", tmp_path, 1.0)
    psutil.Process(int((tmp_path / "pid").read_text())).kill()


def test_a_restart_command_that_hangs_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="did not return"):
        restart(f"sleep 100 & echo $! > {tmp_path}/pid; wait", "http://127.0.0.1:9", tmp_path, 1.0)
    pid = int((tmp_path / "pid").read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)


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


def soon(true: Callable[[], object]) -> None:
    """Wait for something to be true, for a while."""
    ends = time.monotonic() + 20
    while not true() and time.monotonic() < ends:
        time.sleep(0.01)


def only_after(stub: Stub, other: Stub) -> None:
    """Let a server answer once the other one has been asked: it might have done all the work by then."""
    came, own = threading.Event(), other.before

    def comes() -> object:
        came.set()
        return own()

    other.before, stub.before = comes, lambda: soon(came.is_set)


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
            made.fleet.servers[1].tried = 0.0
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


def test_nobody_left_is_an_error_that_names_them_all(policy: Policy, tmp_path: Path) -> None:
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


def lagging(policy: Policy, stubs: list[Stub], folder: Path) -> RemoteSampler:
    """The sampler of a run that samples while it trains: it follows a snapshot, segment by segment."""
    return sampler(policy.snapshot(), stubs, folder, lags=True, timeout=60.0, patience=30.0)


class Trained(Version):
    """A learner after an update."""

    def __init__(self, policy: Policy, version: int) -> None:
        super().__init__(version)
        self.policy = policy


@pytest.mark.parametrize("speaks", ["vllm", "sglang"])
def test_completions_under_way_continue_under_new_weights(
    policy: Policy, tmp_path: Path, speaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SEGMENT", 5)
    pauses = cycle([0.0, 0.05, 0.2])  # so that something is under way when others have ended
    stubs = [Stub(copied(policy), speaks, before=lambda: time.sleep(next(pauses))) for _ in range(2)]
    passed = {0: copied(policy)}
    with running(stubs[0]), running(stubs[1]):
        made = lagging(policy, stubs, tmp_path)
        assert not made.bit_exact
        found = []
        for sampled in made.sample(asked(4, 2), PARAMS):
            found.append(sampled)
            if len(found) in (1, 4):
                moved(policy)
                passed[len(passed)] = copied(policy)
                made.sync(Trained(policy, len(passed) - 1))
        assert len(together(found)) == 8
        assert made.said == []
        assert any(len(set(x.completion.provenance.versions.tolist())) > 1 for x in found)
        for x in found:
            c, prompt = x.completion, asked(4, 2)[x.request].prompt
            assert c.provenance.version == c.provenance.versions[0]
            assert (np.diff(c.provenance.versions) >= 0).all()
            for version in set(c.provenance.versions.tolist()):
                own = c.provenance.versions == version
                with torch.no_grad():
                    theirs = passed[version].score(pack([prompt], [[c.tokens]]), 1.0).logprobs.numpy()
                np.testing.assert_allclose(c.logprobs[own], theirs[own], atol=1e-4)


def test_a_server_that_keeps_old_weights_is_noticed_in_the_middle_of_a_pass(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SEGMENT", 5)
    honest, liar = Stub(copied(policy)), Stub(copied(policy), takes_weights="says so")
    with running(honest), running(liar):
        made = lagging(policy, [honest, liar], tmp_path)
        work = made.sample(asked(4, 2), PARAMS)
        found = [next(work)]
        moved(policy)
        made.sync(Trained(policy, 1))
        found += work
        assert len(together(found)) == 8
        (said,) = made.said
        assert liar.url in said
        assert "on average from version 1" in said
        with torch.no_grad():
            for x in found:
                own, prompt = x.completion.provenance.versions == 1, asked(4, 2)[x.request].prompt
                theirs = policy.score(pack([prompt], [[x.completion.tokens]]), 1.0).logprobs.numpy()
                np.testing.assert_allclose(x.completion.logprobs[own], theirs[own], atol=1e-4)


def test_an_evaluation_may_be_sampled_beside_the_training(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SEGMENT", 5)
    with running(Stub(copied(policy))) as stub:
        made = lagging(policy, [stub], tmp_path)
        found: list[Sampled] = []
        thread = threading.Thread(target=lambda: found.extend(made.sample(asked(4, 2), PARAMS)))
        thread.start()
        moved(policy)
        made.sync(Trained(policy, 1))
        evaluated = list(made.sample(asked(2, 2), PARAMS))
        thread.join(60)
        assert len(together(found)) == 8
        assert len(together(evaluated)) == 4
        assert {v for x in evaluated for v in x.completion.provenance.versions.tolist()} == {1}


def test_a_server_that_computes_more_exactly_than_the_policy_takes_part(
    policy: Policy, tmp_path: Path
) -> None:
    with running(Stub(copied(policy))) as exact:
        policy.round_products()
        made = sampler(policy, [exact], tmp_path)
        assert len(list(made.sample(asked(), PARAMS))) == 15
        assert made.said == []
        assert not made.bit_exact
        assert 0 < made.fleet.servers[0].rounding < fleet.ALWAYS_ALLOWED, (
            "of the same weights without rounding"
        )
        assert mean_difference(policy, proof(made), 1.0) > fleet.FLOAT32_TOLERANCE, (
            "what is rounded here and not there"
        )


def test_rounding_here_hides_no_weights_that_a_server_has_not_taken(policy: Policy, tmp_path: Path) -> None:
    """On a CPU vLLM keeps its old output layer, after one update as far off as rounding."""
    with running(Stub(copied(policy), takes_weights="says so")) as exact:
        policy.round_products()
        made = sampler(policy, [exact], tmp_path)
        rounding = mean_difference(policy, proof(made), 1.0)
        with torch.no_grad():
            policy.model.get_output_embeddings().weight.mul_(1.0005)
        made.sync(Version(1))
        with pytest.raises(SamplersLost, match="on average from version 1"):
            list(made.sample(asked(), PARAMS))
        assert mean_difference(policy, proof(made), 1.0) < 2 * rounding


def proof(made: RemoteSampler) -> list[Probe]:
    """What its first server samples to prove its weights."""
    ask = partial(made.client.complete, made.fleet.servers[0])
    if made.fleet.servers[0].dialect is None:
        assert not made.bit_exact, "which brings it up"
    made.fleet.servers[0].stamp = None
    return sample_probes(ask, made.fleet.probes, 1.0, partial(key, 0))


def test_an_answer_is_held_to_the_weights_that_were_asked_for_it(policy: Policy, tmp_path: Path) -> None:
    """Also where the server is proving others by the time that it comes."""
    with running(Stub(copied(policy), "sglang")) as stub:
        made = sampler(policy, [stub], tmp_path)
        assert not made.bit_exact, "it has proven itself"
        (server,) = made.fleet.servers

        def is_given_others_meanwhile() -> None:
            server.stamp, stub.weight_version = None, "another run's"

        stub.before = is_given_others_meanwhile
        with pytest.raises(Misbehaved, match="its weights were changed"):
            made.client.complete(server, asked(1)[0], PARAMS)


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
