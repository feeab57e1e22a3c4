"""The routes of a local Tinker: sessions, training clients, samplers and checkpoints of one base model.

A request that computes is answered at once with an id; the client then gets the result by `retrieve_future`.
Requests of a training client are computed in the order of their `seq_id`, whatever order they arrive in, and
once, however often they are sent.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from covey.cluster.serving.guard import Refusal, admit, body
from covey.sampling.base import SamplingParams
from covey.tinker import bodies
from covey.tinker.adapters import Adapter, AdapterShape, AdapterWeights, Base
from covey.tinker.checkpoints import KINDS, CheckpointRecord, CheckpointStore, Kind
from covey.tinker.passes import DrawRequest, check_tokens, forward_backward
from covey.tinker.registry import MAX_SNAPSHOTS, Client, Registry, SamplerWeights
from covey.tinker.wire import PROTOBUF, read_data, read_forward_backward
from covey.tinker.worker import ComputeThread, Result
from covey_verify.errors import ConfigError, DataError

Handler = Callable[[Request], Awaitable[Response]]
AnyBody = TypeVar("AnyBody", bound=BaseModel)
AnyTurn = TypeVar("AnyTurn", bound=BaseModel)
API = "/api/v1"
POLL_SECONDS = 25.0
"""Seconds that `retrieve_future` waits for a result. The SDK gives up after 45, and retries after a 408."""


class TinkerServer:
    """The routes, and the state that they share."""

    def __init__(self, base: Base, store: CheckpointStore, token: str = "") -> None:
        self.base = base
        self.store = store
        self.token = token
        self.registry = Registry(ComputeThread(base))
        self.loaded_samplers: deque[SamplerWeights] = deque()
        """Samplers whose checkpoints are in memory, the oldest first."""

    def app(self) -> Starlette:
        """Return the ASGI application."""
        post: Mapping[str, Handler] = {
            "client/config": self.config,
            "client/dynamic_config": self.config,
            "telemetry": self.telemetry,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session}/finish": self.finish,
            "create_model": self.create_model,
            "get_info": self.info,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_for_sampler,
            "load_weights": self.load_weights,
            "weights_info": self.weights_info,
            "create_sampling_session": self.create_sampler,
            "asample": self.sample,
            "retrieve_future": self.retrieve,
        }
        get: Mapping[str, Handler] = {
            "healthz": self.health,
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler}": self.sampler,
            "training_runs": self.runs,
            "training_runs/{run}": self.run,
            "training_runs/{run}/checkpoints": self.checkpoints,
            "checkpoints": self.checkpoints,
        }
        delete = {"training_runs/{run}/checkpoints/{kind}/{name}": self.delete}
        routes = [
            Route(f"{API}/{path}", self._guard_handler(handler), methods=[method])
            for method, handlers in (("POST", post), ("GET", get), ("DELETE", delete))
            for path, handler in handlers.items()
        ]
        # All other paths get an error with our own message.
        other = self._guard_handler(self.refuse_unknown)
        return Starlette(
            routes=[*routes, Route("/{path:path}", other, methods=["GET", "POST", "PUT", "DELETE"])]
        )

    def _guard_handler(self, handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            try:
                admit(request, self.token, request.headers.get("x-api-key", ""))
                return await handler(request)
            except Refusal as error:
                return _error_response(error.status, str(error))
            # pydantic's error is a ValueError too, so it comes first.
            except ValidationError as error:
                return _error_response(422, bodies.first_mistake(error))
            except (ConfigError, DataError, ValueError) as error:
                return _error_response(400, str(error))

        return answer

    async def health(self, _: Request) -> Response:
        """Report that the server is up."""
        return JSONResponse({"status": "ok"})

    async def config(self, _: Request) -> Response:
        """Send the SDK its flags for this server; flags that are not named keep their defaults."""
        # Disabled: compression needs another library, stuck detection would report slow machines, and plain
        # httpx is enough.
        flags = ("proto_compress_fwdbwd", "sample_enable_stuck_detection", "use_pyqwest_transport")
        return JSONResponse(dict.fromkeys(flags, False))

    async def telemetry(self, request: Request) -> Response:
        """Accept the SDK's telemetry and discard it."""
        await body(request)
        return JSONResponse({"status": "accepted"})

    async def refuse_unknown(self, request: Request) -> Response:
        """Refuse a route that this server does not have."""
        raise Refusal(404, f"a local Tinker has no {request.method} {request.url.path}")

    async def capabilities(self, _: Request) -> Response:
        """Describe the base model."""
        served = {"model_name": self.base.name, "max_context_length": self.base.policy.context}
        return JSONResponse({"supported_models": [{**served, "trainable": True, "sampleable": True}]})

    async def create_session(self, request: Request) -> Response:
        """Begin a session."""
        await body(request)  # tags and names, which are not used
        session = f"covey-{secrets.token_hex(8)}"
        self.registry.begin(session)
        return JSONResponse({"type": "create_session", "session_id": session})

    async def heartbeat(self, request: Request) -> Response:
        """Note that a session is alive."""
        session = (await _read_body(request, bodies.Session)).session_id
        self.registry.check_session(session, 410)
        self.registry.sessions[session] = time.monotonic()
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """End a session and release its training clients and samplers; its checkpoints stay."""
        self.registry.drop(request.path_params["session"])
        return JSONResponse({})

    async def create_model(self, request: Request) -> Response:
        """Create a training client and its adapter."""
        call = await _read_body(request, bodies.CreateModel)
        self._check_base(call.base_model)
        lora = call.lora_config
        shape = AdapterShape(lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)
        client = self.registry.new_client(call.session_id, call.model_seq_id, call.user_metadata)

        def make() -> Result:
            client.adapter = self.base.new_adapter(shape, lora.seed)
            return {"type": "create_model", "model_id": client.id}

        # The client's own requests have numbers from 1 on.
        return self.registry.queue(f"{client.id}:0", make, model_id=client.id)

    async def info(self, request: Request) -> Response:
        """Describe a training client."""
        client = self.registry.client((await _read_body(request, bodies.ClientBody)).model_id)
        base = self.base
        arch = base.policy.model.config.model_type
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": client.id,
                "model_name": base.name,
                "model_data": {"arch": arch, "model_name": base.name, "tokenizer_id": base.source},
                "is_lora": True,
                "lora_rank": client.trained_adapter.shape.rank,
            }
        )

    async def forward_backward(self, request: Request) -> Response:
        """Compute a loss and, unless the request is for the forward pass only, its gradient."""
        model_id, seq_id, fields = read_forward_backward(await body(request, PROTOBUF))
        client = self.registry.client(model_id)
        return self.registry.queue_in_turn(
            client, seq_id, lambda: forward_backward(self.base, client.trained_adapter, read_data(fields))
        )

    async def optim_step(self, request: Request) -> Response:
        """Make an optimizer step with the gradient so far."""

        def step(client: Client, call: bodies.OptimStep) -> Result:
            norm = client.trained_adapter.step(call.adam_params)
            return {"type": "optim_step", "metrics": {"grad_norm": norm}}

        return await self._compute_turn(request, bodies.OptimStep, step)

    async def save_weights(self, request: Request) -> Response:
        """Save an adapter with its optimizer."""

        def save(client: Client, call: bodies.SaveWeights) -> Result:
            path = self._save(client, "weights", call, call.path, call.overwrite)
            return {"type": "save_weights", "path": path}

        return await self._compute_turn(request, bodies.SaveWeights, save)

    async def save_for_sampler(self, request: Request) -> Response:
        """Save an adapter for sampling; without a name, keep a snapshot of it in memory."""

        def save(client: Client, call: bodies.SaveForSampler) -> Result:
            kind = "save_weights_for_sampler"
            if call.path is not None:
                return {"type": kind, "path": self._save(client, "sampler_weights", call, call.path)}
            sampler = SamplerWeights(weights=client.trained_adapter.snapshot())
            client.snapshots.append(sampler)
            if len(client.snapshots) > MAX_SNAPSHOTS:
                client.snapshots.popleft().weights = None
            # A client's id is SESSION:train:NUMBER.
            session = client.id.partition(":")[0]
            name = f"{session}:sample:{call.sampling_session_seq_id}"
            self.registry.samplers[name] = sampler
            return {"type": kind, "sampling_session_id": name}

        return await self._compute_turn(request, bodies.SaveForSampler, save)

    async def load_weights(self, request: Request) -> Response:
        """Load a checkpoint into a training client, or into a new one."""
        raw = await body(request)
        call = bodies.LoadWeights.model_validate_json(raw)
        if call.session_id is None or call.model_seq_id is None:
            return await self._compute_turn(request, bodies.LoadWeights, self._load, raw)
        client = self.registry.new_client(call.session_id, call.model_seq_id, call.user_metadata)
        return self.registry.queue(f"{client.id}:0", partial(self._load, client, call), model_id=client.id)

    async def create_sampler(self, request: Request) -> Response:
        """Create a sampler of a checkpoint or of the base model."""
        call = await _read_body(request, bodies.CreateSampler)
        self.registry.check_session(call.session_id)
        if call.base_model is not None:
            self._check_base(call.base_model)
        path = call.model_path
        if path is not None:
            self.store.find(path)
        elif call.base_model is None:
            raise DataError("create_sampling_session: give a model_path or a base_model")
        name = f"{call.session_id}:sample:{call.sampling_session_seq_id}"
        if path is None:
            self.registry.samplers[name] = SamplerWeights(weights=self.base.plain)
        else:
            # The checkpoint is loaded with the first completion, by the compute thread.
            sampler = self.registry.samplers[name] = SamplerWeights()
            sampler.load = partial(self._load_sampler, sampler, path)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    async def sampler(self, request: Request) -> Response:
        """Describe a sampler."""
        name = request.path_params["sampler"]
        self.registry.sampler(name)
        return JSONResponse({"sampler_id": name, "base_model": self.base.name})

    async def sample(self, request: Request) -> Response:
        """Queue a request for completions."""
        call = await _read_body(request, bodies.SampleBody)
        sampler = self.registry.sampler(call.sampling_session_id)
        draw = _draw(self.base, call, sampler)
        request_id = f"{call.sampling_session_id}:{call.seq_id}"
        ids = [f"{request_id}:{i}" for i in range(call.num_samples)]
        return self.registry.queue(request_id, draw, sample_sequence_ids=ids)

    async def retrieve(self, request: Request) -> Response:
        """Return a result, or 408 if it is not ready yet."""
        call = await _read_body(request, bodies.Retrieve)
        job = self.registry.jobs.get(call.request_id)
        if job is None:
            raise Refusal(404, f"{call.request_id}: there is no such request, or its result was dropped")
        # `wait` cancels nothing, neither at the timeout nor when the client hangs up: it may ask again.
        finished, _ = await asyncio.wait([asyncio.wrap_future(job.result)], timeout=POLL_SECONDS)
        if not finished:
            return JSONResponse({"queue_state": "active"}, 408)
        result = job.result.result()
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else JSONResponse(result)

    async def weights_info(self, request: Request) -> Response:
        """Describe a checkpoint."""
        record = self.store.find((await _read_body(request, bodies.WeightsInfo)).tinker_path)
        shape = record.shape
        flags = {"train_unembed": shape.unembed, "train_mlp": shape.mlp, "train_attn": shape.attention}
        adapter = {"base_model": record.base_model, "is_lora": True, "lora_rank": shape.rank}
        return JSONResponse({**adapter, **flags})

    async def checkpoints(self, request: Request) -> Response:
        """List the checkpoints of one training client or of all."""
        records = self.store.records(request.path_params.get("run"))
        return JSONResponse({"checkpoints": [r.as_listed() for r in records]})

    async def delete(self, request: Request) -> Response:
        """Delete a checkpoint."""
        self.store.delete("tinker://{run}/{kind}/{name}".format(**request.path_params))
        return JSONResponse({})

    async def runs(self, request: Request) -> Response:
        """List the training clients that are active or have saved a checkpoint."""
        names = list(dict.fromkeys([*self.registry.clients, *(r.model_id for r in self.store.records())]))
        offset = int(request.query_params.get("offset", 0))
        limit = int(request.query_params.get("limit", 20))
        cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
        listed = [self._describe_run(name) for name in names[offset : offset + limit]]
        return JSONResponse({"training_runs": listed, "cursor": cursor})

    async def run(self, request: Request) -> Response:
        """Describe a training client."""
        return JSONResponse(self._describe_run(request.path_params["run"]))

    def _describe_run(self, name: str) -> dict[str, object]:
        records = self.store.records(name)
        client = self.registry.clients.get(name)
        if client is None and not records:
            raise Refusal(404, f"{name}: there is no such training run")
        newest = {kind: next((r.as_listed() for r in records if r.kind == kind), None) for kind in KINDS}
        shape = client.trained_adapter.shape if client is not None else records[0].shape
        return {
            "training_run_id": name,
            "base_model": records[0].base_model if records else self.base.name,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": shape.rank,
            "last_request_time": (records[0].time if records else datetime.now(UTC)).isoformat(),
            "last_checkpoint": newest["weights"],
            "last_sampler_checkpoint": newest["sampler_weights"],
            "user_metadata": client.metadata if client is not None else records[0].run_metadata,
        }

    def _save(
        self,
        client: Client,
        kind: Kind,
        call: bodies.SaveWeights | bodies.SaveForSampler,
        name: str,
        overwrite: bool = False,
    ) -> str:
        adapter = client.trained_adapter
        created = datetime.now(UTC)
        expires = created + timedelta(seconds=call.ttl_seconds) if call.ttl_seconds is not None else None
        record = CheckpointRecord(
            model_id=client.id,
            kind=kind,
            name=name,
            base_model=self.base.name,
            fingerprint=self.base.fingerprint,
            shape=adapter.shape,
            time=created,
            run_metadata=client.metadata,
            user_metadata=call.user_metadata,
            expires_at=expires,
        )
        moments = adapter.moments() if kind == "weights" else None
        return self.store.save(self.base, adapter.weights, moments, record, overwrite)

    def _load(self, client: Client, call: bodies.LoadWeights) -> Result:
        if call.base_model is not None:
            self._check_base(call.base_model)
        record, weights, moments = self.store.load(self.base, call.path)
        if call.optimizer and record.kind != "weights":
            raise DataError(f"{call.path} has no state of an optimizer: it was saved for sampling")
        adapter = client.adapter or Adapter(record.shape, weights.tensors)
        if adapter.shape != record.shape:
            raise DataError(f"{call.path} has {record.shape}; the adapter of this client has {adapter.shape}")
        adapter.load(weights.tensors, moments if call.optimizer else {})
        client.adapter = adapter
        return {"type": "load_weights", "path": call.path, "model_id": client.id}

    def _load_sampler(self, sampler: SamplerWeights, path: str) -> AdapterWeights:
        self.loaded_samplers.append(sampler)
        if len(self.loaded_samplers) > MAX_SNAPSHOTS:
            self.loaded_samplers.popleft().weights = None
        return self.store.load(self.base, path)[1]

    async def _compute_turn(
        self,
        request: Request,
        schema: type[AnyTurn],
        compute: Callable[[Client, AnyTurn], Result],
        raw: bytes | None = None,
    ) -> Response:
        """Queue a training client's request. An invalid body fails in its turn, not before."""
        raw = await body(request) if raw is None else raw
        order = bodies.RequestOrder.model_validate_json(raw)
        client = self.registry.client(order.model_id)
        return self.registry.queue_in_turn(
            client, order.seq_id, lambda: compute(client, schema.model_validate_json(raw))
        )

    def _check_base(self, name: str) -> None:
        names = (self.base.name, self.base.source)
        if name not in names:
            raise DataError(f"base_model {name!r}: this server has {' alias '.join(dict.fromkeys(names))}")


