"""`covey plan`: seconds, hours, memory and money of a run on a device that is not at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from covey.config.contradictions import updates_of
from covey.config.load import Loaded
from covey.errors import ConfigError
from covey.insight.devices import Device
from covey.insight.forecast import Forecast, Workload, evaluations_of
from covey.learner.memory import Shape, asked_of, forecast, planned_tokens, shape_of
from covey.models.load import skeleton
from covey.prompts import encode, texts_of
from covey.tasks.source import load_problems

PROGRAM = 500_000_000
"""Bytes of program and libraries, nearly; of a GPU its context."""
READ = 256
"""Problems whose prompts are tokenized."""


class Demand(NamedTuple):
    """What some tokens ask for, once through the model."""

    products: float
    attention: float
    """GFLOP."""
    logits: float
    """Billions."""
    decoding: float
    """Thousands of decode steps times layers."""
    read: float
    """GB of weights, keys and values that decoding reads."""


def work(
    shape: Shape, tied: bool, prompts: float, completions: float, prompt: float, length: float, running: int
) -> Demand:
    """Of ``completions`` of ``length`` tokens to ``prompts`` prompts, so many running at once."""
    heads = shape.queries * shape.head
    inner = shape.parameters - (1 if tied else 2) * shape.vocabulary * shape.width
    tokens = completions * length
    seen = completions * (length * prompt + length**2 / 2)
    steps = tokens / max(min(completions, running), 1)
    weights = inner + shape.vocabulary * shape.width
    pairs = 2 * shape.layers * shape.keys * shape.head
    return Demand(
        products=2e-9 * ((tokens + prompts * prompt) * inner + tokens * shape.vocabulary * shape.width),
        attention=4e-9 * shape.layers * heads * seen,
        logits=1e-9 * tokens * shape.vocabulary,
        decoding=1e-3 * steps * shape.layers,
        read=1e-9 * shape.number * (steps * weights + pairs * seen),
    )


def seconds(device: Device, sampling: Demand, updating: Demand) -> tuple[float, float]:
    """Of sampling and of an update, forward and backward."""
    return (
        float(np.dot(device.sampling, sampling)),
        float(np.dot(device.update, (updating.products, updating.attention, updating.logits))),
    )


@dataclass(frozen=True)
class Assumed:
    """What a run's completions are taken to be, and why."""

    length: float
    dead: float
    source: str


def assumed(stage: Loaded, length: float | None, dead: float | None, preview: Path | None) -> Assumed:
    """From the options, else from a file of `covey preview --json`, else the worst case.

    Raises ConfigError.
    """
    limit, source = stage.config.rollout.max_tokens, ""
    own, tied = float(limit), 0.0
    if preview is not None:
        try:
            found = json.loads(preview.read_text(encoding="utf-8"))
            size = str(stage.config.rollout.group_size)
            own, tied = float(found["length"]["mean"]), float(found["dead"][size]["value"])
            source = f"as {preview} measured them"
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--preview {preview}: not what `covey preview --json` prints of groups of "
                f"{stage.config.rollout.group_size} ({type(error).__name__}: {error})"
            ) from None
    own, tied = own if length is None else length, tied if dead is None else dead
    if not 0 < own <= limit or not 0 <= tied < 1:
        raise ConfigError(
            f"--length {own:g} --dead {tied:g}: above 0 and at most rollout.max_tokens, {limit}; 0 to below 1"
        )
    if not source:
        source = "as given" if length is not None else "every one at the limit; `covey preview` measures them"
    return Assumed(own, tied, source)


@dataclass(frozen=True)
class Plan:
    """A run on a device."""

    device: Device
    assumed: Assumed
    micro_tokens: int
    forecast: Forecast

    def record(self) -> dict[str, object]:
        """As JSON."""
        return {
            "device": self.device.name,
            "source": self.device.source,
            "assumed": vars(self.assumed),
            "tokens_per_micro_batch": self.micro_tokens,
            **self.forecast.record(),
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.device.name}: {self.device.source}"
        yield (
            f"completions of {self.assumed.length:,.0f} tokens, {self.assumed.source}; "
            f"{self.assumed.dead:.0%} of the groups dead"
        )
        yield from self.forecast.lines()
        yield "rewards are not counted: `covey preview` times them"
        yield f"micro-batches of {self.micro_tokens:,} tokens"


def plan(stage: Loaded, device: Device, assumption: Assumed, price: float) -> Plan:
    """What a run takes on a device; the model's weights are not loaded."""
    config, algorithm = stage.config, stage.algorithm
    source = load_problems(stage)
    policy = skeleton(stage, texts_of(source, config))
    prompts = [len(p.tokens) for p in encode(policy, source.train[:READ], config)]
    shape = shape_of(policy)._replace(
        number=4 if device.compiled or config.dtype == "float32" else 2, exact=device.compiled
    )
    tied = bool(policy.model.config.tie_word_embeddings)
    load = Workload.of(config, algorithm, assumption.dead, assumption.length)
    asked = partial(work, shape, tied, prompt=float(np.mean(prompts)), length=assumption.length)
    size, running = config.rollout.group_size, config.rollout.max_running
    count, completions = evaluations_of(config, len(source.test))
    sampling = asked(load.completions / size, load.completions, running=running)
    rollout, update = seconds(device, sampling, asked(load.trained / size, load.trained, running=running))
    evaluation, _ = seconds(
        device, asked(completions / (config.eval.samples + 1), completions, running=running), sampling
    )
    # What is scored once more without a gradient: under a reference, or by the policy before its updates.
    again = algorithm.needs_reference + (not device.compiled and updates_of(config) > 1)
    kept = algorithm.needs_reference and config.lora is None
    largest = asked_of(config, prompts, ())
    expect = partial(forecast, shape, config, largest, reference=kept, program=PROGRAM)
    tokens = planned_tokens(expect(config.train.tokens_per_micro_batch), shape, config, device.memory)
    found = Forecast(
        rollout=rollout,
        update=update * (1 + again / 3 + config.train.recompute_layers / 3),
        evaluation=evaluation,
        steps=config.train.steps,
        evaluations=count,
        tokens=config.train.steps * load.completions * load.length,
        memory=expect(tokens),
        there=device.memory,
        price=price,
    )
    return Plan(device, assumption, tokens, found)
