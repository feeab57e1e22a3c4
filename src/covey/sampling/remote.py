"""The sampler over HTTP: groups go to servers that have room, and no answer is taken on trust.

A server that fails, or whose log-probs differ from the policy's, is excluded by the ``fleet``. Its requests
go to the others, with the same random streams.

Where weights may change meanwhile (``from_snapshot``), each completion is asked for in segments. A server
that has new weights to take ends its segments first; unfinished completions continue from their tokens, here
or elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from covey.config.sampling import Servers
from covey.models.policy import Policy
from covey.sampling.base import Request, SampledCompletion, SamplerMonitor, SamplingParams, Weights
from covey.sampling.dialects import ServerOutput
from covey.sampling.fleet import Fleet
from covey.sampling.server_client import ServerClient
from covey.sampling.server_text import note_on_padding
from covey.sampling.servers import FAILURES, Piece, RemoteServer, Transport, WorkList, none_left
from covey.system.processes import on_rank_zero
from covey.types import Completion, Provenance
from covey_verify.errors import ConfigError
from covey_verify.web import ask

SEGMENT = 256
"""Number of tokens per request where weights may change meanwhile."""


class RemoteSampler:
    """Samples on servers; ``covey.sampling.base.Sampler``."""

    samples_on_every_rank = False

    def __init__(
        self,
        policy: Policy,
        servers: Servers,
        folder: Path,
        probes: Sequence[np.ndarray],
        temperature: float,
        max_running: int,
        *,
        token: str = "",
        transport: Transport = ask,
        monitor: SamplerMonitor | None = None,
        from_snapshot: bool = False,
    ) -> None:
        """Nothing is sent yet. ``folder`` is where weights are written for the servers.

        ``probes`` are prompts to compare on; ``transport`` sends a request. ``from_snapshot``: ``policy`` is
        one, and ``sync`` and ``sample`` are called in different threads.
        """
        self.policy = policy
        self.from_snapshot = from_snapshot
        self.max_running = max_running
        self.client = ServerClient(policy, transport, token, servers.timeout)
        self.monitor = monitor or SamplerMonitor()
        self.fleet = Fleet(policy, servers, folder, probes, temperature, self.client, self.monitor)
        policy.draw_from_all()
        self._noted_padding = False

    @property
    def version(self) -> int:
        """Number of optimizer steps that its weights have seen."""
        return self.fleet.version

    @property
    def bit_exact(self) -> bool:
        """Whether every server had the policy's own bits at the first probes; from then on all must.

        All processes ask this together: only rank 0 knows.
        """
        return on_rank_zero(lambda: self.fleet.bit_exact) and not self.from_snapshot

    def sync(self, weights: Weights) -> None:
        """Sample from these weights from now on; they travel when a server is next asked for something."""
        self.fleet.sync(weights, snapshot=self.from_snapshot)

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        """Yield completions as their groups end. Raises SamplersLost when no server is left."""
        # Of several processes the first one asks for all completions, and it alone gives servers weights.
        if not requests:
            return
        fleet = self.fleet
        fleet.bring_up()
        if params.truncates and not all(s.dialect.streams for s in fleet.present if s.dialect):
            raise ConfigError(
                "rollout.top_p and rollout.top_k need covey serve: vLLM and SGLang do not return which "
                "tokens could be drawn, so their log-probs cannot be trained on. Set top_p 1 and top_k 0"
            )
        work = WorkList(requests, params, deque(self._pieces(requests)))
        self._start_threads(work)
        remaining = sum(len(request.streams) for request in requests)
        last_sign_of_life = time.monotonic()
        tokens = list[np.ndarray]()
        try:
            while remaining:
                samples = work.next_result()
                if samples is not None:
                    remaining -= len(samples)
                    last_sign_of_life = time.monotonic()
                    tokens += [sample.completion.tokens for sample in samples]
                    yield from samples
                    continue
                # A thread has ended, or nothing came for a second: a server may need weights or a new try.
                self.monitor.result_awaited()
                fleet.give_weights()
                self._start_threads(work)
                if not fleet.all_excluded:
                    last_sign_of_life = time.monotonic()
                elif time.monotonic() - last_sign_of_life > fleet.patience:
                    raise none_left(fleet.servers)
        finally:
            work.close()  # also if the consumer stops early: threads wait for pieces
        self._say_padding(tokens)

    def _pieces(self, requests: Sequence[Request]) -> Iterator[Piece]:
        """Yield the completions that a request asks for: a group; ``from_snapshot`` a single completion."""
        for number, request in enumerate(requests):
            samples = range(len(request.streams))
            if self.from_snapshot:
                yield from (Piece(number, [sample]) for sample in samples)
            else:
                yield Piece(number, samples)

    def _say_padding(self, tokens: Sequence[np.ndarray]) -> None:
        note = "" if self._noted_padding else note_on_padding(self.policy, tokens)
        if note:
            self._noted_padding = True
            self.monitor.server_changed(note)

    # Threads

    def _start_threads(self, work: WorkList) -> None:
        """Let the present servers work on this call, each on as many pieces at once as it has room for."""
        group_sizes = [len(request.streams) for request in work.requests]
        largest = 1 if self.from_snapshot else max(group_sizes, default=1)
        pieces = sum(group_sizes) if self.from_snapshot else len(group_sizes)
        # A thread per request under way; ``max_running`` completions at once, in groups of the largest size.
        threads = max(1, self.max_running // largest)
        for server in self.fleet.present:
            # A server that came back has a new arrival, and needs new threads: its old ones have ended.
            if work.threads_started_for.get(server.url) == server.times_admitted:
                continue
            work.threads_started_for[server.url] = server.times_admitted
            for _ in range(min(threads, pieces)):
                threading.Thread(target=self._work, args=(server, work, self.version), daemon=True).start()

    def _work(self, server: RemoteServer, work: WorkList, version: int) -> None:
        # Runs in a thread, until the work is over, or its server fails or has weights to take.
        while (piece := self._next_piece(server, work, version)) is not None:
            failure = None
            try:
                outputs = self._ask(server, work, piece)
            except FAILURES as error:
                failure = error
            except Exception as error:  # nobody would see it in a thread, and ``sample`` would wait forever
                work.results.put(error)
                return
            self.fleet.end_request(server)  # before anything else, as only an idle server is given weights
            if failure is not None:
                self.fleet.exclude(server, failure)
            # If it was excluded or got other weights meanwhile, its segment is discarded and asked for again.
            if failure is not None or (self.from_snapshot and server.version != version):
                work.put_back(piece)
                break
            completions = [self._completion(piece.prefix, output, version, server.url) for output in outputs]
            self._deliver(work, piece, completions)
        work.results.put(None)  # wakes ``sample``, which looks after the servers

    def _deliver(self, work: WorkList, piece: Piece, completions: Sequence[Completion]) -> None:
        """Return a piece's completions, or put it back if only a segment of its completion has ended."""
        first = completions[0]
        limit = work.requests[piece.request].limit(work.params)
        if first.finish == "length" and first.length < limit:
            work.put_back(replace(piece, prefix=first))
            return
        numbered = zip(piece.samples, completions, strict=True)
        work.results.put(
            [SampledCompletion(piece.request, sample, completion) for sample, completion in numbered]
        )

    def _next_piece(self, server: RemoteServer, work: WorkList, version: int) -> Piece | None:
        """Return the next piece; while others are still under way, wait for a piece to come back.

        None if this server gets no more: all are done, or it was excluded, or it has weights to take.
        """
        with work.changed:
            while not work.closed:
                if work.queue:
                    # Counted before the piece is taken: new weights must not come in between.
                    accepted = self.fleet.begin_request(server, version)
                    return work.queue.popleft() if accepted else None
                if not self.fleet.may_ask(server, version):
                    return None
                work.changed.wait(1.0)
            return None

    # Requests

    def _ask(self, server: RemoteServer, work: WorkList, piece: Piece) -> list[ServerOutput]:
        """Ask a server for a piece, or for a segment of it."""
        request = work.requests[piece.request]
        params = work.params
        prompt = request.prompt
        prefix_length = 0  # tokens of the completion that an earlier segment has
        if piece.prefix is not None:
            prefix_length = piece.prefix.length
            prompt = np.concatenate([prompt, piece.prefix.tokens])
        room = request.limit(params) - prefix_length
        # A stop string may begin in one segment and end in the next, so it excludes segments.
        if self.from_snapshot and not params.stop:
            room = min(room, SEGMENT)
        streams = [request.streams[sample] for sample in piece.samples]
        temperature = 0.0 if request.greedy else params.temperature
        return self.client.complete(
            server,
            Request(prompt, streams, request.prefix_tokens + prefix_length),
            replace(params, max_tokens=room, temperature=temperature),
        )

    def _completion(
        self, prefix: Completion | None, output: ServerOutput, version: int, url: str
    ) -> Completion:
        """Return a completion with the segment that a server has added to it."""
        tokens = np.array(output.tokens, dtype=np.int64)
        logprobs = np.array(output.logprobs, dtype=np.float32)
        versions = np.full(len(tokens), version) if self.from_snapshot else None
        provenance = Provenance(version, versions, url)
        segment = Completion(
            tokens, logprobs, "", output.finish, provenance, sampling_mask=output.sampling_mask
        )
        completion = segment if prefix is None else prefix.then(segment)
        # The text is the tokens', whatever the server's own detokenizer made of them.
        return replace(completion, text=self.policy.decode(completion.tokens.tolist()))