def _draw(base: Base, call: bodies.SampleBody, sampler: SamplerWeights) -> DrawRequest:
    """Read a request for completions. Raises DataError if it cannot be answered."""
    policy = base.policy
    prompt = np.array([t for chunk in call.prompt.chunks for t in chunk.tokens], dtype=np.int64)
    check_tokens(policy, "prompt", prompt)
    params = call.sampling_params
    room = policy.context
    max_tokens = room - len(prompt) if params.max_tokens is None else params.max_tokens
    if not 0 < max_tokens <= room - len(prompt):
        raise DataError(
            f"{len(prompt)} tokens of prompt and max_tokens {max_tokens} are more than the context of {room}"
        )
    if call.prompt_logprobs_last_n is not None and not call.prompt_logprobs:
        raise DataError("prompt_logprobs_last_n: set prompt_logprobs")
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    # An empty list turns off the model's own end tokens; any other list is added to them.
    ends = set() if stop == [] else {*policy.end_ids, *(x for x in stop or [] if isinstance(x, int))}
    texts = tuple(x for x in stop or [] if isinstance(x, str))
    if "" in texts:
        raise DataError("stop: an empty text would end every completion at once")
    # Without a seed, repeated requests must differ. Tinker's top_k of -1 is covey's 0: no limit.
    return DrawRequest(
        sampler.get,
        prompt,
        call.num_samples,
        secrets.randbits(63) if params.seed is None else params.seed,
        SamplingParams(
            max_tokens, params.temperature, params.top_p, max(params.top_k, 0), texts, tuple(sorted(ends))
        ),
        (call.prompt_logprobs_last_n or len(prompt)) if call.prompt_logprobs else None,
    )


async def _read_body(request: Request, schema: type[AnyBody]) -> AnyBody:
    return schema.model_validate_json(await body(request))


def _error_response(status: int, message: str) -> Response:
    # Closed, so that the unread rest of a body is not taken for the next request.
    return JSONResponse({"error": message}, status, {"Connection": "close"})
