"""A model served over HTTP in a thread, and requests to it that must be refused."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from covey.cluster.serving.app import Service
from covey.cluster.serving.shared import SharedModel
from covey.models.policy import Policy


@contextmanager
def serving(policy: Policy, weights: Path | None = None, token: str = "", port: int = 0) -> Iterator[str]:
    """The address of a server with this model."""
    shared = SharedModel(policy, 64)
    listener = socket.create_server(("127.0.0.1", port))
    app = Service(shared, "policy", token, weights).app()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        shared.close()
        listener.close()


def refused(url: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and message of a request that must not succeed."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with caught.value as error:
        return error.code, json.loads(error.read())["error"]["message"]


GOOD = {"prompt": [5, 6, 7], "max_tokens": 3}
