"""The sampler over HTTP, against servers of both kinds that are slow, wrong, or gone."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from covey.errors import SamplersLost
from covey.models.packing import pack
from covey.models.policy import Policy
from covey.rng import key
from covey.sampling import fleet, remote
from covey.sampling.base import SampledCompletion
from covey.sampling.dialects import ServerFault
from covey.sampling.local import LocalSampler
from covey.sampling.probes import Probe, mean_difference, sample_probes
from covey.sampling.remote import RemoteSampler
from covey.sampling.servers import restart
from tests.conftest import policy_of
from tests.sampling.remote_samplers import PARAMS, Version, asked, moved, sampler, together
from tests.sampling.stub import Stub, copied, running
from tests.sampling.waiting import only_after


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


def lagging(policy: Policy, stubs: list[Stub], folder: Path) -> RemoteSampler:
    """The sampler of a run that samples while it trains: it follows a snapshot, segment by segment."""
    return sampler(policy.snapshot(), stubs, folder, from_snapshot=True, timeout=60.0, patience=30.0)


class Trained(Version):
    """A learner after an update."""

    def __init__(self, policy: Policy, version: int) -> None:
        super().__init__(version)
        self.network = policy


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
                    theirs = passed[version].token_outputs(pack([prompt], [[c.tokens]]), 1.0).logprobs.numpy()
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
                theirs = policy.token_outputs(pack([prompt], [[x.completion.tokens]]), 1.0).logprobs.numpy()
                np.testing.assert_allclose(x.completion.logprobs[own], theirs[own], atol=1e-4)


def test_an_evaluation_may_be_sampled_beside_the_training(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SEGMENT", 5)
    with running(Stub(copied(policy))) as stub:
        made = lagging(policy, [stub], tmp_path)
        found: list[SampledCompletion] = []
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
        with pytest.raises(ServerFault, match="its weights were changed"):
            made.client.complete(server, asked(1)[0], PARAMS)
