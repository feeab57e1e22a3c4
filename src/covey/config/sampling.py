"""The settings of sampling: completions, the tools they may call, servers that do it elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_types import MinLen
from pydantic import Field, field_validator, model_validator

from covey.config.section import MANY, Names, Section
from covey_verify.web import plain_address


class Servers(Section):
    """Inference servers that sample in place of this process."""

    url: Names = Field((), description="Addresses, as http://127.0.0.1:8000: covey serve, vLLM or SGLang.")
    folder: Path | None = Field(
        None, description="Where weights are written for the servers; by default `sync` in the run's folder."
    )
    tolerance: float | None = Field(
        None,
        ge=0,
        description="Largest mean difference of log-probs to the trainer's, nats, after a change of weights; "
        "by default ten times a server's first one, 1e-5 to 1e-4 in float32, to 0.03 in bfloat16.",
    )
    timeout: float = Field(
        600.0, gt=0, le=10**6, description="Seconds that a group's completions or new weights may take."
    )
    patience: float = Field(
        60.0, ge=0, le=10**6, description="Seconds to wait for a server when none is left, then the run ends."
    )
    restart: str | None = Field(
        None,
        description="Shell command that restarts the server at $COVEY_URL on the model folder $COVEY_MODEL, "
        "where it has not taken new weights.",
    )

    @field_validator("url")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in map(plain_address, urls):
            try:
                parts = urlsplit(url)
                known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            except ValueError:  # its port is no number
                known = False
            if not known:
                raise ValueError(f"{url!r} is no address, as http://127.0.0.1:80; several are a list, [A, B]")
        if len(set(urls)) < len(urls):
            raise ValueError("each server once")
        return urls


class ToolUse(Section):
    """What a model may call while it answers, and how it is answered."""

    functions: Names = Field((), description="`calculate`, `python` (in the sandbox), or module.py:function.")
    environment: str | None = Field(
        None,
        description="module.py:Class. Each completion has an object of its own, whose methods are tools.",
    )
    max_calls: int = Field(
        4, ge=1, le=1_000, description="Turns of a completion that are answered; the next one is its last."
    )
    calls_per_turn: int = Field(
        8, ge=1, le=1_000, description="Calls of a turn that are run; the model is told which were not."
    )
    timeout: float = Field(
        10.0, gt=0, le=10**6, description="Seconds a call may take; the model is told if it took longer."
    )
    seconds: float = Field(
        60.0,
        gt=0,
        le=10**6,
        description="Seconds that the calls of a completion may take together, and for which a batch of "
        "completions, each round of resampled groups too, may wait for tools; later calls are not run.",
    )
    result_tokens: int = Field(
        256, ge=1, le=MANY, description="Longest result, tokens; what is beyond is cut off."
    )

    @model_validator(mode="after")
    def _some(self) -> ToolUse:
        if not (self.functions or self.environment):
            raise ValueError(
                "name at least one of rollout.tools.functions, as [calculate], or an environment"
            )
        if self.timeout > self.seconds:
            raise ValueError(
                f"a call may take {self.timeout:g} s (timeout), and all calls of a completion together "
                f"{self.seconds:g} s (seconds): raise rollout.tools.seconds or lower rollout.tools.timeout"
            )
        return self


class Rollout(Section):
    """How completions are sampled."""

    group_size: int = Field(
        8,
        ge=1,
        le=65_536,
        description="Completions per prompt. More give a better baseline at a higher cost.",
    )
    prompts_per_step: int = Field(16, ge=1, le=65_536, description="Prompts sampled for a training step.")
    max_tokens: int = Field(
        512,
        ge=1,
        le=MANY,
        description="Longest completion, tokens, what tools say included; longer ones are truncated.",
    )
    temperature: float = Field(
        1.0, ge=0, le=100, description="Of sampling; the loss uses the same. Published runs use 0.6 to 1.0."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus: keep this much probability.")
    top_k: int = Field(0, ge=0, le=MANY, description="Keep the k likeliest tokens; 0 keeps all.")
    stop: tuple[Annotated[str, MinLen(1)], ...] = Field((), description="Strings that end a completion.")
    curriculum: Literal["off", "frontier"] = Field(
        "off", description="`frontier` draws problems by how close their pass rate is to one half."
    )
    adapt_group_size: bool = Field(
        False, description="Spread the step's completions over prompts by their remembered pass rates."
    )
    prepass: int = Field(
        0,
        ge=0,
        le=65_536,
        description="Completions of every training problem before the first step, so that its pass rate is "
        "known to the curriculum and to adapt_group_size; 0: none.",
    )
    retire_after: int = Field(
        0,
        ge=0,
        le=1_000,
        description="A problem that was solved (pass rate .9 or more) so many times in a row is not drawn "
        "again, unless all are; 0: never.",
    )
    mask_truncated: bool = Field(False, description="Train no token of truncated completions.")
    max_resampling_rounds: int = Field(
        4, ge=0, le=1_000, description="Rounds of resampling for groups that a filter dropped."
    )
    max_running: int = Field(
        256, ge=1, le=65_536, description="Completions generated at once, by each server; bounds the cache."
    )
    staleness: int = Field(
        0,
        ge=0,
        le=1_000,
        description="Training steps that sampling may run ahead of the weights; 0 waits for every update.",
    )
    sampler: Servers | None = Field(None, description="Sample on servers: {url: [http://127.0.0.1:8000]}.")
    tools: ToolUse | None = Field(
        None, description="What the model may call while it answers: {functions: [calculate]}."
    )

    @field_validator("tools", mode="before")
    @classmethod
    def _by_name(cls, value: object) -> object:
        return {"functions": value} if isinstance(value, str | list | tuple) else value

    @model_validator(mode="after")
    def _completions(self) -> Rollout:
        if self.group_size * self.prompts_per_step > MANY:
            raise ValueError(f"group_size times prompts_per_step is more than {MANY:,}")
        return self
