"""`covey preview`: measure some groups of a run, and time an update, without changing a weight."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from covey.config.contradictions import updates_of
from covey.config.load import Loaded
from covey.errors import Stopped
from covey.insight.gpus import Subject
from covey.insight.preview import Measured, Preview
from covey.learner.batching import with_signal
from covey.learner.learner import Learner
from covey.learner.memory import shape_of
from covey.learner.objectives import PolicyObjective
from covey.learner.old_logprobs import old_logprob_source
from covey.learner.process import caller_restored
from covey.models.load import device_memory
from covey.models.policy import Policy
from covey.models.value_head import ValueModel
from covey.objective.controllers import first_coefficients
from covey.rewards.groups import credited
from covey.rewards.scorer import GroupScoring, Rewards, Scorer
from covey.rng import key, permutation
from covey.rollouts.draw import sampling_params
from covey.rollouts.groups import Progress, score_all, score_each
from covey.rollouts.segments import Cut, cutting_of, with_segments
from covey.runs.reader import read_environment
from covey.sampling.base import Sampler
from covey.sampling.prompts import Prompted
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.rl import prepare, updates
from covey.training.setup import set_up
from covey.types import Group
from covey_verify.errors import ConfigError

TIMED = 16
"""Number of completions on which each reward is timed alone."""


def rl_stage(loaded: Loaded) -> Loaded:
    """Return the first stage that samples, with the model of the stage before if that has ended.

    Raises ConfigError if no stage samples.
    """
    stages = loaded.stages()
    place = next((i for i, s in enumerate(stages) if s.config.method == "rl"), None)
    if place is None:
        raise ConfigError("method: supervised learning samples nothing, so there is nothing to preview")
    if not place:
        return stages[0]
    left = loaded.config.output / f"{place}-{stages[place - 1].config.method}" / "final"
    if not left.is_dir():
        loaded.notes.append(
            f"stage {place + 1} begins with the model of stage {place}, and {left} is not there yet: "
            f"this is {loaded.config.model}. Train stage {place} first, or name a model with --model"
        )
        return stages[place]
    config = stages[place].config.model_copy(update={"model": str(left.resolve())})
    return replace(stages[place], config=config)


def preview(
    stage: Loaded,
    console: RunConsole,
    stop: StopSignal,
    groups: int,
    samples: int,
    temperatures: Sequence[float] = (),
) -> Preview:
    """Sample ``groups`` problems ``samples`` times each and time an update; after a stop keep what there is.

    The same problems are sampled again at further ``temperatures``. Raises Stopped if no group was complete.
    """
    with tempfile.TemporaryDirectory() as folder, caller_restored():
        config = stage.config.model_copy(update={"output": Path(folder) / "preview", "tracker": None})
        run = set_up(replace(stage, config=config), console, stop)
        try:
            memory = (read_environment(config.output) or {})["memory"]
            order = permutation(key(config.seed, "preview"), len(run.train_set))[:groups]
            problems = [run.train_set[i] for i in order]
            parts = Parts(stage, run.learner, run.critic, run.sampler, run.rewards, problems, run.on_sample)
            console.begin("preview", len(problems) * samples, by_completion=True)
            answer = "stopping now; what was sampled so far is shown. {} stops at once, without it"
            with stop.listening(lambda again: console.answer(answer.format(again))):
                result, others = _measured(parts, samples, temperatures, console)
            there = device_memory(run.learner.policy.device)
            subject = Subject(shape_of(run.learner.policy.whole), [len(p.tokens) for p in problems])
            held_out = len(run.test_set)
            problems_there = len(run.train_set)
            return Preview(stage, result, memory, there, held_out, problems_there, others, subject)
        finally:
            console.end()
            run.journal.folder.close()


def _measured(
    parts: Parts, samples: int, temperatures: Sequence[float], console: RunConsole
) -> tuple[Measured, dict[float, Sequence[Group]]]:
    """Return what was measured, and the groups at other temperatures; after a stop what there is."""
    rollout = parts.stage.config.rollout
    others: dict[float, Sequence[Group]] = {}
    result = _sampled(parts, samples, rollout.temperature)
    try:
        if not result.stopped:
            console.doing("timing rewards and an update")
            result = replace(result, reward_seconds=_rewards_timed(parts.rewards, result.groups))
            # As many groups as a step has, live ones first: dead ones cost an update nothing.
            few = sorted(result.groups, key=lambda g: g.dead)[: rollout.prompts_per_step]
            valued, result = _continued(parts, few, result)
            prepared, updating, share = _update_timed(parts, valued)
            result = replace(result, prepare=prepared, update=updating, update_tokens=share)
        for temperature in () if result.stopped else temperatures:
            other = _sampled(parts, samples, temperature)
            others[temperature] = other.groups
            if other.stopped:
                break
    except Stopped:
        result = replace(result, stopped=True)
    return result, others


@dataclass(frozen=True)
class Parts:
    """The parts of a run that are measured."""

    stage: Loaded
    learner: Learner[Policy]
    critic: Learner[ValueModel] | None
    sampler: Sampler
    rewards: Rewards
    problems: Sequence[Prompted]
    progress: Progress


def _sampled(parts: Parts, samples: int, temperature: float) -> Measured:
    config, problems = parts.stage.config, parts.problems
    whole = list[GroupScoring]()
    stopped = False
    requests = [
        p.request([key(config.seed, "preview", p.problem.id, s) for s in range(samples)]) for p in problems
    ]
    scorer = Scorer(parts.rewards)
    params = replace(sampling_params(config.rollout), temperature=temperature)
    warm = [problems[0].request(requests[0].streams[:1])]
    list(parts.sampler.sample(warm, replace(params, max_tokens=2)))  # what is compiled or allocated only once
    begun = time.monotonic()

    try:
        for _, group in score_each(problems, requests, parts.sampler, params, scorer, parts.progress):
            whole.append(group)
    except Stopped:
        if not whole:
            raise
        stopped = True
    found = [credited(group.result(), parts.stage.algorithm.credit) for group in whole]
    return Measured(found, time.monotonic() - begun, len(problems), scorer.stats, stopped)


def _rewards_timed(rewards: Rewards, groups: Sequence[Group]) -> dict[str, float]:
    """Return each reward's seconds per completion, called one after another."""
    chosen = [(g.problem, c.text) for g in groups for c in g.completions[:1]][:TIMED]
    scorer = Scorer(rewards)
    found = {}
    for reward in rewards:
        begun = time.monotonic()
        for problem, text in chosen:
            scorer.score(reward, problem, text)
        found[reward.name] = (time.monotonic() - begun) / len(chosen)
    return found


