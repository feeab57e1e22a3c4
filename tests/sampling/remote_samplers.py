"""Remote samplers over stub servers: requests, policies that have moved, samples by request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from covey.config.sampling import Servers
from covey.models.policy import Policy
from covey.rng import key
from covey.sampling.base import Request, SampledCompletion, SamplerMonitor, SamplingParams
from covey.sampling.remote import RemoteSampler
from covey.sampling.servers import Transport
from covey_verify.web import ask
from tests.conftest import random_prompts
from tests.sampling.stub import Stub

PARAMS = SamplingParams(max_tokens=10)


class Version:
    def __init__(self, version: int) -> None:
        self.version = version


def asked(count: int = 5, size: int = 3) -> list[Request]:
    prompts = random_prompts(*range(3, 3 + count))
    return [Request(p, [key(7, i, g) for g in range(size)]) for i, p in enumerate(prompts)]


class Listener(SamplerMonitor):
    """Keeps what happened to servers, and how many completions ran at once after memory ran out."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.running: list[int] = []

    def fewer_running(self, running: int) -> None:
        self.running.append(running)

    def server_changed(self, what: str) -> None:
        self.said.append(what)


def sampler(
    policy: Policy,
    stubs: list[Stub],
    folder: Path,
    transport: Transport = ask,
    from_snapshot: bool = False,
    **settings: object,
) -> RemoteSampler:
    urls = tuple(s.url for s in stubs)
    servers = Servers(url=urls, **{"timeout": 20.0, "patience": 0.5, **settings})
    probes = random_prompts(4, 6, 8)
    listener = Listener()
    made = RemoteSampler(
        policy,
        servers,
        folder / "sync",
        probes,
        1.0,
        12,
        transport=transport,
        monitor=listener,
        from_snapshot=from_snapshot,
    )
    made.said = listener.said
    return made


def moved(policy: Policy) -> None:
    """An update of the policy."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)


def together(found: list[SampledCompletion]) -> dict[tuple[int, int], np.ndarray]:
    return {(x.request, x.sample): x.completion.tokens for x in found}
