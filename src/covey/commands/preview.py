"""`covey preview`: measure some groups of a run, and time an update, without changing a weight.

The answer should come within about a minute, whatever the model's size. So the measured speed decides how
much is sampled: groups first, then an update, then experiments on the questions that the groups leave open.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from covey.commands.preview_experiments import (
    continue_truncated,
    reread_answers,
    time_rewards,
    time_update_within,
)
from covey.commands.preview_waves import Pilot, sample_at_temperature, sample_in_waves
from covey.config.load import ResolvedConfig
from covey.errors import Stopped
from covey.insight.answers import PromptForm
from covey.insight.gpus import Subject, memory_on_gpus
from covey.insight.preview import MANY_TRUNCATED, Preview
from covey.insight.preview_report import GROUPS
from covey.learner.memory import shape_of
from covey.learner.process import restore_process_settings
from covey.models.policy import Policy
from covey.models.template import template_facts
from covey.rng import key, permutation
from covey.rollouts.learned import reward_model_bytes
from covey.runs.reader import read_environment
from covey.sampling.prompts import EncodedProblem
from covey.sampling.tools.reader import reader_by
from covey.system.console import RunConsole
from covey.system.device import device_memory
from covey.system.signals import StopSignal
from covey.training.memory import critic_parameters
from covey.training.setup import scratch_run
from covey.training.stage_folders import folder_name
from covey_verify.errors import ConfigError

TOTAL_SECONDS = 60.0
"""Target duration, including loading."""
MIN_SECONDS_AFTER_LOADING = 30.0
GROUPS_FRACTION = 0.45
"""Fraction of the time after loading in which groups are sampled."""
UPDATE_FRACTION = 0.2
"""Fraction of the time in which an update is measured."""
CONTINUATION_FRACTION = 0.1
"""Fraction of the time in which truncated completions are continued."""
TEMPERATURES_FRACTION = 0.2
"""Fraction of the time in which other temperatures are tried."""
TEMPERATURES = (0.7, 1.0)
"""Temperatures to try if the config's temperature gives few live groups or few correct answers."""
FEW_CORRECT = 0.25
"""Pass rate below which other temperatures are tried."""
STOPPING = "stopping; the results so far will be shown. {} stops at once and shows nothing"
"""The answer to Ctrl-C. The name of a second Ctrl-C goes between the braces."""
SLOW_SAMPLES = 4
"""Completions of a problem if the model is slow."""
MIN_SAMPLES = 8
"""Completions of a problem if the run's groups are smaller than this."""
MAX_SAMPLES = 16
"""Completions of a problem if the run's groups are larger than this."""


@dataclass(frozen=True)
class Extent:
    """The amount of sampling."""

    samples: int | None = None
    """Completions of each problem; None: the group size, from 8 to 16, and fewer of a slow model."""
    groups: int | None = None
    """Number of problems, however long they take; None: as many as the time allows, at most ``GROUPS``."""
    temperatures: Sequence[float] | None = None
    """Further temperatures; None: ``TEMPERATURES`` where they may help."""


