"""`covey plan`: seconds, hours, memory and money of a run on a device that is not at hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from covey.config.contradictions import updates_of
from covey.config.load import Loaded
from covey.errors import ConfigError
from covey.insight.devices import BACKWARD, Device
from covey.insight.fleet import ALONE, Fleet
from covey.insight.forecast import NONE, Forecast, Workload, evaluations_of
from covey.insight.sizes import LETTERS, MODEL_SIZES
from covey.learner.memory import Shape, asked_of, forecast, planned_tokens, shape_of
from covey.models.load import skeleton
from covey.prompts import encode, texts_of
from covey.rollouts.segments import Expected
from covey.tasks.source import Source, load_problems

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
    shape: Shape,
    tied: bool,
    prompts: float,
    completions: float,
    prompt: float,
    length: float,
    running: int,
    longest: float = 0.0,
) -> Demand:
    """Of ``completions`` of ``length`` tokens to ``prompts`` prompts, so many running at once.

    The ``longest`` of them is alone at the end, and every one of its steps reads the weights.
    """
    heads = shape.queries * shape.head
    inner = shape.parameters - (1 if tied else 2) * shape.vocabulary * shape.width
    tokens = completions * length
    seen = completions * (length * prompt + length**2 / 2)
    steps = tokens / max(min(completions, running), 1) + max(0.0, longest - length)
    weights = inner + shape.vocabulary * shape.width
    pairs = 2 * shape.layers * shape.keys * shape.head
    return Demand(
        products=2e-9 * ((tokens + prompts * prompt) * inner + tokens * shape.vocabulary * shape.width),
        attention=4e-9 * shape.layers * heads * seen,
        logits=1e-9 * tokens * shape.vocabulary,
        decoding=1e-3 * steps * shape.layers,
        read=1e-9 * shape.number * (steps * weights + pairs * seen),
    )


def seconds(device: Device, sampling: Demand, updating: Demand, over: int = 1) -> tuple[float, float]:
    """Of sampling, with a model that is ``over`` several devices, and of an update, forward and backward."""
    launches = device.sampling[3] * sampling.decoding
    return (
        (float(np.dot(device.sampling, sampling)) - launches) / over + launches,
        float(np.dot(device.update, (updating.products, updating.attention, updating.logits))),
    )


class StepWork(NamedTuple):
    """What a step asks for, whoever does it."""

    completions: float
    trained: float
    group: int
    """Completions of a prompt."""
    prompt: float
    length: float
    longest: float
    """Tokens."""
    running: int
    """Completions at once in a copy of the model."""
    scored: float = 0.0
    """Further passes over what is trained, without a gradient."""
    recomputed: bool = False
    continued: Expected = NONE
    """From every completion."""


def step_seconds(
    shape: Shape, tied: bool, device: Device, fleet: Fleet, job: StepWork, micro_tokens: int
) -> tuple[float, float]:
    """Of sampling and of an update on so many devices. A trainer computes while weights are on their way."""
    device, (copies, over) = device.for_size(shape.parameters), fleet.copies(shape, device)
    asked = partial(work, shape, tied, prompt=job.prompt, length=job.length, running=job.running)
    sampled, trained = job.completions / copies, job.trained / fleet.trainers
    sampling, again = asked(sampled / job.group, sampled, longest=job.longest), job.continued
    if cuts := sampled * again.cuts:
        whole = job.prompt + job.length
        more = asked(cuts, cuts * again.each, prompt=whole - again.length, length=again.length)
        sampling = Demand(*map(sum, zip(sampling, more, strict=True)))
    rollout, update = seconds(
        device,
        sampling,
        asked(trained / job.group, trained),
        over,
    )
    micro_batches = math.ceil(trained * (job.length + job.prompt / job.group) / micro_tokens)
    passes = 1 + job.scored / BACKWARD + job.recomputed / BACKWARD
    return rollout, max(update * passes, fleet.exchange(shape, device, micro_batches))


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
    """A run on a device, or on several."""

    device: Device
    assumed: Assumed
    micro_tokens: int
    forecast: Forecast
    fleet: Fleet
    copies: tuple[int, int]
    """How many copies of the model sample, and over how many devices each."""

    def record(self) -> dict[str, object]:
        """As JSON."""
        return {
            "device": self.device.name,
            "source": self.device.source,
            "devices": vars(self.fleet),
            "copies": self.copies,
            "assumed": vars(self.assumed),
            "tokens_per_micro_batch": self.micro_tokens,
            **self.forecast.record(),
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.device.name}: {self.device.source}"
        if self.fleet.devices > 1:
            there, (copies, each) = self.fleet, self.copies
            who = f"{there.samplers} others sample" if there.samplers else "they sample, too"
            over = f", each over {each} devices, which takes vLLM or SGLang" if each > 1 else ""
            yield f"{there.trainers} train, {who}, with {copies} copies of the model{over}"
        yield (
            f"completions of {self.assumed.length:,.0f} tokens, {self.assumed.source}; "
            f"{self.assumed.dead:.0%} of the groups dead"
        )
        yield from self.forecast.lines()
        yield "rewards are not counted: `covey preview` times them"
        yield f"micro-batches of {self.micro_tokens:,} tokens"


def plan(stage: Loaded, device: Device, assumption: Assumed, price: float, fleet: Fleet = ALONE) -> Plan:
    """What a run takes on so many devices; the model's weights are not loaded."""
    config, algorithm = stage.config, stage.algorithm
    source = load_problems(stage)
    shape, tied, prompts = _read(stage, source)
    shape = shape._replace(
        number=4 if device.compiled or config.dtype == "float32" else 2, exact=device.compiled
    )
    rollout, length = config.rollout, assumption.length
    load = Workload.of(config, algorithm, assumption.dead, length)
    copies, longest = fleet.copies(shape, device), max(prompts)
    slots = min(rollout.max_running, math.ceil(load.completions / copies[0]))
    kept = algorithm.needs_reference and config.lora is None
    largest = asked_of(config, prompts, (), algorithm.whole_groups)

    def expect(tokens: int) -> dict[str, int]:
        roles = forecast(shape, config, largest, tokens, reference=kept, program=PROGRAM)
        return fleet.split(roles, shape, device, slots, longest, rollout.max_tokens)

    asked = config.train.tokens_per_micro_batch
    tokens = planned_tokens(expect(asked), shape, config, largest, device.memory)
    if sum(expect(tokens).values()) > device.memory:
        tokens = asked  # nothing that is smaller helps
    job = StepWork(
        load.completions,
        load.trained,
        rollout.group_size,
        float(np.mean(prompts)),
        length,
        rollout.max_tokens,
        rollout.max_running,
        # Once more without a gradient: under a reference, or by the policy before its updates.
        algorithm.needs_reference + (not device.compiled and updates_of(config) > 1),
        config.train.recompute_layers,
        load.continued,
    )
    sampling, update = step_seconds(shape, tied, device, fleet, job, tokens)
    count, completions = evaluations_of(config, len(source.test))
    held_out = job._replace(completions=completions, group=config.eval.samples + 1, continued=NONE)
    every = len(source.train) * rollout.prepass
    measuring = job._replace(completions=every, group=rollout.prepass, continued=NONE)
    found = Forecast(
        rollout=sampling,
        update=update,
        evaluation=step_seconds(shape, tied, device, fleet, held_out, tokens)[0],
        steps=config.train.steps,
        evaluations=count,
        tokens=config.train.steps * load.tokens + every * length,
        prepass=step_seconds(shape, tied, device, fleet, measuring, tokens)[0] if every else 0.0,
        continued=config.train.steps * load.completions * load.continued.tokens,
        memory=expect(tokens),
        there=device.memory,
        price=price * fleet.devices,
        sync=fleet.sync(shape, device),
        ahead=rollout.staleness > 0 and fleet.samplers > 0,
    )
    return Plan(device, assumption, tokens, found, fleet, copies)


def _read(stage: Loaded, source: Source) -> tuple[Shape, bool, list[int]]:
    """The model's shape, whether its embeddings are tied, and the lengths of prompts in tokens."""
    config, first = stage.config, source.train[:READ]
    if isinstance(config.model, str) and (size := MODEL_SIZES.get(config.model)):
        return size.shape(config.lora), size.tied, [len(str(p.prompt)) // LETTERS + 1 for p in first]
    policy = skeleton(stage, texts_of(source, config))
    tied = bool(policy.model.config.tie_word_embeddings)
    return shape_of(policy), tied, [len(p.tokens) for p in encode(policy, first, config)]
