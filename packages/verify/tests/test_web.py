"""JSON over HTTP: what a caller may rely on whatever the other side does."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.error import HTTPError

import pytest

from covey_verify.web import MOST_MESSAGE, ask


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


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(("kind", "code"), [("busy", 429), ("cut", 500), ("elsewhere", 302)])
def test_an_error_says_what_the_server_said_and_holds_no_connection(
    address: str, kind: str, code: int
) -> None:
    with pytest.raises(HTTPError) as caught:
        ask(f"{address}/{kind}")
    assert caught.value.code == code
    assert isinstance(caught.value.fp, io.BytesIO)
    assert caught.value.read() == b"x" * MOST_MESSAGE


def test_what_is_no_json_or_too_long_is_refused(address: str) -> None:
    assert ask(f"{address}/json") == {"a": 1}
    with pytest.raises(ValueError, match="Expecting value"):
        ask(f"{address}/text")
    with pytest.raises(ValueError, match="more than 5000 bytes"):
        ask(f"{address}/text", largest=5000)
    with pytest.raises(ValueError, match="not an http address"):
        ask("file:///etc/passwd")


SECRET = "http://me:geheim@127.0.0.1:9/v1"


def test_a_password_in_an_address_is_not_asked_with() -> None:
    with pytest.raises(ValueError, match="environment variables") as caught:
        ask(SECRET)
    assert "geheim" not in str(caught.value)