def _continued(parts: Parts, groups: Sequence[Group], found: Measured) -> tuple[Sequence[Group], Measured]:
    """Return groups with the values of their segments, if the algorithm needs them, and the cost of these."""
    config = parts.stage.config
    settings = cutting_of(parts.stage.algorithm)
    if settings is None:
        return groups, found

    def stream(cut: Cut, number: int) -> int:
        name = groups[cut.group].problem.id
        return key(config.seed, "preview", name, cut.sample, "continue", cut.end, number)

    params = sampling_params(config.rollout)
    scorer = Scorer(parts.rewards)
    begun = time.monotonic()
    score = partial(score_all, scorer=scorer, progress=lambda *_: None)
    cut, tokens = with_segments(groups, settings, parts.sampler, params, parts.rewards.decode, stream, score)
    count = sum(len(g.completions) for g in cut)
    took = (time.monotonic() - begun) / count
    return cut, replace(found, continued=tokens / count, continuing=took)


def _update_timed(parts: Parts, groups: Sequence[Group]) -> tuple[float, float, int]:
    """Return the seconds to prepare a batch and to compute its gradient, and the number of its tokens."""
    config = parts.stage.config
    algorithm = parts.stage.algorithm
    learner = parts.learner
    old = old_logprob_source(algorithm, parts.sampler, updates_of(config))
    now = first_coefficients(algorithm)
    objective = PolicyObjective(algorithm, config.rollout.temperature, config.rollout.max_tokens, now)
    prepare_batch = partial(
        prepare, learner=learner, algorithm=algorithm, config=config, old=old, critic=parts.critic
    )

    def add_gradient(chosen: Sequence[Group]) -> tuple[float, float, int]:
        begun = time.monotonic()
        batch = with_signal(prepare_batch(chosen, coefficients=now))
        _wait(learner.policy.device)
        prepared = time.monotonic() - begun
        tokens = 0
        for minibatch in updates(batch, algorithm, config, old, step=0):
            learner.forward_backward(minibatch, objective)
            # Completions without an advantage may be skipped by the learner: they take no time.
            busy = minibatch.advantages.any(-1) if objective.skips_idle else minibatch.mask.any(-1)
            tokens += int(minibatch.mask[busy].sum())
            learner.clear()
        _wait(learner.policy.device)
        return prepared, time.monotonic() - begun - prepared, tokens

    add_gradient(groups[:1])  # what is compiled or allocated only once
    return add_gradient(groups)


# GPU kernels run asynchronously: wait for them before the clock is read.
def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
