"""A model served over HTTP in a thread, and requests to it that must be refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from covey.cluster.serving.app import Service
from covey.cluster.serving.shared import SharedModel
from covey.models.policy import Policy
from tests.serving import served


@contextmanager
def serving(policy: Policy, weights: Path | None = None, token: str = "", port: int = 0) -> Iterator[str]:
    """The address of a server with this model."""
    shared = SharedModel(policy, 64)
    try:
        with served(Service(shared, "policy", token, weights).app(), port) as address:
            yield address
    finally:
        shared.close()


def refused(url: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and message of a request that must not succeed."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **(headers or {})}
    reply = httpx2.post(url, content=data, headers=headers, timeout=20)
    assert reply.is_error
    return reply.status_code, reply.json()["error"]["message"]


GOOD = {"prompt": [5, 6, 7], "max_tokens": 3}
