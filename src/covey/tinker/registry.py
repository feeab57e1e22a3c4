"""Sessions, their training clients and samplers, and the requests that they wait for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.responses import JSONResponse, Response

from covey.cluster.serving.guard import Refusal
from covey.tinker.adapters import Adapter, AdapterWeights
from covey.tinker.passes import DrawRequest
from covey.tinker.worker import ComputeThread, Job, Result
from covey_verify.errors import DataError

MAX_RESULTS = 1024
"""Finished results that are held for clients whose connection broke before they had them."""
MAX_SNAPSHOTS = 8
"""Unsaved samplers of a training client that are held, and samplers of checkpoints that stay in memory."""
SILENCE = 3600.0
"""Seconds without a heartbeat after which a session is dropped when another one begins."""
EARLIER = "it may have begun before this server"


@dataclass(eq=False)
class Client:
    """A training client: its adapter once that is made, and its requests that came too early."""

    id: str
    metadata: dict[str, object] | None
    adapter: Adapter | None = None
    next_seq_id: int = 1
    early: dict[int, Job] = field(default_factory=dict)
    snapshots: deque[SamplerWeights] = field(default_factory=deque)

    @property
    def trained(self) -> Adapter:
        """The adapter. Raises DataError if making it failed."""
        if self.adapter is None:
            raise DataError(f"{self.id}: this training client could not be created")
        return self.adapter


@dataclass(eq=False)
class SamplerWeights:
    """Weights to draw with: a snapshot, or a checkpoint that is loaded when it is used."""

    load: Callable[[], AdapterWeights] | None = None
    weights: AdapterWeights | None = None

    def get(self) -> AdapterWeights:
        """The weights. Raises DataError if they are gone or cannot be loaded."""
        if self.weights is None and self.load is None:
            raise DataError(
                f"this sampler was released: a local Tinker holds the newest {MAX_SNAPSHOTS} unsaved ones "
                "of a client; save_weights_for_sampler with a name lasts"
            )
        if self.weights is None and self.load is not None:
            self.weights = self.load()
        assert self.weights is not None, "loaded"
        return self.weights


class Registry:
    """Sessions, their clients and their requests. The worker's thread adds samplers; the rest is the event
    loop's alone.
    """

    def __init__(self, worker: ComputeThread) -> None:
        self.worker = worker
        self.sessions: dict[str, float] = {}
        """Time of the last heartbeat of each session."""
        self.clients: dict[str, Client] = {}
        self.samplers: dict[str, SamplerWeights] = {}
        self.tasks: dict[str, Job] = {}
        """By the ids of requests, the oldest first."""

    def begin(self, session: str) -> None:
        """Begin a session, and end sessions that have long been silent."""
        for other, heard in list(self.sessions.items()):
            if time.monotonic() - heard > SILENCE:
                self.drop(other)
        self.sessions[session] = time.monotonic()

    def check_session(self, session: str, status: int = 404) -> None:
        """Raise Refusal for a session that this server does not know."""
        if session not in self.sessions:
            raise Refusal(status, f"{session}: there is no such session; {EARLIER}")

    def drop(self, session: str) -> None:
        """End a session and release all that it holds."""
        self.sessions.pop(session, None)
        for held in (self.clients, self.samplers, self.tasks):
            # Copied first, in one step: the worker's thread adds samplers.
            for name in [n for n in list(held) if n.startswith(f"{session}:")]:
                del held[name]

    def new_client(self, session: str, number: int, metadata: dict[str, object] | None) -> Client:
        """A training client, or the one of an earlier try of the same request."""
        self.check_session(session)
        name = f"{session}:train:{number}"  # the SDK derives the same id
        return self.clients.setdefault(name, Client(name, metadata))

    def client(self, name: str) -> Client:
        """A training client. Raises Refusal if there is none."""
        if name not in self.clients:
            raise Refusal(404, f"{name}: there is no such training client; {EARLIER}")
        return self.clients[name]

    def sampler(self, name: str) -> SamplerWeights:
        """A sampler. Raises Refusal if there is none."""
        if name not in self.samplers:
            raise Refusal(404, f"{name}: there is no such sampler; {EARLIER}")
        return self.samplers[name]

    def in_turn(self, client: Client, seq_id: int, compute: Callable[[], Result]) -> Response:
        """Queue a training client's request once all before it are queued; return its promise."""
        name = f"{client.id}:{seq_id}"
        if name not in self.tasks:
            if seq_id < client.next_seq_id:
                raise Refusal(400, f"{name}: the result of this request was dropped")
            client.early[seq_id] = self._keep_task(name, Job(compute))
            # Parts of a batch are sent at the same time, and may arrive in any order.
            while client.next_seq_id in client.early:
                self.worker.put(client.early.pop(client.next_seq_id))
                client.next_seq_id += 1
        return promise(name, model_id=client.id)

    def at_once(self, name: str, work: Callable[[], Result] | DrawRequest, **more: object) -> Response:
        """Queue work, unless this is the same request again; return its promise."""
        if name not in self.tasks:
            self.worker.put(self._keep_task(name, Job(work)))
        return promise(name, **more)

    def _keep_task(self, name: str, task: Job) -> Job:
        self.tasks[name] = task
        finished = [n for n, t in self.tasks.items() if t.result.done()]
        for old in finished[: max(0, len(finished) - MAX_RESULTS)]:
            del self.tasks[old]
        return task


def promise(request_id: str, **more: object) -> Response:
    """Return what a client gets at once: the id to ask for the result by."""
    return JSONResponse({"request_id": request_id, **more})
