"""The servers of a run: which of them take part, how they get new weights, and how they prove to have them.

After every change of weights each server samples a few completions: their log-probs are compared with the
trained policy's, and so is the distribution of its tokens (``probes``). A server that does not answer, or
whose log-probs differ, is excluded. It takes part again once it passes the probes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from covey.config.sampling import Servers
from covey.models.policy import Policy, copy_trained
from covey.rng import key
from covey.sampling.base import SamplerMonitor, Weights
from covey.sampling.dialects import Misbehaved, recognize
from covey.sampling.probes import alters_draws, closest_policy, mean_difference, sample_probes
from covey.sampling.server_client import ServerClient
from covey.sampling.servers import (
    FAILURES,
    RETRY_SECONDS,
    RemoteServer,
    WeightsFolder,
    none_left,
    restart,
    same_complaint,
    timed_out,
)
from covey_verify.web import reason_of

PROBES = 4
"""Number of prompts on which a server is compared with the policy."""
FLOAT32_TOLERANCE = 1e-4
"""Mean difference of log-probs, nats, that rounding explains for an exact policy."""
BFLOAT16_TOLERANCE = 0.03
"""The same for a rounded policy."""
ALWAYS_ALLOWED = 1e-5
"""Nats that a server whose rounding is known may always differ by."""
ROUNDING_FACTOR = 10
"""The multiple of its rounding that such a server may differ by."""


class Fleet:
    """All servers of a run and the version of the weights that they should have. Safe from any thread."""

    def __init__(
        self,
        policy: Policy,
        settings: Servers,
        folder: Path,
        probes: Sequence[np.ndarray],
        temperature: float,
        client: ServerClient,
        monitor: SamplerMonitor,
    ) -> None:
        """Nothing is sent yet. Weights are written to ``folder``; ``probes`` are prompts to compare on."""
        self.policy = policy
        self.settings = settings
        self.client = client
        self.temperature = temperature
        self.servers = [RemoteServer(url.rstrip("/")) for url in settings.url]
        self.version = 0
        self.probes = [prompt for prompt in probes[:PROBES] if len(prompt)]
        self.monitor = monitor
        self._weights = WeightsFolder(folder)
        self._weights_lock = threading.Lock()
        """Held while servers are given weights and compared: the snapshot must not change meanwhile."""
        # Held only briefly: whether a server takes requests and how many it works on have to change together.
        self._requests_lock = threading.Lock()
        self._exact: bool | None = None

    @property
    def bit_exact(self) -> bool:
        """Whether every server had the policy's own bits at the first probes; from then on all must."""
        if self._exact is None:
            self.bring_up()
        return bool(self._exact)

    @property
    def present(self) -> list[RemoteServer]:
        """The servers that take part with the current weights."""
        return [s for s in self.servers if not s.excluded and s.version == self.version]

    @property
    def all_excluded(self) -> bool:
        """Whether every server is excluded."""
        return all(s.excluded for s in self.servers)

    @property
    def patience(self) -> float:
        """Seconds without any server until the run stops; enough for two more tries if one only hangs."""
        if any(server.hangs for server in self.servers):
            return self.settings.patience + 2 * (self.settings.timeout + RETRY_SECONDS)
        return self.settings.patience

    def sync(self, weights: Weights, snapshot: bool) -> None:
        """Sample from these weights from now on; they travel when a server is next asked for something.

        ``snapshot``: the policy is a copy of the trained one, and is overwritten.
        """
        with self._weights_lock:
            if snapshot:
                copy_trained(weights.network.unsharded, self.policy)
            self.version = weights.version

    # Requests

    def may_ask(self, server: RemoteServer, version: int) -> bool:
        """Whether a server takes requests for completions of this version of the weights."""
        with self._requests_lock:
            return self._takes_requests(server, version)

    def begin_request(self, server: RemoteServer, version: int) -> bool:
        """Count a request to a server, unless it takes none."""
        with self._requests_lock:
            takes_request = self._takes_requests(server, version)
            server.busy += takes_request
            return takes_request

    def end_request(self, server: RemoteServer) -> None:
        """Count a request as answered: only an idle server is given weights."""
        with self._requests_lock:
            server.busy -= 1

    def _takes_requests(self, server: RemoteServer, version: int) -> bool:
        return not server.excluded and server.version == version == self.version

    def exclude(self, server: RemoteServer, error: BaseException) -> None:
        """Exclude a server whose request failed."""
        if server.excluded:
            return
        server.exclusion_reason = reason_of(error)
        server.version = None
        server.last_tried = time.monotonic()
        server.hangs = timed_out(error)
        self.monitor.server_changed(f"{server.url} is excluded: {server.exclusion_reason}")

    # Weights

    def bring_up(self) -> None:
        """Bring every server that can be reached to the current weights. Raises SamplersLost."""
        start = time.monotonic()
        while True:
            self.give_weights(retry_excluded_now=True)
            if self.present:
                break
            if self.all_excluded and time.monotonic() - start > self.patience:
                raise none_left(self.servers)
            self.monitor.result_awaited()
            time.sleep(0.2)
        if self._exact is None:
            same_bits = all(s.dialect and s.dialect.streams and s.rounding == 0 for s in self.present)
            self._exact = same_bits and self.policy.bit_exact

    def give_weights(self, retry_excluded_now: bool = False) -> None:
        """Let servers that lack the current weights take them, and probe them."""
        due_servers = [server for server in self.servers if self._is_due(server, retry_excluded_now)]
        for server in due_servers:
            with self._weights_lock:
                self._update(server)

    def _is_due(self, server: RemoteServer, retry_excluded_now: bool) -> bool:
        """Whether it needs weights: an excluded one every ``RETRY_SECONDS`` seconds, or now."""
        if server.excluded:
            return retry_excluded_now or time.monotonic() - server.last_tried > RETRY_SECONDS
        return server.version != self.version

    def _update(self, server: RemoteServer) -> None:
        """Bring a server to the current weights, unless it is still busy; exclude it if that fails."""
        with self._requests_lock:  # from here on it is not asked for completions
            if not server.excluded and (server.busy or server.version == self.version):
                return
            server.version = None
        reason_before = server.exclusion_reason
        server.last_tried = time.monotonic()
        try:
            self._load_and_probe(server)
        except FAILURES as error:
            server.exclusion_reason = reason_of(error)
            server.version = None
            server.hangs = server.times_admitted > 0 and timed_out(error)
            if not same_complaint(server.exclusion_reason, reason_before):
                self.monitor.server_changed(f"{server.url} is excluded: {server.exclusion_reason}")
            return
        server.exclusion_reason = ""
        server.hangs = False
        server.times_admitted += 1
        if reason_before:
            self.monitor.server_changed(f"{server.url} is back, with the weights of version {self.version}")

    def _load_and_probe(self, server: RemoteServer) -> None:
        """Give a server the current weights and probe it. Raises an error of FAILURES."""
        if server.dialect is None or server.excluded:
            self._recognize(server)
            if not self._fault(server):  # it may have the weights already
                server.version = self.version
                return
        assert server.dialect is not None, "it has been recognized"
        folder = self._weights.save_version(self.policy, self.version)
        cause: BaseException | None = None
        try:
            send = partial(self.client.send, server, timeout=self.settings.timeout)
            server.dialect.load(send, str(folder), self.version)
            fault = self._fault(server)
        except FAILURES as error:
            fault = reason_of(error)
            cause = error
        if fault and self.settings.restart:  # the last resort
            self.monitor.server_changed(f"{server.url}: {fault}; restarting it")
            restart(self.settings.restart, server.url, folder, self.settings.timeout)
            self._recognize(server)
            fault = self._fault(server)
            cause = None
        if fault:
            raise Misbehaved(fault) from cause
        server.version = self.version

    def _recognize(self, server: RemoteServer) -> None:
        must_take_weights = not self.settings.restart
        server.dialect, server.model = recognize(partial(self.client.send, server), must_take_weights)
        server.draws_checked = False

    # Proof

    def _fault(self, server: RemoteServer) -> str:
        """Return how a server's log-probs or draws differ from the policy's; empty if they do not."""
        server.stamp = None  # the probes prove the stamp of the first reply
        ask = partial(self.client.complete, server)
        stream = partial(key, self.version, server.url)
        probes = sample_probes(ask, self.probes, self.temperature, stream)
        allowed = self._allowed_difference(server)
        temperature = self.temperature or 1.0
        policy, difference = closest_policy(self.policy, probes, temperature, ALWAYS_ALLOWED)
        if difference <= allowed:
            if server.rounding is None:
                server.rounding = difference
            rounding = self._allowed_difference(server)
            fault = alters_draws(
                policy, ask, probes, self.temperature, rounding, stream, server.draws_checked
            )
            server.draws_checked = server.draws_checked or not fault
            return fault
        if temperature != 1.0 and mean_difference(policy, probes, 1.0) <= allowed:
            return (
                "its log-probs do not include the temperature; for vLLM add --logprobs-mode "
                "processed_logprobs"
            )
        return (
            f"its log-probs differ by {difference:.2g} nats on average from version {self.version}, more "
            f"than the {allowed:.2g} of rollout.sampler.tolerance: it did not take the weights, or computes "
            "in another precision"
        )

    def _allowed_difference(self, server: RemoteServer) -> float:
        """Return the largest allowed mean difference of log-probs, nats."""
        if self._exact:
            return 0.0
        if self.settings.tolerance is not None:
            return self.settings.tolerance
        bound = BFLOAT16_TOLERANCE if self.policy.rounded else FLOAT32_TOLERANCE
        if server.rounding is None:
            return bound
        return min(bound, max(ALWAYS_ALLOWED, ROUNDING_FACTOR * server.rounding))
