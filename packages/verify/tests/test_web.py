"""JSON over HTTP: what a caller may rely on whatever the other side does."""

from __future__ import annotations

import gzip
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import ClassVar

import pytest

from covey_verify.web import StatusError, TooLong, ask


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kind, body = self.path.strip("/"), b"x" * 10_000
        if kind == "json":
            body = b'{"a": 1}'
        self.send_response({"busy": 429, "cut": 500, "elsewhere": 302}.get(kind, 200))
        if kind == "elsewhere":
            self.send_header("Location", "/json")
        self.send_header("Content-Length", str(len(body) + (10 if kind == "cut" else 0)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


class _Keeps(BaseHTTPRequestHandler):
    """Keeps connections, and answers with the number of the one that it is asked on."""

    protocol_version = "HTTP/1.1"
    connections = 0
    headers_of: ClassVar[list[dict[str, str]]] = []

    def setup(self) -> None:
        type(self).connections += 1
        self.number = type(self).connections
        super().setup()

    def do_GET(self) -> None:
        self.headers_of.append({name.lower(): value for name, value in self.headers.items()})
        body = str(self.number).encode()
        if self.path == "/bomb":
            body = gzip.compress(b"1" * 10_000_000)
        self.send_response(200)
        self.send_header("Set-Cookie", "who=one")
        if self.path == "/bomb":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.path == "/last"  # without a word in the headers

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


def _serve(server: HTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    yield from _serve(HTTPServer(("127.0.0.1", 0), _Answers))


@pytest.fixture
def keeping() -> Iterator[str]:
    yield from _serve(ThreadingHTTPServer(("127.0.0.1", 0), _Keeps))


@pytest.mark.parametrize(("kind", "code"), [("busy", 429), ("cut", 500), ("elsewhere", 302)])
def test_an_error_says_what_the_server_said(address: str, kind: str, code: int) -> None:
    with pytest.raises(StatusError, match=f"HTTP {code} .*x{{200}}$") as caught:
        ask(f"{address}/{kind}")
    assert caught.value.status == code
    assert ("to /json: redirects are not followed" in str(caught.value)) == (code == 302)


def test_what_is_no_json_or_too_long_is_refused(address: str) -> None:
    assert ask(f"{address}/json") == {"a": 1}
    with pytest.raises(ValueError, match="Expecting value"):
        ask(f"{address}/text")
    with pytest.raises(TooLong, match="more than 5000 bytes"):
        ask(f"{address}/text", largest=5000)
    with pytest.raises(ValueError, match="not an http address"):
        ask("file:///etc/passwd")


SECRET = "http://me:geheim@127.0.0.1:9/v1"


def test_a_password_in_an_address_is_not_asked_with() -> None:
    with pytest.raises(ValueError, match="environment variables") as caught:
        ask(SECRET)
    assert "geheim" not in str(caught.value)


def test_requests_share_a_connection_but_no_cookies(keeping: str) -> None:
    first = ask(keeping, token="geheim")
    assert ask(keeping) == first
    assert "cookie" not in _Keeps.headers_of[-1]
    assert "authorization" not in _Keeps.headers_of[-1]


def test_a_connection_that_the_server_has_closed_is_not_asked_on(keeping: str) -> None:
    first = ask(f"{keeping}/last")
    time.sleep(0.05)  # until its end has arrived
    assert ask(keeping) == first + 1


def _in_child(address: str, results: multiprocessing.SimpleQueue[object]) -> None:
    results.put(ask(address))


def test_a_forked_child_has_connections_of_its_own(keeping: str) -> None:
    first = ask(keeping)
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    child = fork.Process(target=_in_child, args=(keeping, results))
    child.start()
    assert results.get() == first + 1
    child.join()
    assert ask(keeping) == first


def test_a_reply_that_was_compressed_unasked_does_not_grow(keeping: str) -> None:
    with pytest.raises(ValueError, match="decode"):
        ask(f"{keeping}/bomb", largest=100_000)


def test_a_reply_that_drips_ends_at_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection = server.accept()[0]
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                try:
                    while True:
                        connection.sendall(b"1")
                        time.sleep(0.02)
                except OSError:
                    pass  # the client has gone

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TimeoutError, match=r"no whole reply within 0.2 s"):
            ask(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=0.2)
        thread.join()


def test_a_server_that_is_not_there_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # not for this machine itself
    with pytest.raises(ConnectionError, match="refused"):
        ask(f"http://localhost:{port}")
