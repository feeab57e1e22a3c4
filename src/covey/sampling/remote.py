"""The sampler over HTTP: groups go to servers that have room, and no answer is taken on trust.

After every change of weights each server samples a few completions: their log-probs are compared with the
trained policy's, and so is the distribution of its tokens (``probes``). A server that does not answer, or
whose log-probs differ, is excluded: its requests go to the others, with the same random streams. It takes
part again once it passes the probes.

Where weights may change meanwhile (``lags``), each completion is asked for in segments: a server that has new
weights to take ends its segments first, and what is unfinished continues from its tokens, here or elsewhere.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

import numpy as np

from covey.config.sampling import Servers
from covey.models.policy import Policy, copy_trained
from covey.rng import key
from covey.sampling.base import Request, Sampled, SamplingParams, Weights
from covey.sampling.dialects import (
    Misbehaved,
    ServerOutput,
    answers,
    check_question,
    new_question,
    recognize,
)
from covey.sampling.probes import alters_draws, mean_difference, nearest, sample_probes
from covey.sampling.readings import check_stop, unread
from covey.sampling.servers import (
    FAILURES,
    TRY_AGAIN,
    Piece,
    RemoteServer,
    Transport,
    WeightsFolder,
    WorkList,
    none_left,
    restart,
    same_complaint,
    timed_out,
)
from covey.system.processes import on_rank_zero
from covey.system.text import Say
from covey.types import Completion, Provenance
from covey_verify.errors import ConfigError
from covey_verify.web import ask, reason_of

TOKEN = "COVEY_TOKEN"  # noqa: S105  the variable's name
"""Environment variable with the token that servers ask for."""
MOST_BYTES = 1 << 28
"""Most bytes of a reply."""
QUICK = 20.0
"""Seconds for a request other than sampling."""
SEGMENT = 256
"""Number of tokens per request where weights may change meanwhile."""
PROBES = 4
"""Number of prompts on which a server is compared with the policy."""
FLOAT32, BFLOAT16 = 1e-4, 0.03
"""Mean difference of log-probs, nats, that rounding explains: of an exact and of a rounded policy."""
FINEST, AGAIN = 1e-5, 10
"""Once a server's rounding is known: nats that are always allowed, and the multiple of its rounding."""


