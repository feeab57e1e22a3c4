"""`covey preview`: measure some groups of a run, and time an update, without changing a weight.

An answer should be there in about a minute, whatever the model's size. So the measured speed decides how much
is sampled: groups first, then an update, then what these groups leave open.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from covey.commands.preview_sampling import (
    Pilot,
    at_temperature,
    continued,
    read_otherwise,
    sampled,
    with_times,
)
from covey.config.load import ResolvedConfig
from covey.errors import Stopped
from covey.insight.answers import PromptForm
from covey.insight.gpus import Subject
from covey.insight.preview import MANY_TRUNCATED, Preview
from covey.insight.preview_report import GROUPS
from covey.learner.memory import shape_of
from covey.learner.process import restore_process_settings
from covey.models.load import device_memory
from covey.models.policy import Policy
from covey.models.template import template_facts
from covey.rng import key, permutation
from covey.runs.reader import read_environment
from covey.sampling.prompts import Prompted
from covey.sampling.tools.reader import reader_by
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.setup import scratch_run
from covey_verify.errors import ConfigError

SECONDS, LEAST = 60.0, 30.0
"""Seconds of a preview that chooses how much it samples, and those that at least follow the loading."""
SAMPLING, UPDATE, LONGER, ELSEWHERE = 0.45, 0.2, 0.1, 0.2
"""Fractions of these seconds: groups, an update, truncated completions continued, other temperatures."""
TEMPERATURES = (0.7, 1.0)
"""Temperatures that are tried where the config's gives few live groups or few correct answers."""
FEW_CORRECT = 0.25
STOPPING = "stopping; the results so far will be shown. {} stops at once and shows nothing"
"""The answer to Ctrl-C; its place is that of the second signal's name."""
SLOW_SAMPLES, FEWEST_SAMPLES, MOST_SAMPLES = 4, 8, 16
"""Completions of a problem: of a slow model, and for small and for large groups."""


@dataclass(frozen=True)
class Extent:
    """The amount of sampling."""

    samples: int | None = None
    """Completions of each problem; None: the group size, from 8 to 16, and fewer of a slow model."""
    groups: int | None = None
    """Number of problems, however long they take; None: as many as the time allows, at most ``GROUPS``."""
    temperatures: Sequence[float] | None = None
    """Further temperatures; None: ``TEMPERATURES`` where they may help."""


def rl_stage(loaded: ResolvedConfig) -> ResolvedConfig:
    """Return the first stage that samples, with the model of the stage before if that has ended.

    Raises ConfigError if no stage samples.
    """
    stages = loaded.stages()
    index = next((i for i, s in enumerate(stages) if s.config.method == "rl"), None)
    if index is None:
        raise ConfigError("method: supervised learning samples nothing, so there is nothing to preview")
    if not index:
        return stages[0]
    before = loaded.config.output / f"{index}-{stages[index - 1].config.method}" / "final"
    if not before.is_dir():
        loaded.notes.append(
            f"stage {index + 1} starts from the model of stage {index}, but {before} does not exist yet, so "
            f"{loaded.config.model} is previewed instead. Train stage {index} first, or name a model with "
            "--model"
        )
        return stages[index]
    config = stages[index].config.model_copy(update={"model": str(before.resolve())})
    return replace(stages[index], config=config)


def preview(stage: ResolvedConfig, console: RunConsole, stop: StopSignal, extent: Extent) -> Preview:
    """Sample some problems and time an update; after a stop keep what there is.

    Raises Stopped if no group was complete.
    """
    start = time.monotonic()
    with restore_process_settings(), scratch_run(stage, console, stop) as run:
        config = run.loaded.config
        memory = (read_environment(config.output) or {})["memory"]
        order = permutation(key(config.seed, "preview"), len(run.train_set))[: extent.groups or GROUPS]
        problems = [run.train_set[i] for i in order]
        shape = shape_of(run.learner.policy.unsharded)
        pilot = Pilot(run, problems)
        # The time of loading counts, so that the answer is there when it was promised.
        budget = max(LEAST, SECONDS - (time.monotonic() - start))
        seconds = None if extent.groups else SAMPLING * budget
        try:
            with stop.listening(lambda again: console.answer(STOPPING.format(again))):
                first_look = Preview(
                    stage,
                    sampled(pilot, _samples(extent, config.rollout.group_size), seconds),
                    memory,
                    device_memory(run.learner.policy.device),
                    held_out=len(run.test_set),
                    problems=len(run.train_set),
                    subject=Subject(shape, [len(p.tokens) for p in problems]),
                    wording=prompt_form(run.learner.policy, stage, problems),
                )
                if first_look.measured.stopped:
                    return first_look
                return _closely(pilot, extent, first_look, budget)
        finally:
            console.end()


def _samples(extent: Extent, size: int) -> range:
    """Return the numbers of completions that a problem may get."""
    if extent.samples is not None:
        return range(extent.samples, extent.samples + 1)
    most = min(MOST_SAMPLES, max(FEWEST_SAMPLES, size))
    return range(most if extent.groups else SLOW_SAMPLES, most + 1)


def _closely(pilot: Pilot, extent: Extent, look: Preview, budget: float) -> Preview:
    """Time an update, and look at what the groups leave open; a stop keeps what there is by then."""
    with suppress(Stopped):
        look = replace(look, measured=with_times(pilot, look.measured, UPDATE * budget))
        look = replace(look, readings=read_otherwise(pilot, look.measured))
        if look.unfinished:
            return look
        if float(look.truncated.mean()) > MANY_TRUNCATED and look.measured.limit is None:
            look = replace(look, longer=continued(pilot, look.measured, LONGER * budget))
        for temperature, seconds in _temperatures(extent, look, budget):
            groups = at_temperature(pilot, look.measured, temperature, seconds)
            look = replace(look, others={**look.others, temperature: groups} if groups else look.others)
        return look
    return replace(look, measured=replace(look.measured, stopped=True))


def _temperatures(extent: Extent, look: Preview, budget: float) -> list[tuple[float, float | None]]:
    """Return the other temperatures to sample at, each with its seconds; None: as many as it takes."""
    if extent.temperatures is not None:
        seconds = None if extent.groups else ELSEWHERE * budget
        return [(temperature, seconds) for temperature in extent.temperatures]
    if look.promise == "yes" and look.pass_rate().value >= FEW_CORRECT:
        return []
    configured = look.stage.config.rollout.temperature
    others = [temperature for temperature in TEMPERATURES if abs(temperature - configured) > 0.05]
    return [(temperature, ELSEWHERE * budget / len(others)) for temperature in others]


def prompt_form(policy: Policy, stage: ResolvedConfig, problems: Sequence[Prompted]) -> PromptForm:
    """Return how a run's prompts speak to its model, by those of some problems."""
    problem = problems[0].problem
    facts = template_facts(policy.tokenizer, problem.template)
    added = policy.tokenizer.added_tokens_decoder
    specials = [token.content for n, token in added.items() if token.special and n not in policy.end_ids]
    return PromptForm(
        problem.chat,
        bool(policy.tokenizer.chat_template),
        problem.thoughts,
        facts.unopened if problem.chat else "",
        specials,
        stage.config.data.train is not None,
        reader_by(policy),
    )
