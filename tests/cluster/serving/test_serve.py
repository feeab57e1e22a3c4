"""`covey serve` over HTTP: the local sampler's own numbers, and nothing it should not do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx2
import pytest
from transformers import OpenAIGPTConfig

from covey.cluster.serving.app import Service
from covey.cluster.serving.guard import MAX_BODY
from covey.cluster.serving.run import serve_http
from covey.cluster.serving.shared import SharedModel, TooBusy
from covey.config.sampling import Servers
from covey.errors import SamplersLost
from covey.models.policy import Policy, save_policy
from covey.sampling import fleet, remote
from covey.sampling.base import Request, SampledCompletion, SamplingParams
from covey.sampling.local import LocalSampler
from covey.sampling.remote import RemoteSampler
from covey_verify.errors import ConfigError
from covey_verify.web import ask
from tests.cluster.serving.served import GOOD, refused, serving
from tests.conftest import policy_of, random_prompts, sharpened
from tests.sampling.remote_samplers import Listener, Version, asked, moved
from tests.sampling.stub import copied
from tests.serving import served


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_of("qwen3")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(10),
        SamplingParams(10, temperature=0.0),
        SamplingParams(10, top_p=0.7, top_k=20, temperature=0.8),
        SamplingParams(10, stop=("1",)),
    ],
)
def test_a_server_draws_what_the_local_sampler_draws(
    policy: Policy, tmp_path: Path, params: SamplingParams
) -> None:
    with serving(copied(policy), tmp_path) as url, serving(copied(policy), tmp_path) as other:
        made = RemoteSampler(
            policy, Servers(url=(url, other)), tmp_path, random_prompts(4), params.temperature, 6
        )
        theirs = {(x.request, x.sample): x.completion for x in made.sample(asked(), params)}
        assert made.bit_exact == policy.bit_exact
    for request, sample, ours in LocalSampler(policy).sample(asked(), params):
        found = theirs.pop((request, sample))
        assert (found.tokens == ours.tokens).all()
        if policy.bit_exact:
            assert (found.logprobs == ours.logprobs).all(), "to the last bit"
        assert (found.text, found.finish) == (ours.text, ours.finish)
        if params.truncates:
            assert (found.sampling_mask.ids == ours.sampling_mask.ids).all()
            assert (found.sampling_mask.ends == ours.sampling_mask.ends).all()
    assert not theirs


def test_a_server_that_has_to_be_given_its_first_weights_is_as_exact(policy: Policy, tmp_path: Path) -> None:
    """Otherwise a run on servers that an earlier run has used would compute what it could have recorded."""
    other = copied(policy)
    moved(other)
    (tmp_path / "sync").mkdir()
    with serving(other, tmp_path / "sync") as url:
        made = RemoteSampler(policy, Servers(url=(url,)), tmp_path / "sync", random_prompts(4), 1.0, 6)
        assert made.bit_exact == policy.bit_exact


def test_a_server_killed_and_started_again_between_two_requests_is_found(
    policy: Policy, tmp_path: Path
) -> None:
    trained = copied(policy)
    with serving(copied(policy), tmp_path) as healthy:
        with serving(copied(policy), tmp_path) as url:
            listener = Listener()
            made = RemoteSampler(
                trained,
                Servers(url=(healthy, url)),
                tmp_path / "sync",
                random_prompts(4),
                1.0,
                6,
                monitor=listener,
            )
            moved(trained)
            made.sync(Version(1))
            list(made.sample(asked(), SamplingParams(10)))
        with serving(copied(policy), tmp_path, port=int(url.rpartition(":")[2])):  # on the old weights
            found = {(x.request, x.sample): x.completion for x in made.sample(asked(8), SamplingParams(10))}
    for request, sample, ours in LocalSampler(trained).sample(asked(8), SamplingParams(10)):
        assert (found[request, sample].tokens == ours.tokens).all()
    assert "restarted" in listener.said[0]


def test_weights_that_another_run_gave_under_the_same_version_are_found(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RETRY_SECONDS", 0.0)
    ours, theirs = copied(policy), copied(policy)
    listener = Listener()
    moved(ours)
    moved(theirs)
    moved(theirs)
    with serving(copied(policy), tmp_path) as url:
        one, other = (
            RemoteSampler(
                each, Servers(url=(url,)), tmp_path / name, random_prompts(4), 1.0, 6, monitor=monitor
            )
            for each, name, monitor in ((ours, "one", listener), (theirs, "other", None))
        )
        for made in (one, other):
            made.sync(Version(1))
            list(made.sample(asked(1), SamplingParams(10)))
        found = {(x.request, x.sample): x.completion for x in one.sample(asked(), SamplingParams(10))}
    for request, sample, own in LocalSampler(ours).sample(asked(), SamplingParams(10)):
        assert (found[request, sample].logprobs == own.logprobs).all()
    assert "its weights were changed" in listener.said[0]


def test_weights_that_an_earlier_run_left_under_the_same_version_are_not_given(
    policy: Policy, tmp_path: Path
) -> None:
    """It was killed, and goes on with another learning rate; or another run uses its folder."""
    trained = copied(policy)
    for _ in ("killed", "its successor"):
        moved(trained)
        with serving(copied(policy), tmp_path) as url:
            made = RemoteSampler(trained, Servers(url=(url,)), tmp_path, random_prompts(4), 1.0, 6)
            made.sync(Version(1))
            found = {(x.request, x.sample): x.completion for x in made.sample(asked(), SamplingParams(10))}
        for request, sample, own in LocalSampler(trained).sample(asked(), SamplingParams(10)):
            assert (found[request, sample].logprobs == own.logprobs).all()
    assert [p.name for p in tmp_path.iterdir()] == ["version_000001"]


def test_a_server_that_takes_no_weights_is_refused_before_the_first_step(
    policy: Policy, tmp_path: Path
) -> None:
    with serving(copied(policy)) as url:
        for restart in (None, "true"):  # a command that restarts it may bring weights
            servers = Servers(url=(url,), patience=0.1, restart=restart)
            made = RemoteSampler(policy, servers, tmp_path, random_prompts(4), 1.0, 6)
            if restart:
                assert len(list(made.sample(asked(1), SamplingParams(4)))) == 3
            else:
                with pytest.raises(SamplersLost, match="start it with --weights FOLDER"):
                    list(made.sample(asked(1), SamplingParams(4)))


def test_a_completion_in_segments_is_the_one_that_is_drawn_at_once(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SEGMENT", 3)
    params = SamplingParams(10, top_k=20)
    with serving(copied(policy), tmp_path) as url:
        made = RemoteSampler(
            policy, Servers(url=(url,)), tmp_path, random_prompts(4), 1.0, 6, from_snapshot=True
        )
        theirs = {(x.request, x.sample): x.completion for x in made.sample(asked(), params)}
    for request, sample, ours in LocalSampler(policy).sample(asked(), params):
        found = theirs.pop((request, sample))
        assert (found.tokens == ours.tokens).all()
        if policy.bit_exact:
            assert (found.logprobs == ours.logprobs).all(), "to the last bit"
        assert (found.text, found.finish) == (ours.text, ours.finish)
        assert (found.sampling_mask.ids == ours.sampling_mask.ids).all()
        assert (found.sampling_mask.ends == ours.sampling_mask.ends).all()
    assert not theirs


def test_weights_by_version_from_one_folder_only(policy: Policy, tmp_path: Path) -> None:
    trained, outside = copied(policy), tmp_path / "outside"
    (tmp_path / "sync").mkdir()
    with serving(copied(policy), tmp_path / "sync") as url:
        made = RemoteSampler(trained, Servers(url=(url,)), tmp_path / "sync", random_prompts(4), 1.0, 6)
        list(made.sample(asked(1), SamplingParams(4)))
        moved(trained)
        made.sync(Version(3))
        found = list(made.sample(asked(1), SamplingParams(4)))
        assert {x.completion.provenance.version for x in found} == {3}
        assert ask(f"{url}/info")["version"] == 3
        save_policy(policy, outside)
        (tmp_path / "sync" / "link").symlink_to(outside)
        for folder in (outside, tmp_path / "sync" / ".." / "outside", tmp_path / "sync" / "link", "/etc"):
            assert refused(f"{url}/weights", {"folder": str(folder), "version": 4})[0] == 403
        assert refused(f"{url}/weights", {"folder": "\0", "version": 4})[0] == 400
        (tmp_path / "sync" / "none").mkdir()
        status, _ = refused(f"{url}/weights", {"folder": str(tmp_path / "sync" / "none"), "version": 4})
        assert status >= 400
        other = policy_of("llama")
        save_policy(other, tmp_path / "sync" / "other")
        status, said = refused(f"{url}/weights", {"folder": str(tmp_path / "sync" / "other"), "version": 4})
        assert status >= 400
        assert "another model" in said
        assert ask(f"{url}/info")["version"] == 3
        again = list(made.sample(asked(1), SamplingParams(4)))
        assert [x.completion.tokens.tolist() for x in again] == [x.completion.tokens.tolist() for x in found]
    with serving(copied(policy)) as url:
        assert refused(f"{url}/weights", {"folder": str(tmp_path / "sync"), "version": 1})[0] == 403


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"prompt": []}, 400, "one token at least"),
        ({"prompt": [300]}, 400, "ids from 0 to 299"),
        ({"prompt": [-1]}, 400, "ids from 0 to 299"),
        ({"prompt": [1.5]}, 400, "prompt"),
        ({"prompt": None}, 400, "prompt"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 1000}, 400, "context of 128"),
        ({"n": 10**9}, 400, "n: "),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"best_of": 3}, 400, "best_of"),
        ({"presence_penalty": 0.3}, 400, "presence_penalty: this server does not have it"),
        ({"stream": True}, 400, "stream: Input should be False"),
        ({"temperature": None, "max_tokens": None, "prompt": None}, 400, "prompt: Field required"),
        ({"model": "gpt-4"}, 404, "is not served here"),
        ({"n": 2, "streams": [1]}, 400, "streams"),
        ({"streams": [2**64]}, 400, "streams"),
        (b"{", 400, "body: Invalid JSON"),
        (b"\xff\xfe", 400, ""),
        (b"[" * 100_000, 400, ""),
        (b" " * (MAX_BODY + 1), 413, "body"),
    ],
)
def test_a_bad_request_gets_its_status_and_a_reason(
    server: str, change: dict | bytes, status: int, said: str
) -> None:
    body = change if isinstance(change, bytes) else {**GOOD, **change}
    found, message = refused(f"{server}/v1/completions", body)
    assert found == status
    assert said in message
    assert ask(f"{server}/v1/completions", GOOD)["choices"], "the server goes on"


@pytest.fixture(scope="module")
def server(policy: Policy) -> Iterator[str]:
    with serving(copied(policy)) as url:
        yield url


def test_a_text_and_a_seed_as_openai_has_them(server: str, policy: Policy) -> None:
    body = {"prompt": "1+2=", "max_tokens": 4, "seed": 3, "n": 2, "stop": "9"}
    one, two = (ask(f"{server}/v1/completions", body)["choices"] for _ in range(2))
    assert one == two
    assert len(one) == 2
    assert "token_ids" not in one[0]
    unseeded = [ask(f"{server}/v1/completions", {"prompt": "1+2=", "max_tokens": 8})["choices"] for _ in "ab"]
    assert unseeded[0] != unseeded[1]


def test_defaults_that_clients_of_openai_write(server: str) -> None:
    body = {"prompt": "1+2=", "max_tokens": 4, "seed": 3}
    verbose = {**body, "stream": False, "temperature": None, "user": None, "stop": None}
    one, two = (ask(f"{server}/v1/completions", b)["choices"] for b in (body, verbose))
    assert one == two


def test_nothing_waits_for_a_caller_who_has_gone(policy: Policy) -> None:
    """Twenty requests of an interrupted client kept the next one waiting for half a minute."""
    shared = SharedModel(copied(policy), 8, most_waiting=64)
    release = threading.Event()
    held = shared.queue_work(lambda: release.wait(60))
    encoded = list[str]()
    encode = shared.policy.encode
    shared.policy.encode = lambda prompt, *more: encoded.append(str(prompt)) or encode(prompt, *more)
    with served(Service(shared, "policy").app(), 0) as url, ThreadPoolExecutor(1) as pool:
        for _ in range(4):
            with pytest.raises(httpx2.ReadTimeout):
                httpx2.post(f"{url}/v1/completions", json={"prompt": "7", "n": 16}, timeout=0.2)
        last = pool.submit(ask, f"{url}/v1/completions", {"prompt": "8", "max_tokens": 2})
        time.sleep(0.2)
        release.set()
        held.result(20)
        assert last.result(20)["choices"]
    assert encoded == ["8"]
    shared.close()


def test_a_browser_that_was_led_here_is_not_answered(server: str) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example"):
        assert refused(f"{server}/v1/completions", GOOD, {"Host": host})[0] in (400, 403)


def test_a_token_is_asked_for_on_every_route(policy: Policy) -> None:
    with serving(copied(policy), token="sesame") as url:
        for path, body in (("/v1/completions", GOOD), ("/weights", {"folder": ".", "version": 1})):
            assert refused(url + path, body)[0] == 401
            assert refused(url + path, body, {"Authorization": "Bearer sesam"})[0] == 401
        assert ask(f"{url}/v1/completions", GOOD, "sesame")["choices"]


def test_many_callers_at_once(server: str) -> None:
    bodies = [{**GOOD, "seed": i % 4, "temperature": 1.0 + i % 2, "max_tokens": 9} for i in range(24)]
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda b: ask(f"{server}/v1/completions", b)["choices"], bodies))
    for body, choices in zip(bodies, found, strict=True):
        assert choices == found[bodies.index(body)], "who else asked changes nothing"


def test_what_waits_is_bounded(policy: Policy) -> None:
    shared = SharedModel(copied(policy), 8, most_waiting=4)
    release = threading.Event()
    held = shared.queue_work(lambda: release.wait(20))
    time.sleep(0.1)
    first = shared.ask(lambda: asked(1)[0], 3, SamplingParams(3))
    with pytest.raises(TooBusy):
        shared.ask(lambda: asked(1)[0], 3, SamplingParams(3))
    release.set()
    held.result(20)
    assert len(first.result(20).completions) == 3
    shared.close()


def test_work_between_passes_keeps_its_place(policy: Policy) -> None:
    shared, seen = SharedModel(copied(policy), 8), []
    before = shared.ask(lambda: asked(1)[0], 3, SamplingParams(3))

    def later() -> None:
        seen.append(before.done())
        shared.version = 5

    shared.queue_work(later)
    after = shared.ask(lambda: asked(1)[0], 3, SamplingParams(3))
    assert (before.result(20).version, after.result(20).version) == (0, 5)
    assert seen == [True]
    shared.close()


def test_what_differs_only_in_length_shares_a_pass(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, passes = SharedModel(copied(policy), 8), []
    sample = shared._sampler.sample

    def counted(requests: list[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        passes.append(len(requests))
        return sample(requests, params)

    monkeypatch.setattr(shared._sampler, "sample", counted)
    lengths = [3, 7, 5]
    alone = [shared.ask(lambda: asked(1)[0], 3, SamplingParams(n)).result(20).completions for n in lengths]
    release = threading.Event()
    shared.queue_work(lambda: release.wait(20))
    waiting = [shared.ask(lambda: asked(1)[0], 3, SamplingParams(n)) for n in lengths]
    release.set()
    for mine, future in zip(alone, waiting, strict=True):
        for one, other in zip(mine, future.result(20).completions, strict=True):
            assert (one.tokens.tolist(), one.finish) == (other.tokens.tolist(), other.finish)
            assert one.logprobs.tolist() == other.logprobs.tolist()
    assert passes == [1, 1, 1, 3]
    shared.close()


def test_work_is_done_in_the_order_in_which_it_was_queued(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.cluster.serving.shared.GATHER_SECONDS", 0)
    shared = SharedModel(policy, 8)
    order: list[int] = []
    # Alone, so that the thread waits for each, and then many at once.
    for number in range(1_000):
        shared.queue_work(partial(order.append, number)).result(20)
    queued = [shared.queue_work(partial(order.append, number)) for number in range(1_000, 2_000)]
    queued[-1].result(20)
    assert order == list(range(2_000))
    shared.close()


def test_a_model_that_cannot_be_sampled_from_is_refused_before_anybody_asks(tmp_path: Path) -> None:
    config = OpenAIGPTConfig(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    save_policy(Policy(sharpened(config), policy_of("qwen3").tokenizer), tmp_path)
    with pytest.raises(ConfigError, match="cannot sample from openai-gpt"):
        serve_http(str(tmp_path), "127.0.0.1", 0, None, "")


def test_others_need_a_token_and_a_port_must_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVEY_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="set COVEY_TOKEN"):
        serve_http("tiny", "0.0.0.0", 0, None, "")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="--port"):
        serve_http("tiny", "127.0.0.1", taken.getsockname()[1], None, "")
    with pytest.raises(ConfigError, match="no such folder"):
        serve_http("tiny", "127.0.0.1", 0, tmp_path / "none", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_to_end_a_server_is_no_error(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "covey", "serve", "tiny", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert "http://127.0.0.1:" in process.stdout.readline()
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


def test_chat_goes_through_the_template(policy: Policy) -> None:
    own = copied(policy)
    own.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    with serving(own) as url:
        parts = [{"type": "text", "text": "1+2"}]
        body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
        body["max_completion_tokens"] = 4
        reply = ask(f"{url}/v1/chat/completions", body)
        plain = ask(f"{url}/v1/completions", {"prompt": "1+2=", "max_tokens": 4, "temperature": 0})
        assert reply["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    own.tokenizer.chat_template = None
