"""A judge for tests: a server on this machine that answers as it is told."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from covey_verify.texts.judge import endpoint


def key_of(body: dict[str, Any]) -> str:
    """Under which a judge is told to reply."""
    return re.findall(r"verdicts-[0-9a-f]{8}", body["messages"][0]["content"])[-1]


class Stub:
    """An OpenAI-compatible server that answers as it is told: each time the next of ``replies``."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.location = ""
        self.refuses_with = ""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.asked.append(body)
                stub.keys.append(self.headers["Authorization"])
                reply = stub.replies.pop(0) if len(stub.replies) > 1 else stub.replies[0]
                reply = reply(body) if callable(reply) else reply
                if isinstance(reply, str):
                    reply = reply.replace("KEY", key_of(body))
                status, text = (reply, stub.refuses_with) if isinstance(reply, int) else (200, reply)
                if reply == "stall":
                    time.sleep(1.5)
                    return
                self.send_response(status)
                if stub.location:
                    self.send_header("Location", stub.location)
                self.end_headers()
                content = {"choices": [{"message": {"role": "assistant", "content": text}}]}
                self.wfile.write(text if isinstance(text, bytes) else json.dumps(content).encode())

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 64  # of 5, others wait a second for their next try on a busy machine

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.server.shutdown()
    stub.server.server_close()
    endpoint.cache_clear()
