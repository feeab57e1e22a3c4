"""Dialects of inference servers: the forms in which covey, vLLM and SGLang take the same request.

Routes and fields as of vLLM 0.33 and SGLang 0.5.23. A request names every field that changes what is drawn:
servers take missing fields from the model's generation_config.json, or from their own command line. A reply
with another structure is refused.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.types import SamplingMask
from covey_verify.web import StatusError

AskServer = Callable[..., object]
"""(path, body or None) -> JSON, of one server."""
Body = dict[str, object]
REQUEST_ID = re.compile(r"question-[0-9a-f]{16}")
"""The id of a request, which tells its reply from the replies to others."""


class ServerFault(Exception):
    """Raised for a reply that does not answer its request."""


class ServerOutput(NamedTuple):
    """A completion as a server gave it."""

    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]
    sampling_mask: SamplingMask | None = None


def _reply_id(reply: object) -> list[object]:
    return [reply.get("id")] if isinstance(reply, Mapping) else []


@dataclass(frozen=True)
class Dialect:
    """The protocol of one kind of server, as functions."""

    name: str
    path: str
    """Path of the route that samples."""
    body: Callable[[Request, SamplingParams, str, Sequence[int]], Body]
    """Request, parameters, the server's name of the model, ids that end a completion -> body."""
    read: Callable[[object], list[ServerOutput]]
    """Reply -> completions. Raises ValidationError."""
    load: Callable[[AskServer, str, int], None]
    """Take the weights of a folder as a version. Raises ServerFault."""
    stamp: Callable[[object], object] = lambda _: None
    """Reply -> a mark that changes with the server's restart or its weights; None if it gives none."""
    ids: Callable[[object], Sequence[object]] = _reply_id
    """Reply -> the ids of its request that it mentions."""
    id_field: str = "request_id"
    """Field of a body that holds the request's id."""
    streams: bool = False
    """Whether it draws with the request's random streams, reports which tokens could be drawn, and always
    names the request that it answers."""


# pydantic reads replies: a missing field or another type raises ValidationError, unknown fields are ignored.
class _Mask(BaseModel):
    ids: list[int]
    ends: list[int]


class _Logprobs(BaseModel):
    token_logprobs: list[float]


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length"]
    token_ids: list[int]
    logprobs: _Logprobs
    sampling_mask: _Mask | None = None


class _Choices(BaseModel):
    choices: list[_Choice]


class _Stamp(BaseModel):
    instance: str = ""
    version: int = 0


def _covey_stamp(reply: object) -> object:
    return _Stamp.model_validate(reply)


def _read_choices(reply: object) -> list[ServerOutput]:
    # Servers may list completions as they end; ``index`` says which random stream each belongs to.
    choices = sorted(_Choices.model_validate(reply).choices, key=lambda c: c.index)
    return [
        ServerOutput(c.token_ids, c.logprobs.token_logprobs, c.finish_reason, _mask_of(c.sampling_mask))
        for c in choices
    ]


def _mask_of(reply: _Mask | None) -> SamplingMask | None:
    if reply is None:
        return None
    return SamplingMask(np.array(reply.ids, np.int32), np.array(reply.ends, np.int64))


def _covey_body(request: Request, params: SamplingParams, model: str, _: Sequence[int]) -> Body:
    return {
        "model": model,
        "prompt": request.prompt.tolist(),
        "n": len(request.streams),
        "streams": list(request.streams),
        # The draws continue: the rest's token t takes the uniform ``prefix_tokens`` + t of its stream.
        **({"prefix_tokens": request.prefix_tokens} if request.prefix_tokens else {}),
        **_common(params),
        "logprobs": 0,
        "return_token_ids": True,
    }


def _common(params: SamplingParams) -> Body:
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop": list(params.stop),
    }


# All of these are sent, because a generation_config.json would decide whatever is left out (see above).
VLLM_NEUTRAL: Body = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "use_beam_search": False,
    "length_penalty": 1.0,
    "watermarking": False,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "structured_outputs": None,
    "response_format": None,
    "truncate_prompt_tokens": None,
    "skip_special_tokens": False,  # changes draws too: it decides where a stop string is found
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "echo": False,
    "suffix": None,
    "stream": False,
}
"""vLLM's fields that covey has no setting for, with values that change nothing."""
SGLANG_NEUTRAL: Body = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
    "logit_bias": None,
    "stop_regex": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}
"""The same for SGLang, where null replaces a value from --preferred-sampling-params."""