def rl_stage(resolved: ResolvedConfig) -> ResolvedConfig:
    """Return the first stage that samples, with the model of the stage before if that has ended.

    Raises ConfigError if no stage samples.
    """
    stages = resolved.stages()
    index = next((i for i, s in enumerate(stages) if s.config.method == "rl"), None)
    if index is None:
        raise ConfigError("method: supervised learning samples nothing, so there is nothing to preview")
    if not index:
        return stages[0]
    before = resolved.config.output / folder_name(index, stages[index - 1]) / "final"
    if not before.is_dir():
        resolved.notes.append(
            f"stage {index + 1} starts from the model of stage {index}, but {before} does not exist yet, so "
            f"{resolved.config.model} is previewed instead. Train stage {index} first, or name a model with "
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
        config = run.resolved.config
        memory = (read_environment(config.output) or {})["memory"]
        order = permutation(key(config.seed, "preview"), len(run.train_set))[: extent.groups or GROUPS]
        problems = [run.train_set[i] for i in order]
        subject = Subject(
            shape_of(run.learner.network.unsharded),
            [len(p.tokens) for p in problems],
            critic_parameters(run),
            reward_model_bytes(run.rewards),
        )
        pilot = Pilot(run, problems)
        # The time of loading counts, so that the answer is there when it was promised.
        elapsed = time.monotonic() - start
        budget = max(MIN_SECONDS_AFTER_LOADING, TOTAL_SECONDS - elapsed)
        seconds = None if extent.groups else GROUPS_FRACTION * budget
        try:
            with stop.listening(lambda again: console.answer(STOPPING.format(again))):
                first_look = Preview(
                    stage,
                    sample_in_waves(pilot, _group_sizes(extent, config.rollout.group_size), seconds),
                    memory,
                    device_memory(run.learner.network.device),
                    held_out=len(run.test_set),
                    problems=len(run.train_set),
                    gpus=memory_on_gpus(subject, stage),
                    wording=prompt_form(run.learner.network, stage, problems),
                )
                if first_look.samples.stopped:
                    return first_look
                return _with_experiments(pilot, extent, first_look, budget)
        finally:
            console.end()


def _group_sizes(extent: Extent, size: int) -> range:
    """Return the numbers of completions that a problem may get."""
    if extent.samples is not None:
        return range(extent.samples, extent.samples + 1)
    most_samples = min(MAX_SAMPLES, max(MIN_SAMPLES, size))
    return range(most_samples if extent.groups else SLOW_SAMPLES, most_samples + 1)


def _with_experiments(pilot: Pilot, extent: Extent, preview: Preview, budget: float) -> Preview:
    """Return the preview with the results of further experiments; after a stop, of the completed ones."""
    latest = preview
    try:
        for extended in _experiments(pilot, extent, preview, budget):
            latest = extended
    except Stopped:
        return replace(latest, samples=replace(latest.samples, stopped=True))
    return latest


def _experiments(pilot: Pilot, extent: Extent, preview: Preview, budget: float) -> Iterator[Preview]:
    """Make one experiment after another. After each of them, yield the preview with all results so far."""
    samples = preview.samples
    reward_seconds = time_rewards(pilot, samples.groups)
    update, continuation = time_update_within(pilot, samples, UPDATE_FRACTION * budget)
    timed = replace(preview, reward_seconds=reward_seconds, update=update, continuation=continuation)
    yield timed
    extended = replace(timed, readings=reread_answers(pilot, samples, reward_seconds))
    yield extended
    if extended.unfinished:
        return
    if float(extended.truncated.mean()) > MANY_TRUNCATED and samples.limit is None:
        longer = continue_truncated(pilot, samples, CONTINUATION_FRACTION * budget)
        extended = replace(extended, longer=longer)
        yield extended
    groups_by_temperature = dict(extended.others)
    for temperature, seconds in _temperatures(extent, extended, budget):
        groups = sample_at_temperature(pilot, samples, temperature, seconds)
        if groups:
            groups_by_temperature[temperature] = groups
            yield replace(extended, others=dict(groups_by_temperature))


def _temperatures(extent: Extent, look: Preview, budget: float) -> list[tuple[float, float | None]]:
    """Return further temperatures, each with the seconds to sample at it; None: no limit."""
    if extent.temperatures is not None:
        seconds = None if extent.groups else TEMPERATURES_FRACTION * budget
        return [(temperature, seconds) for temperature in extent.temperatures]
    if look.promise == "yes" and look.pass_rate().value >= FEW_CORRECT:
        return []
    configured = look.stage.config.rollout.temperature
    others = [temperature for temperature in TEMPERATURES if abs(temperature - configured) > 0.05]
    return [(temperature, TEMPERATURES_FRACTION * budget / len(others)) for temperature in others]


def prompt_form(policy: Policy, stage: ResolvedConfig, problems: Sequence[EncodedProblem]) -> PromptForm:
    """Return the form of a run's prompts, read from the prompts of some of its problems."""
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
