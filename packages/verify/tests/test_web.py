"""JSON over HTTP: what a caller may rely on whatever the other side does."""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from covey_verify.web import StatusError, TooLong, ask


class Server:
    """A server of which every byte is written by hand. ``requests``: (connection, head) of each."""

    def __init__(self, answer: Callable[[int, str], list[bytes] | None], host: str = "127.0.0.1") -> None:
        """``answer`` gets the number of a request and its head, and returns parts to send, slowly.

        None closes the connection. After the part b"" the connection is closed as well.
        """
        self.answer = answer
        self.requests = list[tuple[int, str]]()
        self.lock = threading.Lock()
        self.listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64
        )
        port = self.listener.getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        number = 0
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(connection, number), daemon=True).start()
                number += 1

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection, connection.makefile("rb") as file, suppress(OSError):
            while line := file.readline():
                lines = [line]
                while (line := file.readline()).strip():
                    lines.append(line)
                head = b"".join(lines).decode()
                size = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                file.read(int(size[0].split(":")[1]) if size else 0)
                with self.lock:
                    self.requests.append((number, head))
                    count = len(self.requests)
                parts = self.answer(count, head)
                for part in parts or ():
                    connection.sendall(part)
                    if len(parts or ()) > 1:
                        time.sleep(0.05)
                if not parts or parts[-1] == b"":
                    return

    @property
    def connections(self) -> list[int]:
        """The connection of each request."""
        return [number for number, _ in self.requests]


@contextmanager
def serving(answer: Callable[[int, str], list[bytes] | None], host: str = "127.0.0.1") -> Iterator[Server]:
    """A server, closed in the end."""
    server = Server(answer, host)
    try:
        yield server
    finally:
        server.listener.close()