def _seed(request: Request) -> int:
    """Return the one seed of a request. Each segment gets another, so that they do not repeat draws."""
    first_stream = request.streams[0]
    return key(first_stream, "segment", request.prefix_tokens) if request.prefix_tokens else first_stream


def _covey_load(ask: AskServer, folder: str, version: int) -> None:
    reply = ask("/weights", {"folder": folder, "version": version})
    if not isinstance(reply, Mapping) or reply.get("version") != version:
        raise ServerFault(f"unexpected reply from /weights: {str(reply)[:200]}")


def _vllm_body(request: Request, params: SamplingParams, model: str, ends: Sequence[int]) -> Body:
    return {
        "model": model,
        "prompt": request.prompt.tolist(),
        "n": len(request.streams),
        "seed": _seed(request) >> 2,  # it takes 63 bits, and adds the number of the completion
        **_common(params),
        **VLLM_NEUTRAL,
        "stop_token_ids": list(ends),
        "logprobs": 0,
        "return_token_ids": True,
    }


def _vllm_load(ask: AskServer, folder: str, version: int) -> None:
    try:
        # It pauses once its requests have ended. The cached prefixes belong to the old weights.
        ask("/pause?mode=wait", {})
        ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        ask("/reset_prefix_cache", {})
        ask("/resume", {})
    # vLLM has these routes in its development mode only.
    except StatusError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        raise ServerFault(
            "it has no route for new weights: start vLLM with VLLM_SERVER_DEV_MODE=1 on a network that only "
            "you can reach, or set rollout.sampler.restart"
        ) from None
    del version


def _sglang_body(request: Request, params: SamplingParams, _: str, ends: Sequence[int]) -> Body:
    sampling = {
        **SGLANG_NEUTRAL,
        "n": len(request.streams),
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        # SGLang writes "all tokens" as -1.
        "top_k": params.top_k or -1,
        "stop": list(params.stop) or None,
        "stop_token_ids": list(ends),
        "sampling_seed": _seed(request) >> 33,  # 31 bits
    }
    return {"input_ids": request.prompt.tolist(), "sampling_params": sampling, "return_logprob": True}


class _Finish(BaseModel):
    type: Literal["stop", "length"]


class _Meta(BaseModel):
    id: str = ""
    weight_version: str = ""
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float, int, object]] = Field(min_length=1)


class _Generated(BaseModel):
    meta_info: _Meta


def _generated_metas(reply: object) -> list[_Meta]:
    # With n = 1 SGLang answers with an object, otherwise with a list of them.
    objects = reply if isinstance(reply, list) else [reply]
    return [_Generated.model_validate(generated).meta_info for generated in objects]


def _sglang_stamp(reply: object) -> object:
    return {meta.weight_version for meta in _generated_metas(reply)}


def _sglang_ids(reply: object) -> list[object]:
    return [meta.id for meta in _generated_metas(reply)]


def _read_generated(reply: object) -> list[ServerOutput]:
    outputs = list[ServerOutput]()
    for meta in _generated_metas(reply):
        tokens = [token for _, token, _ in meta.output_token_logprobs]
        logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs]
        outputs.append(ServerOutput(tokens, logprobs, meta.finish_reason.type))
    return outputs


def _sglang_load(ask: AskServer, folder: str, version: int) -> None:
    name = f"{version}-{secrets.token_hex(8)}"  # another run may give it weights of the same version
    body = {"model_path": folder, "flush_cache": True, "weight_version": name}
    reply = ask("/update_weights_from_disk", body)
    if not isinstance(reply, Mapping) or reply.get("success") is not True:
        raise ServerFault(f"unexpected reply from /update_weights_from_disk: {str(reply)[:200]}")


COVEY = Dialect(
    "covey", "/v1/completions", _covey_body, _read_choices, _covey_load, _covey_stamp, streams=True
)
VLLM = Dialect("vLLM", "/v1/completions", _vllm_body, _read_choices, _vllm_load)
SGLANG = Dialect(
    "SGLang", "/generate", _sglang_body, _read_generated, _sglang_load, _sglang_stamp, _sglang_ids, "rid"
)


