"""A local Tinker's completions are the sampler's own, its log-probs the model's; what it lacks it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from covey.models.policy import Policy, save_policy
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from covey.tinker import registry
from covey.tinker.run import serve_tinker
from covey.tinker.wire import read_fields
from covey_verify.errors import ConfigError, DataError
from tests.conftest import policy_of
from tests.tinker.client import Refused, Session, call, sampled, serving

PROMPT = [7, 8, 9, 30]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_of("qwen3")


@pytest.fixture(scope="module")
def url(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(policy, tmp_path_factory.mktemp("store")) as address:
        yield address


@pytest.mark.parametrize(
    ("asked", "params"),
    [
        ({}, SamplingParams(6)),
        ({"temperature": 0.0}, SamplingParams(6, temperature=0.0)),
        ({"top_p": 0.7, "top_k": 20, "temperature": 0.8}, SamplingParams(6, 0.8, 0.7, 20)),
        ({"stop": "1"}, SamplingParams(6, stop=("1",))),
        ({"stop": ["1", "2"], "max_tokens": 9}, SamplingParams(9, stop=("1", "2"))),
    ],
)
def test_completions_are_those_of_the_local_sampler(
    policy: Policy, url: str, asked: dict[str, Any], params: SamplingParams
) -> None:
    session = Session(url)
    found = session.sample(session.sampler(None, 0), PROMPT, n=5, **asked)
    streams = [key(3, "tinker", i) for i in range(5)]
    own = LocalSampler(policy).sample([Request(np.array(PROMPT), streams)], params)
    expected = {s.sample: s.completion for s in own}
    assert [tokens for tokens, _, _ in found] == [expected[i].tokens.tolist() for i in range(5)]
    assert [finish for *_, finish in found] == [expected[i].finish for i in range(5)]
    for (_, logprobs, _), i in zip(found, range(5), strict=True):
        assert np.allclose(logprobs, expected[i].logprobs, atol=1e-6)


def test_requests_that_share_a_pass_get_what_they_would_alone(url: str) -> None:
    session = Session(url)
    sampler = session.sampler(None, 0)
    kinds = [
        {"prompt": PROMPT, "max_tokens": 3},
        {"prompt": PROMPT, "max_tokens": 9, "seed": 5},
        {"prompt": [5, 6], "n": 2},
        {"prompt": PROMPT, "max_tokens": 9, "temperature": 0.5},
        {"prompt": PROMPT, "max_tokens": 9, "seed": 5},
    ]
    alone = [session.sample(sampler, seq_id=i, **kind) for i, kind in enumerate(kinds)]
    promises = [session.ask(sampler, seq_id=10 + i, **kind) for i, kind in enumerate(kinds)]
    assert len({*promises[2]["sample_sequence_ids"], *promises[0]["sample_sequence_ids"]}) == 3
    assert [sampled(session.result(p)) for p in promises] == alone
    again = session.ask(sampler, seq_id=10, **kinds[0])
    assert again == promises[0], "the same request again"
    assert alone[1] == alone[4] != alone[3]


def test_ids_end_a_completion_and_an_empty_list_leaves_none(policy: Policy, url: str) -> None:
    session = Session(url)
    sampler = session.sampler(None, 0)
    ((tokens, _, _),) = session.sample(sampler, PROMPT, max_tokens=40, stop=[])
    assert len(tokens) == 40
    place = next(i for i, t in enumerate(tokens) if t not in policy.end_ids and t not in tokens[:i] and i > 3)
    if set(tokens[: place + 1]) & set(policy.end_ids):
        pytest.fail("choose another seed: the model ended before the token that is to stop it")
    ((stopped, _, finish),) = session.sample(sampler, PROMPT, seq_id=1, max_tokens=40, stop=[tokens[place]])
    assert (stopped, finish) == (tokens[: place + 1], "stop"), "with the token that ended it"


def test_logprobs_of_prompts_are_the_models(policy: Policy, url: str) -> None:
    session = Session(url)
    sampler = session.sampler(None, 0)
    logits = policy.model(torch.tensor([PROMPT])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    for extra, shown in (({}, 3), ({"prompt_logprobs_last_n": 2}, 2)):
        body = {
            "sampling_session_id": sampler,
            "seq_id": shown,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            "sampling_params": {"max_tokens": 1},
            "prompt_logprobs": True,
            **extra,
        }
        message = read_fields(session.result(call(url, "asample", body)))
        found = np.frombuffer(message[2][0], np.float32)
        assert len(found) == 4
        assert np.isnan(found[:-shown]).all()
        assert np.allclose(found[-shown:], expected.detach()[-shown:], atol=1e-5)


def test_a_sampler_keeps_its_weights_and_old_ones_are_released(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_SNAPSHOTS", 2)
    monkeypatch.setattr("covey.tinker.app.MAX_SNAPSHOTS", 2)
    weights = {"tokens": PROMPT[:-1], "target_tokens": PROMPT[1:], "weights": np.ones(3)}
    with serving(policy_of("qwen3"), tmp_path) as address:
        session = Session(address)
        client = session.train()
        base = session.sample(session.sampler(None, 100), PROMPT)
        path = client.do("save_weights_for_sampler", path="first")["path"]
        snapshots = [client.snapshot(0)]
        first = session.sample(snapshots[0], PROMPT)
        assert first[0][0] == base[0][0], "B is 0"
        for i in (1, 2):
            client.backward([weights])
            client.step(learning_rate=0.1)
            snapshots.append(client.snapshot(i))
        assert session.sample(snapshots[1], PROMPT) != first
        released = session.result(session.ask(snapshots[0], PROMPT, seq_id=7))
        assert "was released" in released["error"]
        saved = [session.sampler(path, 10 + i) for i in range(4)]
        assert [session.sample(name, PROMPT) for name in (*saved, *saved)] == [first] * 8
        assert call(address, f"samplers/{saved[0]}") == {"sampler_id": saved[0], "base_model": "tiny"}
        session_two = Session(address)
        assert session_two.sample(session_two.sampler(path, 0), PROMPT) == first
        call(address, f"sessions/{session.id}/finish", {"reason": {"type": "success"}})
        with pytest.raises(Refused, match="there is no such training client; it may have begun before"):
            client.step()
        assert session_two.sample(session_two.sampler(path, 1), PROMPT) == first, "checkpoints stay"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": 10**6}, "4 tokens of prompt and max_tokens 1000000 are more than the context"),
        ({"max_tokens": 0}, "sampling_params.max_tokens: Input should be greater"),
        ({"temperature": -1}, "sampling_params.temperature"),
        ({"stop": [""]}, "an empty text would end"),
        ({"nucleus": 1}, "sampling_params.nucleus: Extra inputs"),
        ({"topk_prompt_logprobs": 5}, r"a local Tinker returns log-probs of the prompt's own tokens only"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_a_sentence(url: str, more: dict[str, Any], words: str) -> None:
    session = Session(url)
    with pytest.raises(Refused, match=words):
        session.ask(session.sampler(None, 0), PROMPT, **more)


def test_misattributed_and_unknown_names_are_refused(policy: Policy, url: str, tmp_path: Path) -> None:
    session = Session(url)
    for path, body, words in (
        ("create_model", {"session_id": "x", "model_seq_id": 0}, "base_model: Field required"),
        ("get_info", {"model_id": "x"}, "x: there is no such training client"),
        ("create_sampling_session", {"session_id": "x", "sampling_session_seq_id": 0}, "no such session"),
        ("session_heartbeat", {"session_id": "x"}, "no such session; it may have begun before this server"),
        ("retrieve_future", {"request_id": "x"}, "there is no such request"),
        ("copy_weights", {}, "a local Tinker has no POST /api/v1/copy_weights"),
        ("forward_backward", b"\x0f\x01", "no protobuf message"),
        ("forward_backward", b"\x08\x01", "a number in place of a submessage"),
    ):
        with pytest.raises(Refused, match=words):
            call(url, path, body)
    with pytest.raises(Refused, match="base_model 'other': this server has tiny"):
        lora = {"rank": 4}
        body = {"session_id": session.id, "model_seq_id": 0, "base_model": "other", "lora_config": lora}
        call(url, "create_model", body)
    with pytest.raises(Refused, match="train at least one of"):
        session.train(train_attn=False, train_mlp=False, train_unembed=False)
    with serving(policy, tmp_path, token="tml-secret") as closed:
        with pytest.raises(Refused, match="the token is missing or wrong"):
            Session(closed)
        assert call(closed, "healthz", key="tml-secret") == {"status": "ok"}


def test_no_message_however_damaged_does_more_than_fail() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        message = rng.integers(0, 256, rng.integers(0, 40), dtype=np.uint8).tobytes()
        try:
            read_fields(message)
        except DataError:
            continue


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--weights: with --tinker clients train"):
        serve_tinker("tiny", "127.0.0.1", 0, tmp_path, "")
    with pytest.raises(ConfigError, match="tiny has no tokenizer that a client can load"):
        serve_tinker("tiny", "127.0.0.1", 0, None, "", ["--output", str(tmp_path)])


@pytest.mark.slow
def test_the_command_serves_a_folder_and_ends_at_ctrl_c(policy: Policy, tmp_path: Path) -> None:
    save_policy(policy, tmp_path / "model")
    command = [sys.executable, "-m", "covey", "serve", "--tinker", str(tmp_path / "model"), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--output", str(tmp_path / "out")], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[0] == f"base_model {tmp_path / 'model'}, tokenizer {tmp_path / 'model'}\n"
        assert lines[1] == f"checkpoints in {tmp_path / 'out' / 'tinker'}\n"
        address = lines[2].split()[-1]
        reply = httpx2.get(f"{address}/api/v1/get_server_capabilities")
        (served,) = reply.json()["supported_models"]
        assert served["model_name"] == str(tmp_path / "model")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