def reply(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """A whole reply."""
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join((*lines, "", "")).encode() + body


def good(_count: int, _head: str) -> list[bytes]:
    """Answer with an object."""
    return [reply(b'{"a": 1}')]


@pytest.mark.parametrize(
    ("status", "headers", "says"),
    [
        ("429 Slow down", (), "HTTP 429 Too Many Requests xxx"),
        ("500 Oops", (), "HTTP 500 Internal Server Error xxx"),
        (
            "302 Found",
            ("Location: http://127.0.0.1:9/elsewhere",),
            "to http://127.0.0.1:9/elsewhere: redirects",
        ),
        ("799 Unheard", (), "HTTP 799 xxx"),
    ],
)
def test_an_error_has_the_status_and_what_the_server_said(
    status: str, headers: tuple[str, ...], says: str
) -> None:
    with serving(lambda *_: [reply(b"x" * 10_000, status, *headers)]) as server:
        with pytest.raises(StatusError, match=says) as caught:
            ask(server.url)
        assert caught.value.status == int(status[:3])
        assert len(server.requests) == 1


def test_an_error_whose_message_never_comes_is_still_that_error() -> None:
    broken = [b"HTTP/1.1 503 No\r\nContent-Length: 10\r\n\r\n", b""]
    with (
        serving(lambda *_: broken) as server,
        pytest.raises(StatusError, match=r"^HTTP 503 Service Unavailable$"),
    ):
        ask(server.url, {})


def test_a_key_goes_to_no_other_address_and_is_in_no_error() -> None:
    with serving(good) as other:
        elsewhere = f"Location: {other.url}/stolen"
        with serving(lambda *_: [reply(b"", "307 Temporary Redirect", elsewhere)]) as server:
            with pytest.raises(StatusError, match="redirects are not followed"):
                ask(server.url, {}, token="geheim")
            assert "authorization: bearer geheim" in server.requests[0][1].lower()
        assert not other.requests
        for key in ("geheim\nX-Evil: 1", "geheim\r", "gehéim"):
            with pytest.raises(ValueError, match="line break") as caught:
                ask(other.url, {}, token=key)
            assert "geh" not in str(caught.value)
        assert not other.requests


def test_what_is_no_json_or_too_long_is_refused() -> None:
    bodies = {"/json": b'{"a": 1}', "/text": b"x" * 10_000, "/empty": b" ", "/deep": b"[" * 100_000}
    with serving(lambda _, head: [reply(bodies[head.split()[1]])]) as server:
        assert ask(f"{server.url}/json") == {"a": 1}
        assert ask(f"{server.url}/empty") is None
        with pytest.raises(ValueError, match="Expecting value"):
            ask(f"{server.url}/text")
        with pytest.raises(ValueError, match="nests too deeply"):
            ask(f"{server.url}/deep")
        with pytest.raises(TooLong, match="more than 9999 bytes"):
            ask(f"{server.url}/text", largest=9999)
    for wrong in ("file:///etc/passwd", "http://", "http:///x", "ftp://127.0.0.1/"):
        with pytest.raises(ValueError, match="not an http address"):
            ask(wrong)


def test_a_compressed_reply_is_not_unpacked() -> None:
    bomb = gzip.compress(b" " * 10_000_000 + b"1")
    with serving(lambda *_: [reply(bomb, "200 OK", "Content-Encoding: gzip")]) as server:
        with pytest.raises(ValueError, match="compressed"):
            ask(server.url)
        assert "accept-encoding: identity" in server.requests[0][1].lower()


def test_a_reply_that_trickles_ends_at_the_deadline() -> None:
    parts = [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", *[b" "] * 1000]
    with serving(lambda *_: parts) as server:
        with pytest.raises(TimeoutError, match=r"no whole reply within 0.3 s"):
            ask(server.url, {}, timeout=0.3)
        assert len(server.requests) == 1


def test_an_error_whose_message_trickles_ends_there_too() -> None:
    parts = [b"HTTP/1.1 500 No\r\nContent-Length: 1000\r\n\r\n", *[b"x"] * 1000]
    with serving(lambda *_: parts) as server:
        with pytest.raises(StatusError, match=r"^HTTP 500 Internal Server Error"):
            ask(server.url, timeout=0.3)
        assert len(server.requests) == 1


def test_requests_share_connections() -> None:
    with serving(good) as server:
        for _ in range(20):
            assert ask(server.url, {"x": 1}) == {"a": 1}
        assert set(server.connections) == {0}
        with ThreadPoolExecutor(16) as threads:
            replies = list(threads.map(lambda n: ask(server.url, {"x": n}), range(200)))
        assert replies == [{"a": 1}] * 200
        assert len(set(server.connections)) <= 16


def test_a_request_on_a_connection_that_was_just_closed_is_sent_again() -> None:
    with serving(lambda count, _: None if count == 2 else good(0, "")) as server:
        assert ask(server.url, {}) == {"a": 1}
        assert ask(server.url, {}) == {"a": 1}
        assert server.connections == [0, 0, 1]


@pytest.mark.parametrize(
    "answers",
    [
        # A new connection: the server has read the request, and does not want it.
        [None],
        # A kept connection, but the reply has begun.
        [good(0, ""), [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b""]],
    ],
)
def test_no_other_request_is_sent_again(answers: list[list[bytes] | None]) -> None:
    with serving(lambda count, _: answers[count - 1]) as server:
        for _ in answers[1:]:
            assert ask(server.url, {}) == {"a": 1}
        with pytest.raises(ConnectionError):
            ask(server.url, {})
        assert len(server.requests) == len(answers)


def test_a_server_that_is_gone_is_a_connection_error() -> None:
    with serving(good) as server:
        ask(server.url)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionError, match="refused"):
        ask(f"http://127.0.0.1:{port}")


def test_cookies_are_not_kept() -> None:
    with serving(lambda *_: [reply(b"1", "200 OK", "Set-Cookie: who=me; Path=/")]) as server:
        ask(server.url)
        ask(server.url)
        assert "cookie" not in server.requests[1][1].lower()


def test_version_6_of_the_protocol() -> None:
    try:
        with serving(good, "::1") as server:
            assert ask(server.url) == {"a": 1}
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


def script(program: str, *arguments: str, **environment: str) -> str:
    """What a program prints that has ``ask``."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom covey_verify.web import ask\n{program}", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout + done.stderr


FORKED = """
import os
ask(sys.argv[1])
child = os.fork()
ask(sys.argv[1])
if not child:
    os._exit(0)
os.waitpid(child, 0)
ask(sys.argv[1])
"""


def test_a_forked_process_has_connections_of_its_own() -> None:
    with serving(good) as server:
        script(FORKED, server.url)
        # One of the four requests is the child's.
        assert sorted(server.connections) == [0, 0, 0, 1]


PROXIED = """
print(ask("http://far.example/a"), ask(sys.argv[1] + "/b"))
try:
    ask("http://near.example/c")
except OSError as error:
    print("direct")
"""


def test_proxies_of_the_environment_are_used_but_for_this_machine() -> None:
    with serving(good) as server:
        names = {"http_proxy": server.url, "no_proxy": "near.example"}
        assert script(PROXIED, server.url, **names) == "{'a': 1} {'a': 1}\ndirect\n"
        targets = [head.split()[1] for _, head in server.requests]
        assert targets == ["http://far.example/a", "/b"]


def test_a_proxy_that_cannot_be_used_is_named() -> None:
    program = "try:\n    ask('http://far.example')\nexcept OSError as error:\n    print(error)"
    assert "a proxy that the environment names" in script(program, http_proxy="gopher://there")


def test_httpx_is_imported_when_it_is_needed() -> None:
    program = "print('httpx2' in sys.modules, 'ssl' in sys.modules)"
    assert script(program) == "False False\n"


SECRET = "http://me:geheim@127.0.0.1:9/v1"


def test_a_password_in_an_address_is_not_asked_with() -> None:
    with pytest.raises(ValueError, match="environment variables") as caught:
        ask(SECRET)
    assert "geheim" not in str(caught.value)
