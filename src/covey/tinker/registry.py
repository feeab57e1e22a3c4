"""Sessions with their training clients, samplers and requests."""

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
"""Number of finished results that are kept for clients that have not received them yet."""
MAX_SNAPSHOTS = 8
"""Number of unsaved samplers kept for a training client, and of checkpoints' samplers kept in memory."""
SILENT_SECONDS = 3600.0
"""Seconds without a heartbeat after which a session is dropped when another one begins."""
LOST_HINT = "it may have begun before this server was started"
"""The likely reason why something does not exist, for errors."""


@dataclass(eq=False)
class Client:
    """A training client: its adapter once that exists, and requests that arrived before their turn."""

    id: str
    metadata: dict[str, object] | None
    adapter: Adapter | None = None
    next_seq_id: int = 1
    early_jobs: dict[int, Job] = field(default_factory=dict)
    snapshots: deque[SamplerWeights] = field(default_factory=deque)

    @property
    def trained_adapter(self) -> Adapter:
        """The adapter. Raises DataError if it could not be created."""
        if self.adapter is None:
            raise DataError(f"{self.id}: this training client could not be created")
        return self.adapter


@dataclass(eq=False)
class SamplerWeights:
    """The weights of a sampler: a snapshot, or a checkpoint that is loaded at its first use."""

    load: Callable[[], AdapterWeights] | None = None
    weights: AdapterWeights | None = None

    def get(self) -> AdapterWeights:
        """Return the weights. Raises DataError if they were released or cannot be loaded."""
        if self.weights is None and self.load is None:
            raise DataError(
                f"this sampler was released: a local Tinker keeps the newest {MAX_SNAPSHOTS} unsaved "
                "samplers of a client; give save_weights_for_sampler a name to keep it"
            )
        if self.weights is None and self.load is not None:
            self.weights = self.load()
        assert self.weights is not None, "loaded"
        return self.weights


class Registry:
    """Sessions, their clients and their requests. The compute thread adds samplers; the rest belongs to the
    event loop.
    """

    def __init__(self, worker: ComputeThread) -> None:
        self.worker = worker
        self.sessions: dict[str, float] = {}
        """Time of the last heartbeat of each session."""
        self.clients: dict[str, Client] = {}
        self.samplers: dict[str, SamplerWeights] = {}
        self.jobs: dict[str, Job] = {}
        """Id of a request -> its job, the oldest first."""

    def begin(self, session: str) -> None:
        """Begin a session, and end sessions without a heartbeat for ``SILENT_SECONDS``."""
        for other, heartbeat in list(self.sessions.items()):
            if time.monotonic() - heartbeat > SILENT_SECONDS:
                self.drop(other)
        self.sessions[session] = time.monotonic()

    def check_session(self, session: str, status: int = 404) -> None:
        """Raise Refusal if there is no such session."""
        if session not in self.sessions:
            raise Refusal(status, f"{session}: there is no such session; {LOST_HINT}")

    def drop(self, session: str) -> None:
        """End a session and release its clients, samplers and results."""
        self.sessions.pop(session, None)
        for table in (self.clients, self.samplers, self.jobs):
            # Copied first, in one step, because the compute thread may add a sampler meanwhile.
            for name in [n for n in list(table) if n.startswith(f"{session}:")]:
                del table[name]

    def new_client(self, session: str, number: int, metadata: dict[str, object] | None) -> Client:
        """Return a new training client, or the one that an earlier attempt of the same request created."""
        self.check_session(session)
        name = f"{session}:train:{number}"  # the SDK derives the same id
        return self.clients.setdefault(name, Client(name, metadata))

    def client(self, name: str) -> Client:
        """Return a training client. Raises Refusal if there is none."""
        if name not in self.clients:
            raise Refusal(404, f"{name}: there is no such training client; {LOST_HINT}")
        return self.clients[name]

    def sampler(self, name: str) -> SamplerWeights:
        """Return a sampler. Raises Refusal if there is none."""
        if name not in self.samplers:
            raise Refusal(404, f"{name}: there is no such sampler; {LOST_HINT}")
        return self.samplers[name]

    def queue_in_turn(self, client: Client, seq_id: int, compute: Callable[[], Result]) -> Response:
        """Queue a training client's request after all earlier ones; return the response with its id."""
        name = f"{client.id}:{seq_id}"
        if name not in self.jobs:
            if seq_id < client.next_seq_id:
                raise Refusal(400, f"{name}: the result of this request was dropped")
            client.early_jobs[seq_id] = self._keep_job(name, Job(compute))
            # The SDK sends the parts of a batch concurrently, so they may arrive in any order.
            while client.next_seq_id in client.early_jobs:
                self.worker.put(client.early_jobs.pop(client.next_seq_id))
                client.next_seq_id += 1
        return future_response(name, model_id=client.id)

    def queue(self, name: str, work: Callable[[], Result] | DrawRequest, **more: object) -> Response:
        """Queue work, unless the same request was queued before; return the response with its id."""
        if name not in self.jobs:
            self.worker.put(self._keep_job(name, Job(work)))
        return future_response(name, **more)

    def _keep_job(self, name: str, job: Job) -> Job:
        self.jobs[name] = job
        finished = [n for n, other in self.jobs.items() if other.result.done()]
        for old in finished[: max(0, len(finished) - MAX_RESULTS)]:
            del self.jobs[old]
        return job


def future_response(request_id: str, **more: object) -> Response:
    """Return the immediate response to a request: the id under which its result can be retrieved."""
    return JSONResponse({"request_id": request_id, **more})
