"""A server in this process, and a client that speaks the SDK's bytes without the SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from covey.models.policy import Policy
from covey.tinker.adapters import Base
from covey.tinker.app import TinkerServer
from covey.tinker.checkpoints import CheckpointStore
from covey.tinker.wire import PROTOBUF, encode_field, read_fields
from tests.serving import served

DATUM = Mapping[str, Any]


@contextmanager
def serving(policy: Policy, folder: Path, token: str = "", tokens: int = 4096) -> Iterator[str]:
    """The address of a local Tinker of this model."""
    app = TinkerServer(Base(policy, "tiny", "tiny", tokens), CheckpointStore(folder), token).app()
    with served(app, lifespan="off") as address:
        yield address


def call(url: str, path: str, body: object = None, method: str = "", key: str = "tml-x") -> Any:
    """What a server answers: JSON, or bytes. Raises Refused for any status but 200."""
    raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    kind = PROTOBUF if isinstance(body, bytes) else "application/json"
    headers = {"Content-Type": kind, "X-API-Key": key}
    method = method or ("GET" if raw is None else "POST")
    reply = httpx2.request(method, f"{url}/api/v1/{path}", content=raw, headers=headers, timeout=None)
    if not reply.is_success:
        raise Refused(reply.status_code, reply.json().get("error", ""))
    return reply.content if reply.headers["content-type"] == PROTOBUF else reply.json()


class Refused(Exception):
    """A status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Session:
    """A session, and what its clients ask."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.id = call(url, "create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})[
            "session_id"
        ]
        self.clients = 0

    def result(self, promise: Mapping[str, Any]) -> Any:
        """The result of a promise."""
        while True:
            try:
                return call(self.url, "retrieve_future", {"request_id": promise["request_id"]})
            except Refused as error:
                if error.status != 408:
                    raise

    def train(self, seed: int = 1, rank: int = 4, **flags: bool) -> Trainer:
        """A new training client."""
        body = {
            "session_id": self.id,
            "model_seq_id": self._next(),
            "base_model": "tiny",
            "lora_config": {"rank": rank, "seed": seed, **flags},
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        }
        return self._created("create_model", body)

    def resume(self, path: str, optimizer: bool = True) -> Trainer:
        """A new training client from a checkpoint."""
        body = {
            "session_id": self.id,
            "model_seq_id": self._next(),
            "path": path,
            "optimizer": optimizer,
            "type": "load_weights",
        }
        return self._created("load_weights", body)

    def _created(self, route: str, body: object) -> Trainer:
        made = self.result(call(self.url, route, body))
        if "error" in made:
            raise Refused(0, made["error"])
        return Trainer(self, made["model_id"])

    def sampler(self, path: str | None, number: int) -> str:
        """A sampler of a checkpoint or of the base model."""
        named = {"base_model": "tiny"} if path is None else {"model_path": path}
        body = {"session_id": self.id, "sampling_session_seq_id": number, **named}
        return call(self.url, "create_sampling_session", body)["sampling_session_id"]

    def ask(self, sampler: str, prompt: Sequence[int], seq_id: int = 0, n: int = 1, **more: Any) -> Any:
        """The promise of completions."""
        chunk = {"type": "encoded_text", "tokens": list(map(int, prompt))}
        params = {"max_tokens": 6, "seed": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
        extra = {k: more.pop(k) for k in list(more) if k in ("prompt_logprobs", "topk_prompt_logprobs")}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "num_samples": n, "type": "sample"}
        return call(
            self.url,
            "asample",
            {**body, "prompt": {"chunks": [chunk]}, "sampling_params": {**params, **more}, **extra},
        )

    def sample(self, sampler: str, prompt: Sequence[int], **more: Any) -> list[Sampled]:
        """Completions, read from the message."""
        return sampled(self.result(self.ask(sampler, prompt, **more)))

    def _next(self) -> int:
        self.clients += 1
        return self.clients - 1


Sampled = tuple[list[int], list[float], str]


def sampled(message: bytes) -> list[Sampled]:
    """Tokens, log-probs and reason of each completion."""
    found = []
    for sequence in (read_fields(x) for x in read_fields(message).get(1, [])):
        tokens, logprobs = np.frombuffer(sequence[2][0], np.int32), np.frombuffer(sequence[3][0], np.float32)
        found.append((tokens.tolist(), logprobs.tolist(), ("stop", "length")[sequence[1][0]]))
    return found


class Trainer:
    """A training client, which numbers its requests as the SDK does."""

    def __init__(self, session: Session, name: str) -> None:
        self.session = session
        self.id = name
        self.turn = 0

    def post(self, route: str, /, **body: object) -> Any:
        """The promise of a request in this client's order."""
        self.turn += 1
        return call(self.session.url, route, {"model_id": self.id, "seq_id": self.turn, **body})

    def do(self, route: str, /, **body: object) -> Any:
        """The result of a request. Raises Refused with the sentence of one that failed."""
        return self._result(self.post(route, **body))

    def message(self, data: Sequence[DATUM], loss: str, forward: bool = False, **config: float) -> bytes:
        """The bytes of a request for a loss, and its turn."""
        self.turn += 1
        return training_message(self.id, self.turn, data, loss, forward, config)

    def backward(
        self, data: Sequence[DATUM], loss: str = "cross_entropy", forward: bool = False, **config: float
    ) -> tuple[list[np.ndarray], float]:
        """The log-probs of each datum and the loss."""
        message = self.message(data, loss, forward, **config)
        return outputs(self._result(call(self.session.url, "forward_backward", message)))

    def step(self, **params: float) -> float:
        """The gradient's norm at a step of the optimizer."""
        return self.do("optim_step", adam_params=params)["metrics"]["grad_norm"]

    def snapshot(self, number: int) -> str:
        """An unsaved sampler."""
        return self.do("save_weights_for_sampler", sampling_session_seq_id=number)["sampling_session_id"]

    def _result(self, promise: Any) -> Any:
        found = self.session.result(promise)
        if isinstance(found, dict) and "error" in found:
            raise Refused(0, found["error"])
        return found


