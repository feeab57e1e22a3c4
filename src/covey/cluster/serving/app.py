"""The routes of `covey serve`: OpenAI's completions with token ids and log-probs, and weights by version.

Nothing in a request is executed. Bodies, prompts, counts and waiting are bounded; weights come from one
folder only. A page in a browser is answered only if this server sent it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import MinLen
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from covey.cluster.serving.guard import Refusal, admit, body
from covey.cluster.serving.shared import SampleAnswer, SharedModel, TooBusy, new_instance
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.tasks.examples import messages_of
from covey.types import VERSION, Completion
from covey_verify.errors import ConfigError, CoveyError, DataError

Handler = Callable[[HttpRequest], Awaitable[JSONResponse]]


StopText = Annotated[str, MinLen(1)]


class CompletionRequest(BaseModel):
    """Fields of both kinds of completion. An unknown field is refused: it might change the result."""

    # strict: "1" is no number, and 1.5 no count.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = ""
    user: str = ""
    stream: Literal[False] = False
    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    n: int = Field(1, ge=1, le=4096)
    stop: StopText | list[StopText] | None = Field(None, max_length=1000)
    seed: int | None = None
    streams: list[int] | None = Field(None, max_length=4096)
    """A key for each of the ``n`` completions, instead of ``seed``."""
    prefix_tokens: int = Field(0, ge=0, le=2**32)
    """Number of tokens at the end of the prompt that were drawn from these streams before."""
    request_id: str = Field("", max_length=200)
    """The id that the reply gets."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: object) -> object:
        """Leave out nulls, by which OpenAI's clients mean a default."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    def params(self) -> SamplingParams:
        """Return the sampling parameters."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        # -1 and 0 both mean all tokens: vLLM and SGLang write -1.
        return SamplingParams(self.max_tokens, self.temperature, self.top_p, max(self.top_k, 0), stop)

    def keys(self) -> list[int]:
        """Return the key of each completion's random stream. Raises Refusal."""
        if self.streams is not None:
            if len(self.streams) != self.n or not all(0 <= s < 2**64 for s in self.streams):
                raise Refusal(400, f"streams: one number of 64 bits for each of the {self.n} completions")
            return self.streams
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return [key(seed, "served", i) for i in range(self.n)]


class TextRequest(CompletionRequest):
    """Body of /v1/completions."""

    prompt: str | list[int]
    logprobs: int | None = Field(None, ge=0, le=1)
    return_token_ids: bool = False


