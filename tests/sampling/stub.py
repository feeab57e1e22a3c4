"""A server that speaks vLLM's or SGLang's routes over a real model, and misbehaves where it is told to."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from covey.models.policy import Policy
from covey.rng import key, uniforms
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from covey.types import Completion

Reply = dict | list | bytes
Alters = Callable[[Tensor, Tensor], Tensor]
"""(V,) logits and the (T,) ids before them -> other logits."""


@dataclass
class Stub:
    """What the server has, and what is wrong with it."""

    policy: Policy
    speaks: Literal["vllm", "sglang"] = "vllm"
    takes_weights: Literal["yes", "says so", "no route"] = "yes"
    spoil: Callable[[Reply], Reply] = lambda reply: reply
    """Changes what is answered to a request for completions."""
    before: Callable[[], object] = lambda: None
    """Done before such a request is answered; a number it returns is the status instead."""
    alters: Alters | None = None
    """What it does to logits before it draws; log-probs stay the model's."""
    names_requests: bool = True
    """Whether its replies say which request they answer."""
    bodies: list[dict] = field(default_factory=list)
    """Requests for completions."""
    asked: list[str] = field(default_factory=list)
    weight_version: str = "default"
    """What SGLang calls the weights that it sampled with."""
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sample(self, prompt: Sequence[int], n: int, seed: int, params: SamplingParams) -> list[Completion]:
        request = Request(np.array(prompt, dtype=np.int64), [key(seed, i) for i in range(n)])
        with self.lock:
            if self.alters is not None:
                first = self.policy.model(torch.tensor([list(prompt)])).logits[0, -1].detach()
                return [self.altered(prompt, s, params, self.alters, first) for s in request.streams]
            self.policy.draw_from_all()  # as servers do
            found = {x.sample: x.completion for x in LocalSampler(self.policy).sample([request], params)}
        return [found[i] for i in range(n)]

    @torch.no_grad()
    def altered(
        self, prompt: Sequence[int], stream: int, params: SamplingParams, alters: Alters, logits: Tensor
    ) -> Completion:
        """A completion drawn from other logits than its log-probs are of."""
        ids, logprobs, draws = list(prompt), [], uniforms(stream, params.max_tokens)
        while len(logprobs) < params.max_tokens:
            if logprobs:
                logits = self.policy.model(torch.tensor([ids])).logits[0, -1]
            other = alters(logits.clone(), torch.tensor(ids))
            if params.temperature == 0:
                token = int(other.argmax())
            else:
                cdf = (other / params.temperature).softmax(-1).cumsum(-1)
                token = int((cdf <= draws[len(logprobs)] * cdf[-1]).sum())
            logprobs.append(float((logits / (params.temperature or 1.0)).log_softmax(-1)[token]))
            ids.append(token)
            if token in self.policy.end_ids:
                break
        finish = "stop" if ids[-1] in self.policy.end_ids else "length"
        return Completion(np.array(ids[len(prompt) :]), np.array(logprobs, np.float32), "", finish)

    def answer(self, path: str, body: dict) -> tuple[int, Reply]:
        path = path.partition("?")[0]
        self.asked.append(path)
        if path == "/health":
            return 200, b""
        handler = getattr(self, f"{self.speaks}{path.replace('/', '_')}", None)
        if handler is None:
            return 404, {"detail": "Not Found"}
        return handler(body)

    def completions(self, body: dict, *, n: int, seed: int, prompt: list[int], params: SamplingParams):
        self.bodies.append(body)
        status = self.before()
        if isinstance(status, int):
            return status, {"error": "not now"}
        return None, self.sample(prompt, n, seed, params)

    def load(self, folder: str) -> tuple[int, Reply]:
        if self.takes_weights == "no route":
            return 404, {"detail": "Not Found"}
        if self.takes_weights == "yes":
            with self.lock:
                self.policy.load_weights(Path(folder))
        return 200, {"success": True, "message": "done"}

    def named(self, body: dict, field_name: str) -> str:
        return f"cmpl-{body[field_name]}" if self.names_requests else "x"

    # vLLM

    def vllm_version(self, _: dict) -> tuple[int, Reply]:
        return 200, {"version": "0.33.0"}

    def vllm_v1_models(self, _: dict) -> tuple[int, Reply]:
        return 200, {"data": [{"id": "policy"}]}

    def vllm_pause(self, _: dict) -> tuple[int, Reply]:
        return (404, {}) if self.takes_weights == "no route" else (200, {})

    vllm_resume = vllm_reset_prefix_cache = vllm_pause

    def vllm_collective_rpc(self, body: dict) -> tuple[int, Reply]:
        assert body["method"] == "reload_weights"
        return self.load(body["kwargs"]["weights_path"])

    def vllm_v1_completions(self, body: dict) -> tuple[int, Reply]:
        assert body["model"] == "policy"
        params = SamplingParams(body["max_tokens"], body["temperature"], stop=tuple(body.get("stop", ())))
        status, found = self.completions(
            body, n=body["n"], seed=body["seed"], prompt=body["prompt"], params=params
        )
        if status is not None:
            return status, found
        choices = [
            {
                "index": i,
                "text": c.text,
                "finish_reason": c.finish,
                "token_ids": c.tokens.tolist(),
                "logprobs": {"token_logprobs": c.logprobs.tolist(), "tokens": ["?"] * len(c.tokens)},
            }
            for i, c in enumerate(found)
        ]
        return 200, self.spoil(
            {"id": self.named(body, "request_id"), "object": "text_completion", "choices": choices}
        )

    # SGLang

    def sglang_get_model_info(self, _: dict) -> tuple[int, Reply]:
        return 200, {"model_path": "policy", "is_generation": True}

    def sglang_update_weights_from_disk(self, body: dict) -> tuple[int, Reply]:
        self.weight_version = body["weight_version"]
        return self.load(body["model_path"])

    def sglang_generate(self, body: dict) -> tuple[int, Reply]:
        given = body["sampling_params"]
        params = SamplingParams(given["max_new_tokens"], given["temperature"])
        assert given["no_stop_trim"]
        assert not given["skip_special_tokens"]
        assert body["return_logprob"]
        n, seed = given["n"], given["sampling_seed"]
        assert 0 <= seed < 2**31
        status, found = self.completions(body, n=n, seed=seed, prompt=body["input_ids"], params=params)
        if status is not None:
            return status, found
        several = [
            {
                "text": c.text,
                "meta_info": {
                    "id": self.named(body, "rid") if n == 1 else f"other-{i}",
                    "weight_version": self.weight_version,
                    "finish_reason": {"type": c.finish},
                    "output_token_logprobs": [
                        [float(p), int(t), None] for p, t in zip(c.logprobs, c.tokens, strict=True)
                    ],
                },
            }
            for i, c in enumerate(found)
        ]
        return 200, self.spoil(several if n > 1 else several[0])


@contextmanager
def running(stub: Stub, port: int = 0) -> Iterator[Stub]:
    """The stub at ``stub.url``."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size) or b"{}")
            status, reply = stub.answer(self.path, body)
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            if data != ENDLESS:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            try:
                self.wfile.write(data)
                for _ in range(400 if data == ENDLESS else 0):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)
            except OSError:
                pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = False  # they end with the block: inside torch they would abort Python's exit
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    stub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()


ENDLESS = b'{"choices": ['
"""A reply that begins like one and never ends."""


def copied(policy: Policy) -> Policy:
    """The same weights in a model of its own."""
    made = Policy(copy.deepcopy(policy.model), policy.tokenizer)
    made.draw_from_all()  # as servers do
    return made