def recognize(ask: AskServer, must_take_weights: bool) -> tuple[Dialect, str]:
    """Find out a server's dialect and its name of the model.

    Raises ServerFault if it is of no known kind, or says that it takes no weights where it must.
    """
    # Each kind has a route that the others lack; vLLM comes last, since all of them have /v1/models.
    info = _reply_of_route(ask, "/info")
    if isinstance(info, Mapping) and info.get("server") == "covey":
        if must_take_weights and info.get("takes_weights") is not True:
            raise ServerFault("this server does not take weights: start it with --weights FOLDER")
        return COVEY, str(info.get("model"))
    info = _reply_of_route(ask, "/get_model_info")
    if isinstance(info, Mapping) and "model_path" in info:
        return SGLANG, str(info["model_path"])
    listing = _reply_of_route(ask, "/v1/models")
    models = listing.get("data") if isinstance(listing, Mapping) else None
    model = models[0] if isinstance(models, list) and models else None
    if isinstance(model, Mapping) and _reply_of_route(ask, "/version"):
        return VLLM, str(model.get("id"))
    raise ServerFault("this is not a server of `covey serve`, vLLM or SGLang: none of their routes answers")


def _reply_of_route(ask: AskServer, path: str) -> object:
    """Return the reply of a route; None where there is no such route, or its reply is no JSON."""
    try:
        return ask(path, None)
    except StatusError as error:
        # A missing token is the user's mistake and has to be reported; other errors mean "not this kind".
        if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise
        return None
    except ValueError:
        return None


def read_outputs(
    dialect: Dialect,
    reply: object,
    request: Request,
    params: SamplingParams,
    vocabulary: int,
    ends: Sequence[int],
) -> list[ServerOutput]:
    """Return the completions of a reply, each checked to be possible. Raises ServerFault."""
    try:
        outputs = dialect.read(reply)
    except ValidationError as error:
        # The first difference is enough for a message; a reply of another kind of server has hundreds.
        first_error = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first_error["loc"]))
        raise ServerFault(f"its reply has an unexpected form: {field}: {first_error['msg']}") from None
    if len(outputs) != len(request.streams):
        raise ServerFault(f"it returned {len(outputs)} completions instead of {len(request.streams)}")
    for output in outputs:
        _check(output, params, vocabulary, ends)
    return outputs


def new_request_id() -> str:
    """Return an id that no other request has. A request that is repeated gets a new one."""
    return f"question-{secrets.token_hex(8)}"


def check_request_id(dialect: Dialect, reply: object, request_id: str) -> None:
    """Check that a reply answers this request, and not another of ours. Raises ServerFault.

    vLLM behind a proxy that renames requests, and SGLang for several completions, do not report the id.
    """
    # An id of ours may be part of a longer one: vLLM puts "cmpl-" before it.
    ids = REQUEST_ID.findall(" ".join(map(str, dialect.ids(reply))))
    if set(ids) - {request_id} or (dialect.streams and not ids):
        raise ServerFault("its reply belongs to another request: is there a proxy or a cache in between?")


def _check(output: ServerOutput, params: SamplingParams, vocabulary: int, ends: Sequence[int]) -> None:
    count = len(output.tokens)
    if not 1 <= count <= params.max_tokens or len(output.logprobs) != count:
        raise ServerFault(
            f"it returned {count} tokens and {len(output.logprobs)} log-probs, but at most "
            f"{params.max_tokens} were asked for"
        )
    if not all(0 <= t < vocabulary for t in output.tokens):
        raise ServerFault(
            f"it returned a token id that the model does not have ({vocabulary} ids): does it serve "
            "another model?"
        )
    # Rounding may put a log-prob just above 0.
    if not all(math.isfinite(x) and x <= 1e-3 for x in output.logprobs):
        raise ServerFault("its log-probs are not logarithms of probabilities")
    if any(t in ends for t in output.tokens[:-1]):
        raise ServerFault("a completion continues after its end token")
    if output.finish == "stop" and output.tokens[-1] not in ends and not params.stop:
        raise ServerFault("a completion is marked as ended, but has no end token")
    if output.finish == "length" and count < params.max_tokens:
        raise ServerFault(f"a completion is marked as truncated at {count} of {params.max_tokens} tokens")
    if params.truncates and not _is_mask(output.sampling_mask, count, vocabulary):
        raise ServerFault("it does not say which tokens remained under top_p and top_k")


def _is_mask(mask: SamplingMask | None, count: int, vocabulary: int) -> bool:
    """Return whether a mask tells which tokens could be drawn for each of ``count`` tokens."""
    # ``ids`` lists them for one token after another, and ``ends`` (T,) is where each token's list ends.
    if mask is None or len(mask.ends) != count:
        return False
    each_has_some = bool((np.diff(mask.ends, prepend=0) >= 1).all())
    ends_with_ids = bool((mask.ends[-1:] == len(mask.ids)).all())
    return each_has_some and ends_with_ids and all(0 <= t < vocabulary for t in mask.ids)