class ChatRequest(CompletionRequest):
    """Body of /v1/chat/completions."""

    max_tokens: int = Field(256, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    messages: list[dict[str, object]] = Field(min_length=1)
    chat_template_kwargs: dict[str, object] = {}


class WeightsRequest(BaseModel):
    """Body of /weights."""

    model_config = ConfigDict(extra="forbid", strict=True)

    folder: str = Field(pattern=r"^[^\x00]+$")
    version: int = Field(ge=0)


@dataclass(frozen=True)
class Service:
    """The routes, and the model and settings that they share."""

    model: SharedModel
    name: str
    token: str = ""
    """The token that every caller has to send, unless empty."""
    weights: Path | None = None
    """The folder whose subfolders may be loaded as new weights; None: none may."""

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes: Mapping[str, tuple[str, Handler]] = {
            "/health": ("GET", self.health),
            "/info": ("GET", self.info),
            "/v1/models": ("GET", self.models),
            "/v1/completions": ("POST", self.completions),
            "/v1/chat/completions": ("POST", self.chat),
            "/weights": ("POST", self.load),
        }
        return Starlette(
            routes=[Route(p, self._guard_handler(h), methods=[m]) for p, (m, h) in routes.items()]
        )

    def _guard_handler(self, handler: Handler) -> Handler:
        # Every failure becomes a JSON error in OpenAI's form: 4xx for a caller's mistake, 503 for others.
        async def answer(request: HttpRequest) -> JSONResponse:
            try:
                admit(request, self.token, request.headers.get("authorization", "").removeprefix("Bearer "))
                return await handler(request)
            except Refusal as error:
                # What is left of the message is not read as another one.
                return _error(error.status, str(error), {"Connection": "close"})
            except ValidationError as error:
                return _error(400, _fault(error))
            except TooBusy as error:
                return _error(429, str(error), {"Retry-After": "1"})
            except (ConfigError, DataError) as error:
                return _error(400, str(error))
            except CoveyError as error:
                return _error(503, str(error))
            # uvicorn cancels the requests under way when it ends.
            except asyncio.CancelledError:
                return _error(503, "the server was told to end")

        return answer

    async def health(self, _: HttpRequest) -> JSONResponse:
        """Report that the server is up."""
        return JSONResponse({"status": "ok"})

    async def info(self, _: HttpRequest) -> JSONResponse:
        """Describe the server to a trainer that connects."""
        policy = self.model.policy
        return JSONResponse(
            {
                "server": "covey",
                "covey": VERSION,
                "model": self.name,
                "version": self.model.version,
                "takes_weights": self.weights is not None,
                "context": policy.context,
                "dtype": str(policy.model.dtype).removeprefix("torch."),
            }
        )

    async def models(self, _: HttpRequest) -> JSONResponse:
        """List the one model, as OpenAI lists models."""
        return JSONResponse(
            {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "covey"}]}
        )

    async def completions(self, request: HttpRequest) -> JSONResponse:
        """Complete a text or token ids."""
        call = TextRequest.model_validate_json(await body(request))
        prompt = call.prompt
        if isinstance(prompt, str):
            self._refuse_long_prompt(prompt)
            answered = await self._sample_answer(request, call, partial(self.model.policy.encode, prompt))
        else:
            answered = await self._sample_answer(request, call, lambda: prompt)
        choices = [
            {"index": i, "text": c.text, "finish_reason": c.finish, **_details(c, call)}
            for i, c in enumerate(answered.completions)
        ]
        return self._reply("text_completion", call, answered, choices)

    async def chat(self, request: HttpRequest) -> JSONResponse:
        """Answer messages, through the model's chat template."""
        call = ChatRequest.model_validate_json(await body(request))
        self._refuse_long_prompt([call.messages, call.chat_template_kwargs])
        messages = messages_of(list(call.messages))
        if messages is None:
            raise Refusal(400, "messages: each has a role, and a content that is a text or parts of text")
        encode = partial(self.model.policy.encode, messages, call.chat_template_kwargs)
        answered = await self._sample_answer(request, call, encode)
        choices = [
            {"index": i, "message": {"role": "assistant", "content": c.text}, "finish_reason": c.finish}
            for i, c in enumerate(answered.completions)
        ]
        return self._reply("chat.completion", call, answered, choices)

    async def load(self, request: HttpRequest) -> JSONResponse:
        """Take new weights: after all requests that came before, and before all that come later."""
        call = WeightsRequest.model_validate_json(await body(request))
        if self.weights is None:
            raise Refusal(403, "this server takes no weights: start it with --weights FOLDER")
        # Resolved first, so that neither ``..`` nor a link leads out of the folder.
        folder = Path(call.folder).resolve()
        root = self.weights.resolve()
        if not folder.is_relative_to(root) or not folder.is_dir():
            raise Refusal(403, f"weights are only taken from folders in {root}")

        def take() -> None:
            # Before the load: if it fails halfway, the weights are not the old instance's either.
            self.model.instance = new_instance()
            try:
                self.model.policy.load_weights(folder)
            except (ValueError, OSError) as error:
                raise DataError(f"{folder}: {error}") from None
            self.model.version = call.version

        await asyncio.wrap_future(self.model.queue_work(take))
        return JSONResponse({"version": call.version})

    @cached_property
    def most_characters(self) -> int:
        """Most characters of a prompt: a longer one certainly has more tokens than the context."""
        policy = self.model.policy
        return policy.context * max(map(len, policy.tokenizer.get_vocab()))

    def _refuse_long_prompt(self, prompt: object) -> None:
        """Refuse a prompt that cannot fit before it is encoded, which may take a minute. Raises Refusal."""
        if _characters(prompt) > self.most_characters:
            raise Refusal(
                400, f"prompt: it is longer than the context of {self.model.policy.context} tokens can hold"
            )

    async def _sample_answer(
        self, request: HttpRequest, call: CompletionRequest, encode: Callable[[], Sequence[int]]
    ) -> SampleAnswer:
        if call.model not in ("", self.name):
            raise Refusal(404, f"model: {call.model!r} is not served here, {self.name!r} is")
        # Encoded and checked in the model's thread, so that a long prompt does not block the event loop.
        make = partial(self._request, call, call.keys(), encode)
        answer = asyncio.wrap_future(self.model.ask(make, call.n, call.params()))
        departure = asyncio.create_task(_departure(request))
        try:
            await asyncio.wait((answer, departure), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise Refusal(499, "the caller has gone")
            return answer.result()
        finally:
            departure.cancel()
            answer.cancel()  # so that no other request waits for what nobody reads

    def _request(
        self, call: CompletionRequest, keys: list[int], encode: Callable[[], Sequence[int]]
    ) -> Request:
        """Encode and check a request. Raises Refusal."""
        policy = self.model.policy
        tokens = encode()
        size = len(tokens)
        vocabulary = policy.embedded
        if size + call.max_tokens > policy.context:
            raise Refusal(
                400,
                f"{size} tokens of prompt and max_tokens {call.max_tokens} are more than the context of "
                f"{policy.context}",
            )
        if not size or not all(0 <= t < vocabulary for t in tokens):
            raise Refusal(400, f"prompt: one token at least, ids from 0 to {vocabulary - 1}")
        return Request(np.array(tokens, dtype=np.int64), keys, call.prefix_tokens)

    def _reply(
        self,
        kind: str,
        call: CompletionRequest,
        answered: SampleAnswer,
        choices: Sequence[Mapping[str, object]],
    ) -> JSONResponse:
        size = len(answered.prompt)
        count = sum(len(c.tokens) for c in answered.completions)
        return JSONResponse(
            {
                "id": call.request_id or f"covey-{secrets.token_hex(8)}",
                "object": kind,
                "created": int(time.time()),
                "model": self.name,
                "instance": self.model.instance,
                "version": answered.version,
                "choices": choices,
                "usage": {
                    "prompt_tokens": size,
                    "completion_tokens": count,
                    "total_tokens": size + count,
                },
            }
        )


async def _departure(request: HttpRequest) -> None:
    """Return when the caller of a request, whose body has been read, has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _fault(error: ValidationError) -> str:
    """Return the field of a request that is wrong, and why."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, first["loc"])) or "body"
    if first["type"] == "extra_forbidden":
        return f"{field}: this server does not have it, and it may change the result; leave it out"
    return f"{field}: {first['msg']}"


def _characters(value: object) -> int:
    """Count the characters of all texts in a value; each message or other object counts at least as one.

    >>> _characters([{"role": "user", "content": "1+2="}])
    20
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return 1 + sum(_characters(x) for pair in value.items() for x in pair)
    return sum(map(_characters, value)) if isinstance(value, list) else 1


def _details(completion: Completion, call: TextRequest) -> dict[str, object]:
    """Return token ids and log-probs, if they were asked for."""
    details: dict[str, object] = {}
    if call.return_token_ids:
        details["token_ids"] = completion.tokens.tolist()
    if call.logprobs is not None:
        details["logprobs"] = {"token_logprobs": completion.logprobs.tolist()}
        if completion.sampling_mask is not None:
            mask = completion.sampling_mask
            details["sampling_mask"] = {"ids": mask.ids.tolist(), "ends": mask.ends.tolist()}
    return details


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind}}, status, headers)