def training_message(
    model: str, turn: int, data: Sequence[DATUM], loss: str, forward: bool, config: Mapping[str, float]
) -> bytes:
    """A request for a loss as the SDK writes it."""
    message = (
        encode_field(1, model.encode())
        + encode_field(2, turn)
        + encode_field(4, loss.encode())
        + encode_field(6, int(forward))
    )
    for datum in data:
        arrays = dict(datum)
        tokens = np.asarray(arrays.pop("tokens"), np.int32).tobytes()
        body = encode_field(1, encode_field(1, encode_field(1, tokens)))
        for name, values in arrays.items():
            array = np.asarray(values, np.int64 if name == "target_tokens" else np.float32)
            code = 2 if array.dtype == np.int64 else 1
            shape = b"".join(encode_field(4, n) for n in array.shape)
            tensor = encode_field(1, array.tobytes()) + encode_field(3, code) + shape
            body += encode_field(2, encode_field(1, name.encode()) + encode_field(2, tensor))
        message += encode_field(3, body)
    for name, value in config.items():
        message += encode_field(
            7, encode_field(1, name.encode()) + encode_field(2, encode_field(1, float(value)))
        )
    return message


def outputs(message: bytes) -> tuple[list[np.ndarray], float]:
    """The log-probs of each datum of a result, and the sum of the losses."""
    found = read_fields(message)
    arrays = []
    for record in (read_fields(x) for x in found.get(2, [])):
        tensor = read_fields(read_fields(record[2][0])[2][0])
        offsets = np.frombuffer(tensor[2][0], np.int64)
        width = [-1, *tensor.get(4, [])]
        arrays += [np.frombuffer(tensor[1][0][a:b], np.float32).reshape(width) for a, b in pairwise(offsets)]
    entry = read_fields(found[3][0])
    assert entry[1] == [b"loss:sum"]
    return arrays, entry[2][0]
