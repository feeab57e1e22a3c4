"""The settings of sampling: completions, the tools that they may call, inference servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_types import MinLen
from pydantic import field_validator, model_validator

from covey.config.methods import RL, SAMPLING_METHODS
from covey.config.section import (
    MAX_COUNT,
    Duration,
    DurationOrZero,
    Few,
    FewOrZero,
    Many,
    ManyOrZero,
    Names,
    Section,
    Size,
    SizeOrZero,
    setting,
)
from covey_verify.types import NonNegative
from covey_verify.web import plain_address


class Servers(Section):
    """Inference servers that sample in place of this process."""

    url: Names = setting(
        (),
        "Addresses of covey serve, vLLM or SGLang, for example http://127.0.0.1:8000.",
        usual="one to eight servers",
    )
    folder: Path | None = setting(
        None,
        "Folder where weights are written for the servers; by default `sync` in the run's folder.",
        usual="on a file system that all servers see, in memory if there is room",
        resume="safe",
    )
    tolerance: NonNegative | None = setting(
        None,
        "Largest mean difference, in nats, between a server's log-probs and the trainer's after a change of "
        "weights; by default ten times the server's first one, 1e-5 to 1e-4 in float32, to 0.03 in bfloat16.",
        usual="1e-4 in float32, 0.01 to 0.05 in bfloat16",
        resume="safe",
    )
    timeout: Duration = setting(
        600.0,
        "Seconds that a group's completions or new weights may take.",
        usual="60 to 1,800",
        resume="safe",
    )
    patience: DurationOrZero = setting(
        60.0,
        "Seconds to wait for a server when none is left, before the run ends.",
        usual="60 to 600",
        resume="safe",
    )
    restart: str | None = setting(
        None,
        "Shell command that restarts the server at $COVEY_URL on the model folder $COVEY_MODEL, if it has "
        "not taken new weights.",
        usual="none",
        resume="safe",
    )

    @field_validator("url")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in map(plain_address, urls):
            try:
                parts = urlsplit(url)
                valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            except ValueError:  # the port is no number
                valid = False
            if not valid:
                raise ValueError(
                    f"{url!r} is not an address like http://127.0.0.1:80; write several as a list, [A, B]"
                )
        if len(set(urls)) < len(urls):
            raise ValueError("a server is listed twice; list each once")
        return urls


class ToolUse(Section):
    """Tools that a model may call while it answers, and the limits of their calls."""

    functions: Names = setting(
        (),
        "`calculate`, `python` (in the sandbox), or module.py:function.",
        usual="one to three; python or search in most papers",
    )
    environment: str | None = setting(
        None,
        "module.py:Class. Each completion has an object of its own, whose methods are tools.",
        usual="a class of yours, where calls change something that later calls see",
    )
    isolate: Literal["process", "sandbox"] = setting(
        "process",
        "Place of your functions and the environment: a process with your rights, or the run's sandbox, "
        "without files and network.",
        usual="sandbox for tools that evaluate what a model wrote",
    )
    max_calls: Few = setting(
        4,
        "Number of turns whose calls are run; the next turn is the last one.",
        usual="1 to 10",
        source="4 searches in Search-R1 (arXiv 2503.09516)",
        trl="max_tool_calling_iterations",
    )
    calls_per_turn: Few = setting(
        8, "Largest number of calls run per turn; the model is told which were not run.", usual="1 to 16"
    )
    timeout: Duration = setting(
        10.0, "Seconds a call may take; the model is told if it took longer.", usual="5 to 60"
    )
    seconds: Duration = setting(
        60.0,
        "Time limit in seconds for all tool calls of a completion, and for all waits of a batch for tools "
        "(each resampling round is a batch); calls beyond it are not run.",
        usual="30 to 600: the longest that a step may block",
    )
    result_tokens: Many = setting(
        256, "Longest tool result in tokens; longer results are truncated.", usual="200 to 2,000"
    )

    @model_validator(mode="after")
    def _check_tools(self) -> ToolUse:
        if not (self.functions or self.environment):
            raise ValueError("give rollout.tools.functions, as [calculate], or rollout.tools.environment")
        if self.timeout > self.seconds:
            raise ValueError(
                f"a call may take {self.timeout:g} s (timeout), but all calls of a completion together only "
                f"{self.seconds:g} s (seconds): raise rollout.tools.seconds or lower rollout.tools.timeout"
            )
        return self


class Rollout(Section):
    """The sampling of completions: their number, length, distribution and order."""

    group_size: Size = setting(
        8,
        "Completions per prompt. More give a better baseline at a higher cost.",
        usual="4 to 64; 8 or 16 in most papers",
        source="64 in DeepSeekMath (arXiv 2402.03300), 16 in DAPO (2503.14476)",
        trl="num_generations",
        read_by=SAMPLING_METHODS,
    )
    prompts_per_step: Size = setting(
        16, "Prompts sampled for a training step.", usual="16 to 512", read_by=SAMPLING_METHODS
    )
    max_tokens: Many = setting(
        512,
        "Longest completion in tokens, tool results included; longer ones are truncated.",
        usual="256 for short answers, 4,000 to 32,000 for long reasoning",
        source="1,024 in DeepSeekMath (arXiv 2402.03300), 20,480 in DAPO (2503.14476)",
        trl="max_completion_length",
    )
    temperature: float = setting(
        1.0,
        "Temperature of sampling, which the loss uses too. Published runs use 0.6 to 1.0.",
        ge=0,
        le=100,
        usual="0.6 to 1.0",
        source="1.0 in DAPO (arXiv 2503.14476), 0.6 in evaluations of DeepSeek-R1 (2501.12948)",
        trl="temperature",
    )
    top_p: float = setting(
        1.0,
        "Nucleus sampling: keep the likeliest tokens up to this probability.",
        gt=0,
        le=1,
        usual="1.0; 0.95 in few papers",
        trl="top_p",
    )
    top_k: ManyOrZero = setting(0, "Keep the k likeliest tokens; 0 keeps all.", usual="0", trl="top_k")
    stop: tuple[Annotated[str, MinLen(1)], ...] = setting(
        (), "Strings that end a completion; with tools they end a turn, and the calls at its end are made."
    )
    curriculum: Literal["off", "frontier"] = setting(
        "off",
        "`frontier` prefers problems whose pass rate is close to one half.",
        resume="refused",
        read_by=SAMPLING_METHODS,
    )
    adapt_group_size: bool = setting(
        False,
        "Spread the step's completions over prompts by their remembered pass rates.",
        resume="refused",
        read_by=SAMPLING_METHODS,
    )
    prepass: SizeOrZero = setting(
        0,
        "Completions of every training problem before the first step, so that its pass rate is known to the "
        "curriculum and to adapt_group_size; 0: none.",
        usual="0, or 4 to 8",
        read_by=SAMPLING_METHODS,
    )
    retire_after: FewOrZero = setting(
        0,
        "Stop drawing a problem once it has been solved (pass rate .9 or more) this many times in a row, "
        "unless all have been; 0: never.",
        usual="0; 1 in ScaleRL",
        read_by=SAMPLING_METHODS,
    )
    mask_truncated: bool = setting(
        False,
        "Train no token of truncated completions.",
        source="DAPO's overlong filtering (arXiv 2503.14476)",
        trl="mask_truncated_completions",
        read_by=RL,
    )
    max_resampling_rounds: FewOrZero = setting(
        4, "Rounds of resampling for groups that a filter dropped.", usual="2 to 4", read_by=SAMPLING_METHODS
    )
    max_running: Size = setting(256, "Completions generated at once, by each server; bounds the cache.")
    staleness: FewOrZero = setting(
        0,
        "Training steps that sampling may run ahead of the weights; 0 waits for every update.",
        usual="0, or 1 to 4 where sampling or rewards take long",
        source="AReaL (arXiv 2505.24298): up to 4 costs nothing with a correction",
        read_by=SAMPLING_METHODS,
    )
    sampler: Servers | None = setting(None, "Sample on servers: {url: [http://127.0.0.1:8000]}.")
    tools: ToolUse | None = setting(
        None, "Tools that the model may call while it answers: {functions: [calculate]}."
    )

    @field_validator("tools", mode="before")
    @classmethod
    def _by_name(cls, value: object) -> object:
        # `tools: calculate` is short for `tools: {functions: [calculate]}`.
        return {"functions": value} if isinstance(value, str | list | tuple) else value

    @property
    def completions_per_step(self) -> int:
        """Completions that one batch samples, before filtered groups are replaced."""
        return self.group_size * self.prompts_per_step

    @model_validator(mode="after")
    def _completions(self) -> Rollout:
        # Each is within its own bounds, but the batch is their product.
        if self.completions_per_step > MAX_COUNT:
            raise ValueError(f"group_size times prompts_per_step exceeds {MAX_COUNT:,}")
        return self