class RemoteSampler:
    """Samples on servers; ``covey.sampling.base.Sampler``."""

    shares = False

    def __init__(
        self,
        policy: Policy,
        servers: Servers,
        folder: Path,
        probes: Sequence[np.ndarray],
        temperature: float,
        max_running: int,
        token: str = "",
        asking: Transport = ask,
        lags: bool = False,
    ) -> None:
        """Nothing is sent yet. ``folder`` is where weights are written for the servers.

        ``probes`` are prompts to compare on; ``asking`` is how a server is reached. ``lags``: ``policy`` is a
        snapshot, and ``sync`` and ``sample`` are called in different threads.
        """
        self.policy = policy
        self.settings = servers
        self.token = token
        self._weights = WeightsFolder(folder)
        self.asking = asking
        self.lags = lags
        self._moving = threading.Lock()
        """Held while servers are given weights and compared: the snapshot must not change meanwhile."""
        # Held for a moment: whether a server takes requests, and how many it works on, change together.
        self._counting = threading.Lock()
        self.servers = [RemoteServer(url.rstrip("/")) for url in servers.url]
        self.temperature = temperature
        self.max_running = max_running
        self.version = 0
        self.say: Say = lambda _: None
        """Called with a sentence on each event of a server."""
        self.waiting: Callable[[], None] = lambda: None
        """Called once a second while no result arrives; may raise to stop."""
        self._probes = [p for p in probes[:PROBES] if len(p)]
        self._vocabulary = policy.embedded
        policy.draw_from_all()
        self._noted_unread = False
        self._exact: bool | None = None

    @property
    def bit_exact(self) -> bool:
        """Whether every server had the policy's own bits at the first probes; from then on all must.

        All processes ask this together: only rank 0 knows.
        """
        return on_rank_zero(self._first_exact) and not self.lags

    def _first_exact(self) -> bool:
        if self._exact is None:
            self._bring_up()
        return bool(self._exact)

    def sync(self, weights: Weights) -> None:
        """Sample from these weights from now on; they travel when a server is next asked for something."""
        with self._moving:
            if self.lags:
                copy_trained(weights.policy.whole, self.policy)
            self.version = weights.version

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Sampled]:
        """Yield completions as their groups end. Raises SamplersLost when no server is left."""
        if not requests:  # of several processes the first asks for all, and alone gives servers weights
            return
        self._bring_up()
        if params.truncates and not all(s.dialect.streams for s in self._present() if s.dialect):
            raise ConfigError(
                "rollout.top_p and rollout.top_k need covey serve: vLLM and SGLang do not return which "
                "tokens could be drawn, so their log-probs cannot be trained on. Set top_p 1 and top_k 0"
            )
        # A group is one piece. Where weights may change each completion is: segments end one by one.
        samples = [range(len(request.streams)) for request in requests]
        alone = [(r, [s]) for r, own in enumerate(samples) for s in own]
        pieces = alone if self.lags else list(enumerate(samples))
        work = WorkList(requests, params, deque(Piece(r, own) for r, own in pieces))
        self._join(work)
        left = len(alone)  # completions to come
        since = time.monotonic()  # time of the last sign of life
        drawn = list[np.ndarray]()
        try:
            while left:
                try:
                    result = work.results.get(timeout=1.0)
                except queue.Empty:
                    result = None
                if isinstance(result, Exception):
                    raise result
                # None only wakes this loop: a thread has ended, so a server may need weights or a new try.
                if result is not None:
                    left -= len(result)
                    since = time.monotonic()
                    drawn += [one.completion.tokens for one in result]
                    yield from result
                    continue
                self.waiting()
                self._give_weights()
                self._join(work)
                if not all(s.lost for s in self.servers):
                    since = time.monotonic()
                elif time.monotonic() - since > self._patience:
                    raise none_left(self.servers)
        finally:
            with work.changed:  # also if the consumer stops early: threads wait for pieces
                work.over = True
                work.changed.notify_all()
        self._note_unread(drawn)

    def _note_unread(self, drawn: Sequence[np.ndarray]) -> None:
        note = "" if self._noted_unread else unread(self.policy, drawn)
        if note:
            self._noted_unread = True
            self.say(note)

    def _completion(self, begun: Completion | None, one: ServerOutput, version: int, url: str) -> Completion:
        """Return a completion with the segment that was added to it."""
        tokens = np.array(one.tokens, dtype=np.int64)
        logprobs = np.array(one.logprobs, dtype=np.float32)
        versions = np.full(len(tokens), version) if self.lags else None
        provenance = Provenance(version, versions, url)
        own = Completion(tokens, logprobs, "", one.finish, provenance, sampling_mask=one.sampling_mask)
        whole = own if begun is None else begun.then(own)
        # The text is the tokens', whatever the server's own detokenizer made of them.
        return replace(whole, text=self.policy.decode(whole.tokens.tolist()))

    def _present(self) -> list[RemoteServer]:
        return [s for s in self.servers if not s.lost and s.version == self.version]

    @property
    def _patience(self) -> float:
        """Seconds without any server until the run stops: two tries more where one only hangs."""
        more = 2 * (self.settings.timeout + TRY_AGAIN) if any(s.hangs for s in self.servers) else 0.0
        return self.settings.patience + more

    # Asking

    def _join(self, work: WorkList) -> None:
        """Let the servers present work on this call, each with as many groups at once as it has room for."""
        sizes = [len(r.streams) for r in work.requests]
        biggest, pieces = (1, sum(sizes)) if self.lags else (max(sizes, default=1), len(sizes))
        # A thread per request under way; ``max_running`` completions at once, in groups of the largest size.
        threads = max(1, self.max_running // biggest)
        for server in self._present():
            # A server that came back has a new arrival, and needs new threads: its old ones have ended.
            if work.joined.get(server.url) == server.arrivals:
                continue
            work.joined[server.url] = server.arrivals
            for _ in range(min(threads, pieces)):
                threading.Thread(target=self._work, args=(server, work, self.version), daemon=True).start()

    def _work(self, server: RemoteServer, work: WorkList, version: int) -> None:
        # A thread: it ends when the work is over, or when its server fails or has weights to take.
        while (piece := self._next_piece(server, work, version)) is not None:
            failure = None
            try:
                replies = self._ask_piece(server, work, piece)
            except FAILURES as error:
                failure = error
            except Exception as error:  # unseen in a thread, and its group would never come
                work.results.put(error)
                return
            with self._counting:
                server.busy -= 1  # first: ``_give_weights`` gives weights only to an idle server
            if failure is not None:
                self._leave_out(server, failure)
            # Excluded or given other weights meanwhile: its segment is discarded and asked for again.
            if failure is not None or (self.lags and server.version != version):
                work.again(piece)
                break
            done = [self._completion(piece.prefix, one, version, server.url) for one in replies]
            limit = work.requests[piece.request].limit(work.params)
            if done[0].finish == "length" and done[0].length < limit:  # a segment's end
                work.again(replace(piece, prefix=done[0]))
                continue
            pairs = zip(piece.samples, done, strict=True)
            work.results.put([Sampled(piece.request, sample, one) for sample, one in pairs])
        work.results.put(None)  # wakes ``sample``, which looks after the servers

    def _next_piece(self, server: RemoteServer, work: WorkList, version: int) -> Piece | None:
        """Return the next piece; wait for one that comes back while others are still under way.

        None if this server gets no more: all are done, or it was lost, or it has weights to take.
        """
        with work.changed:
            while not work.over:
                # Counted before the piece is taken: ``_give_weights`` must not come in between.
                with self._counting:
                    if server.lost or not server.version == version == self.version:
                        break
                    server.busy += bool(work.todo)
                if work.todo:
                    return work.todo.popleft()
                work.changed.wait(1.0)
            return None

    def _ask_piece(self, server: RemoteServer, work: WorkList, piece: Piece) -> list[ServerOutput]:
        """Ask a server for a piece, or for a segment of it."""
        request = work.requests[piece.request]
        begun = piece.prefix
        drawn = 0 if begun is None else begun.length
        room = request.limit(work.params) - drawn
        if self.lags and not work.params.stop:  # which may begin in one segment and end in the next
            room = min(room, SEGMENT)
        prompt = request.prompt if begun is None else np.concatenate([request.prompt, begun.tokens])
        rest = Request(prompt, [request.streams[s] for s in piece.samples], request.prefix_tokens + drawn)
        temperature = 0.0 if request.greedy else work.params.temperature
        return self._ask_for(server, rest, replace(work.params, max_tokens=room, temperature=temperature))

    def _ask_for(self, server: RemoteServer, request: Request, params: SamplingParams) -> list[ServerOutput]:
        """Ask a server for a group. One that is busy is asked again, until the time of a request is over."""
        assert server.dialect is not None, "it has answered"
        until = time.monotonic() + self.settings.timeout
        body = server.dialect.body(request, params, server.model, self.policy.end_ids)
        proven = server.stamp  # of the weights that it had proven: it may prove others before it answers
        pause = 0.1
        while True:
            question = new_question()
            keyed = {**body, server.dialect.key_field: question}
            try:
                reply = self._ask(server, server.dialect.path, keyed, max(1.0, until - time.monotonic()))
            except HTTPError as error:
                busy = error.code in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
                if not busy or time.monotonic() + pause > until:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 5.0)
            else:
                group = answers(server.dialect, reply, request, params, self._vocabulary, self.policy.end_ids)
                check_question(server.dialect, reply, question)
                for one in group if params.stop else ():
                    check_stop(self.policy, one, params.stop)
                self._same(server, proven, server.dialect.stamp(reply))
                return group

    def _same(self, server: RemoteServer, proven: object, stamp: object) -> None:
        """Check that it is still the server that passed the probes: it may have been restarted in between."""
        if proven is None:  # it is proving itself
            proven = server.stamp = stamp
        if proven != stamp:
            raise Misbehaved(
                f"it was restarted, or its weights were changed, since it proved version {self.version}"
            )

    def _ask(self, server: RemoteServer, path: str, body: object = None, timeout: float = QUICK) -> object:
        return self.asking(server.url + path, body, self.token, timeout, MOST_BYTES)

    def _leave_out(self, server: RemoteServer, error: BaseException) -> None:
        if server.lost:
            return
        server.lost = reason_of(error)
        server.version = None
        server.tried = time.monotonic()
        server.hangs = timed_out(error)
        self.say(f"{server.url} is excluded: {server.lost}")

    # Weights

    def _bring_up(self) -> None:
        """Bring every server that can be reached to the current weights. Raises SamplersLost."""
        begun = time.monotonic()
        while True:
            self._give_weights(now=True)
            if self._present():
                break
            if all(s.lost for s in self.servers) and time.monotonic() - begun > self._patience:
                raise none_left(self.servers)
            self.waiting()
            time.sleep(0.2)
        if self._exact is None:
            same = all(s.dialect and s.dialect.streams and s.spread == 0 for s in self._present())
            self._exact = same and self.policy.bit_exact

    def _give_weights(self, now: bool = False) -> None:
        """Let servers that lack the current weights take them, and probe them."""
        for server in [server for server in self.servers if self._is_due(server, now)]:
            with self._moving:
                with self._counting:  # from here on it is not asked for completions
                    if not server.lost and (server.busy or server.version == self.version):
                        continue
                    server.version = None
                was = server.lost
                server.tried = time.monotonic()
                try:
                    self._bring(server)
                except FAILURES as error:
                    server.lost = reason_of(error)
                    server.version = None
                    server.hangs = server.arrivals > 0 and timed_out(error)
                    if not same_complaint(server.lost, was):
                        self.say(f"{server.url} is excluded: {server.lost}")
                    continue
                server.lost = ""
                server.hangs = False
                server.arrivals += 1
            if was:
                self.say(f"{server.url} is back, with the weights of version {self.version}")

    def _is_due(self, server: RemoteServer, now: bool) -> bool:
        """Whether it needs weights: a lost one every ``TRY_AGAIN`` seconds, or ``now``."""
        if server.lost:
            return now or time.monotonic() - server.tried > TRY_AGAIN
        return server.version != self.version

    def _bring(self, server: RemoteServer) -> None:
        """Give a server the current weights and probe it."""
        new = server.dialect is None or bool(server.lost)
        if new:
            self._recognize(server)
            if not self._fault(server):  # it may have the weights already
                server.version = self.version
                return
        assert server.dialect is not None, "it has been recognized"
        folder = self._weights.saved(self.policy, self.version)
        cause: BaseException | None = None
        try:
            patient = partial(self._ask, server, timeout=self.settings.timeout)
            server.dialect.load(patient, str(folder), self.version)
            fault = self._fault(server)
        except FAILURES as error:
            fault = reason_of(error)
            cause = error
        if fault and self.settings.restart:  # the last resort
            self.say(f"{server.url}: {fault}; restarting it")
            restart(self.settings.restart, server.url, folder, self.settings.timeout)
            self._recognize(server)
            fault = self._fault(server)
            cause = None
        if fault:
            raise Misbehaved(fault) from cause
        server.version = self.version

    def _recognize(self, server: RemoteServer) -> None:
        server.dialect, server.model = recognize(partial(self._ask, server), not self.settings.restart)
        server.compared = False

    def _allowed(self, server: RemoteServer) -> float:
        """Return the largest allowed mean difference of log-probs, nats."""
        if self._exact:
            return 0.0
        bound = BFLOAT16 if self.policy.rounded else FLOAT32
        if self.settings.tolerance is not None:
            return self.settings.tolerance
        return bound if server.spread is None else min(bound, max(FINEST, AGAIN * server.spread))

    def _fault(self, server: RemoteServer) -> str:
        """Return how a server's log-probs or draws differ from the policy's; empty if they do not."""
        server.stamp = None  # the first reply says what is to be proven
        ask = partial(self._ask_for, server)
        stream = partial(key, self.version, server.url)
        probes = sample_probes(ask, self._probes, self.temperature, stream)
        allowed = self._allowed(server)
        temperature = self.temperature or 1.0
        policy, off = nearest(self.policy, probes, temperature, FINEST)
        if off <= allowed:
            server.spread = off if server.spread is None else server.spread
            rounding = self._allowed(server)
            fault = alters_draws(policy, ask, probes, self.temperature, rounding, stream, server.compared)
            server.compared = server.compared or not fault
            return fault
        if temperature != 1.0 and mean_difference(policy, probes, 1.0) <= allowed:
            return (
                "its log-probs do not include the temperature; for vLLM add --logprobs-mode "
                "processed_logprobs"
            )
        return (
            f"its log-probs differ by {off:.2g} nats on average from version {self.version}, more than the "
            f"{allowed:.2g} of rollout.sampler.tolerance: it did not take the weights, or computes in "
            "another precision"
        )
