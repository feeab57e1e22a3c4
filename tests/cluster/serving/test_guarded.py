"""`covey serve`: pages of other sites, prompts that are too long, messages with two lengths, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.models.policy import Policy, save_policy
from covey_verify.web import ask
from tests.cluster.serving.served import GOOD, refused, serving
from tests.conftest import policy_of
from tests.sampling.stub import copied

FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_of("qwen3")


@pytest.fixture(scope="module")
def server(policy: Policy) -> Iterator[str]:
    with serving(copied(policy)) as url:
        yield url


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_page_of_another_site_is_not_answered(server: str, headers: dict[str, str]) -> None:
    status, said = refused(f"{server}/v1/completions", GOOD, headers)
    assert status == 403
    assert "pages of other sites" in said
    assert refused(f"{server}/weights", {"folder": "x", "version": 1}, headers)[0] == 403


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"]
)
def test_what_a_form_can_send_is_not_read(server: str, kind: str) -> None:
    status, said = refused(f"{server}/v1/completions", GOOD, {"Content-Type": kind})
    assert status == 415
    assert "Content-Type: application/json" in said


def test_its_own_page_and_other_programs_are_answered(server: str) -> None:
    for headers in ({"Origin": server, "Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {}):
        with socket.create_connection(server.removeprefix("http://").split(":")) as connection:
            body = json.dumps(GOOD).encode()
            lines = {"Host": server.removeprefix("http://"), "Content-Length": str(len(body)), **headers}
            lines |= {"Content-Type": "application/json; charset=utf-8"}
            said = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{said}\r\n".encode() + body)
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_message_with_two_lengths_is_refused_and_nothing_of_it_is_another_one(server: str) -> None:
    hidden = b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(server.removeprefix("http://").split(":")) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden
        )
        connection.settimeout(20)
        reply = b"".join(iter(lambda: connection.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1") == 1


def test_an_empty_stop_string_is_refused_as_in_the_config(server: str) -> None:
    for stop in ("", [""], ["a", ""]):
        status, said = refused(f"{server}/v1/completions", {**GOOD, "stop": stop})
        assert status == 400
        assert said.startswith("stop")


def with_template(policy: Policy) -> Policy:
    own = copied(policy)
    own.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    return own


def test_what_cannot_fit_is_refused_before_it_is_encoded(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object) -> list[int]:
        raise AssertionError("it was encoded")

    own = copied(policy)
    monkeypatch.setattr(own, "encode", encode)
    many = [{"role": "user", "content": "1"}] * 50_000
    with serving(own) as url:
        for path, body in (
            ("completions", {"prompt": "1+" * 2_000_000, "max_tokens": 3}),
            ("chat/completions", {"messages": [{"role": "user", "content": "1+" * 500_000}]}),
            ("chat/completions", {"messages": many}),
            ("chat/completions", {"messages": many[:1], "chat_template_kwargs": {"a": ["b" * 1_000_000]}}),
        ):
            status, said = refused(f"{url}/v1/{path}", body)
            assert status == 400
            assert "longer than the context of 128 tokens" in said


def test_others_are_answered_while_a_prompt_is_encoded(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, begun, release = copied(policy), threading.Event(), threading.Event()

    def encode(*_: object) -> list[int]:
        begun.set()
        release.wait(60)
        return [5, 6]

    monkeypatch.setattr(own, "encode", encode)
    found: list[object] = []
    with serving(own) as url:
        body = {"prompt": "1+2=", "max_tokens": 3}
        thread = threading.Thread(target=lambda: found.append(ask(f"{url}/v1/completions", body)))
        thread.start()
        assert begun.wait(20)
        assert ask(f"{url}/health", timeout=20) == {"status": "ok"}
        assert found == []
        release.set()
        thread.join(60)
    assert found[0]["usage"]["prompt_tokens"] == 2


def test_a_prompt_that_cannot_be_encoded_fails_alone(policy: Policy) -> None:
    own = copied(policy)
    own.tokenizer.chat_template = None
    with serving(own) as url:
        status, said = refused(f"{url}/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]})
        assert status == 400
        assert "no chat template" in said
        assert ask(f"{url}/v1/completions", {"prompt": "1+2=", "max_tokens": 3})["choices"]
        assert refused(f"{url}/v1/completions", {"prompt": "1+" * 100, "max_tokens": 3})[0] == 400


def test_a_reply_bears_the_name_of_its_request(server: str) -> None:
    assert ask(f"{server}/v1/completions", {**GOOD, "request_id": "mine"})["id"] == "mine"
    assert ask(f"{server}/v1/completions", GOOD)["id"].startswith("covey-")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_in_the_middle_of_its_work_ends_when_it_is_told_to(
    policy: Policy, tmp_path: Path, number: signal.Signals
) -> None:
    large = copied(policy)
    large.model.config.max_position_embeddings = 1 << 20
    save_policy(large, tmp_path / "model")
    process = subprocess.Popen(
        [sys.executable, "-m", "covey", "serve", str(tmp_path / "model"), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1].removesuffix("/v1")
    endless = {"prompt": [5, 6, 7], "max_tokens": 1_000_000, "temperature": 50.0, "n": 8}
    threading.Thread(target=_asks, args=(f"{url}/v1/completions", endless), daemon=True).start()
    time.sleep(0.5)
    assert ask(f"{url}/health", timeout=20) == {"status": "ok"}
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in said


def _asks(url: str, body: dict) -> None:
    with contextlib.suppress(OSError):
        ask(url, body, timeout=100)
