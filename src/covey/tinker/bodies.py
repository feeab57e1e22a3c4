"""The bodies that Tinker's SDK sends as JSON. Unknown fields are refused, as they might change the result."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$")]
Seconds = Annotated[int, Ge(1)]
Metadata = dict[str, object]
UNSUPPORTED = {
    "topk_prompt_logprobs": "a local Tinker returns log-probs of the prompt's own tokens only",
    "topk_sample_logprobs": "a local Tinker returns log-probs of the tokens drawn only",
    "target_prompt_logprobs": "use forward with loss_fn=cross_entropy and these ids as target_tokens",
    "prompt_alt_tokens_k": "a local Tinker draws at the end of a prompt only",
    "record_stability_info": "it serves loss_fn=stable_reinforce, whose formula Tinker has not published; "
    "set loss_fn=importance_sampling, ppo or cispo",
    "kind": "an inflight sampler changes its weights while it draws; a local Tinker takes snapshots",
    "optimizer_config.type": "there is AdamW only",
}
"""Fields with values that Tinker supports and a local server does not -> the reason, for the error."""


class Body(BaseModel):
    """The base of all bodies."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    type: str = ""


class RequestOrder(BaseModel):
    """The client of a request and its place in the client's order. Other fields are ignored here."""

    model_id: str
    seq_id: int = 0


class Session(Body):
    """Body of session_heartbeat."""

    session_id: str


class LoraConfig(Body):
    """The adapter of a new training client."""

    rank: Annotated[int, Ge(1), Le(1024)]
    seed: Annotated[int, Ge(-(2**63)), Lt(2**64)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(BaseModel):
    """The optimizer of a training client."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """Body of create_model."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraConfig
    optimizer_config: OptimizerBody = OptimizerBody()


class ClientBody(Body):
    """The base of requests of a training client, which are computed in the order of ``seq_id``."""

    model_id: str
    seq_id: int = 0


class AdamParams(Body):
    """AdamW's parameters of one step."""

    learning_rate: Annotated[float, Ge(0)] = 1e-4
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    eps: Annotated[float, Ge(0)] = 1e-12
    weight_decay: Annotated[float, Ge(0)] = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of the gradient; no limit if it is 0 or less."""


class OptimStep(ClientBody):
    """Body of optim_step."""

    adam_params: AdamParams


class SaveWeights(ClientBody):
    """Body of save_weights."""

    path: Name
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(ClientBody):
    """Body of save_weights_for_sampler, which writes a checkpoint or, without a path, makes a sampler."""

    path: Name | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    """Body of load_weights: into an existing client, or with a session into a new one.

    The SDK sends ``optimizer_config`` and ``weights_access_token``; neither is used.
    """

    model_id: str | None = None
    seq_id: int = 0
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None


class CreateSampler(Body):
    """Body of create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    """A part of a prompt."""

    type: Literal["encoded_text"]
    tokens: list[int]


class Prompt(Body):
    """A prompt in parts."""

    chunks: list[Chunk]


class SamplingBody(Body):
    """Settings of sampling."""

    max_tokens: Annotated[int, Ge(1)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[float, Ge(0), Le(100)] = 1.0
    top_k: Annotated[int, Ge(-1)] = -1
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0


class SampleBody(Body):
    """Body of asample. Fields of type ``None`` or ``Literal`` are unsupported features of Tinker."""

    num_samples: Annotated[int, Ge(1), Le(4096)] = 1
    prompt: Prompt
    sampling_params: SamplingBody
    sampling_session_id: str
    seq_id: int
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int, Ge(1)] | None = None
    record_stability_info: Literal[False] | None = None


class Retrieve(Body):
    """Body of retrieve_future. The SDK sends ``allow_metadata_only``, which is not used."""

    request_id: str
    allow_metadata_only: bool = False


class WeightsInfo(Body):
    """Body of weights_info."""

    tinker_path: str


def first_mistake(error: ValidationError) -> str:
    """Return the first mistake in a body, with the reason if it asks for an unsupported feature."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) or "the body"
    reason = next((f" ({why})" for name, why in UNSUPPORTED.items() if where.endswith(name)), "")
    return f"{where}: {first['msg']}{reason}"
