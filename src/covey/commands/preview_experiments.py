"""Experiments of a preview with the groups that it sampled: times, continuations, answers read again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from covey.commands.preview_waves import Pilot, sampled_tokens
from covey.insight.answers import AnswerVariant, Readings, answer_forms
from covey.insight.preview import NO_CONTINUATION, ContinuationCost, Longer, SampledGroups, UpdateTiming
from covey.learner.batching import with_signal
from covey.learner.objectives import PolicyObjective
from covey.learner.old_logprobs import old_logprob_source
from covey.objective.controllers import first_coefficients
from covey.rewards.scorer import Scorer
from covey.rng import key
from covey.rollouts.groups import sampling_params, score_all
from covey.rollouts.segments import Cut, PrefixSampler, SegmentSettings, with_segments
from covey.sampling.base import Request
from covey.training.rl import prepare, step_minibatches
from covey.types import Completion, Group, Problem

T = TypeVar("T")
TIMED_COMPLETIONS = 16
"""Number of completions on which each reward is timed alone."""
MAX_CONTINUED = 16
"""Truncated completions that are continued, at most."""
MIN_CONTINUED = 4
MAX_REREAD = 48
"""Most completions whose answers the verdict gets in other forms."""
SLOW_VERDICT_SECONDS = 0.02
"""Seconds per completion beyond which a verdict does not get them."""


def time_rewards(pilot: Pilot, groups: Sequence[Group]) -> dict[str, float]:
    """Return each reward's seconds per completion, called one after another."""
    pilot.begin("timing rewards")
    timed = [(g.problem, c.text) for g in groups for c in g.completions[:1]][:TIMED_COMPLETIONS]
    scorer = Scorer(pilot.run.rewards)
    seconds = {}
    for reward in pilot.run.rewards:
        start = time.monotonic()
        for problem, text in timed:
            scorer.score(reward, problem, text)
        seconds[reward.name] = (time.monotonic() - start) / len(timed)
    return seconds


def time_update_within(
    pilot: Pilot, samples: SampledGroups, seconds: float
) -> tuple[UpdateTiming, ContinuationCost]:
    """Time an update, and the continuations before it, on as many completions as fit into ``seconds``."""
    pilot.begin("timing an update")
    # As many groups as a step has, live ones first: dead ones cost an update nothing.
    few = sorted(samples.groups, key=lambda g: g.dead)[: pilot.config.rollout.prompts_per_step]
    pair, _ = with_continuations(pilot, [_part(min(few, key=_tokens), 2)])
    start = time.monotonic()
    timing = time_update(pilot, pair)
    # The first update may include work that is done only once, such as compilation.
    if time.monotonic() - start < seconds / 4:
        timing = time_update(pilot, pair)
    # Groups and, where not even one fits, some of its completions.
    room = seconds * timing.update_tokens / max(timing.prepare_seconds + timing.update_seconds, 1e-9)
    ends = np.cumsum([_tokens(g) for g in few])
    fitting = few[: int((ends <= room).sum())]
    if not fitting:
        fitting = [_part(few[0], max(2, int(len(few[0].completions) * room / ends[0])))]
    complete, cost = with_continuations(pilot, fitting)
    return time_update(pilot, complete), cost


def time_update(pilot: Pilot, groups: Sequence[Group]) -> UpdateTiming:
    """Time the preparation of a batch and the gradients of its minibatches.

    Of a group that trains nothing no token is counted; of the others the prompt, once.
    """
    config = pilot.config
    algorithm = pilot.run.resolved.algorithm
    learner = pilot.run.learner
    old = old_logprob_source(algorithm, pilot.run.sampler, config.train.updates_per_rollout_batch)
    objective = PolicyObjective.of(algorithm, config.rollout, first_coefficients(algorithm))
    start = time.monotonic()
    batch = with_signal(prepare(pilot.run, groups, old))
    _wait(learner.network.device)
    prepare_seconds = time.monotonic() - start
    tokens = 0
    for minibatch in step_minibatches(batch, pilot.run.resolved, old, step=0):
        learner.forward_backward(minibatch, objective)
        # Completions without an advantage may be skipped by the learner: they take no time.
        busy = minibatch.has_gradient(algorithm.skips_idle)
        prompts = {id(p): len(p) for p, trained in zip(minibatch.prompts, busy, strict=True) if trained}
        tokens += int(minibatch.mask[busy].sum()) + sum(prompts.values())
        learner.clear()
    _wait(learner.network.device)
    return UpdateTiming(prepare_seconds, time.monotonic() - start - prepare_seconds, tokens)


def with_continuations(pilot: Pilot, groups: Sequence[Group]) -> tuple[Sequence[Group], ContinuationCost]:
    """Return groups with the values of their segments, if the algorithm needs them, and the cost of these."""
    config = pilot.config
    settings = SegmentSettings.of(pilot.run.resolved.algorithm)
    if settings is None:
        return groups, NO_CONTINUATION

    def stream(cut: Cut, number: int) -> int:
        name = groups[cut.group].problem.id
        return key(config.seed, "preview", name, cut.sample, "continue", cut.end, number)

    params = sampling_params(config.rollout)
    scorer = Scorer(pilot.run.rewards)
    start = time.monotonic()
    score = partial(score_all, scorer=scorer, progress=lambda *_: None)
    cut, tokens = with_segments(
        groups, settings, pilot.run.sampler, params, pilot.run.rewards.reader.decode, stream, score
    )
    count = sum(len(g.completions) for g in cut)
    return cut, ContinuationCost(tokens / count, (time.monotonic() - start) / count)


def _tokens(group: Group) -> int:
    """Count the tokens of a group that go through the model, its prompt once."""
    return len(group.prompt) + sum(len(c.tokens) for c in group.completions)


def _part(group: Group, count: int) -> Group:
    """Return the first ``count`` completions of a group."""
    parts = {
        name: replace(c, values=c.values[:count], scores=c.scores[:count], steps=c.steps[:count])
        for name, c in group.components.items()
    }
    return replace(
        group, completions=group.completions[:count], rewards=group.rewards[:count], components=parts
    )


def reread_answers(
    pilot: Pilot, samples: SampledGroups, reward_seconds: Mapping[str, float]
) -> Readings | None:
    """Give the verdict the answers of completions that it rejects in other forms.

    None if it is slow, or reads more than a text.
    """
    verdict = pilot.run.rewards.verdict
    slow = reward_seconds.get(verdict.name, 0.0) > SLOW_VERDICT_SECONDS
    if slow or pilot.config.rollout.tools is not None:
        return None
    rejected = [
        (g.problem, c)
        for g in samples.groups
        for c, ok in zip(g.completions, g.correct, strict=True)
        if not ok
    ]
    rejected = _spread(rejected, MAX_REREAD)
    scorer = Scorer(pilot.run.rewards)

    def paid(problem: Problem, completion: Completion) -> AnswerVariant | None:
        for variant in answer_forms(completion.text, problem.thoughts):
            if (scorer.score(verdict, problem, variant.text).value or 0.0) > 0.5:
                return variant
        return None

    pairs = [(c.text, paid(problem, c)) for problem, c in rejected]
    # By chance: the answers of one problem, for the next one.
    others = [problem for problem, _ in rejected[1:] + rejected[:1]]
    apart = [(o, c) for o, (p, c) in zip(others, rejected, strict=True) if o.columns != p.columns]
    return Readings(
        len(rejected),
        [(text, variant) for text, variant in pairs if variant is not None],
        sum(paid(o, c) is not None for o, c in apart),
        verdict.name,
        "rule" in verdict.parameters and verdict.ours,
    )


def continue_truncated(pilot: Pilot, samples: SampledGroups, seconds: float) -> Longer | None:
    """Continue some truncated completions to twice their tokens and score them again.

    None if tools answer in between, or if there is no time or context for a quarter more tokens.
    """
    config = pilot.config
    limit = config.rollout.max_tokens
    # As many tokens as fit, at the pace of the groups.
    room = seconds / (samples.seconds / max(sampled_tokens(samples.groups), 1))
    truncated = _some_truncated(samples.groups, most=max(MIN_CONTINUED, int(room / limit)))
    longest = max(len(group.prompt) for group, _ in truncated) + limit
    more = min(limit, int(room / len(truncated)), pilot.run.learner.network.context - longest)
    if more < limit / 4 or config.rollout.tools is not None:
        return None
    pilot.begin(f"continuing {len(truncated)} truncated completions to {limit + more} tokens", len(truncated))
    groups = _continue(pilot, truncated, more)
    rewards = np.array([group.rewards[sample] for group, sample in truncated])
    return Longer(groups, limit + more, rewards)


def _continue(pilot: Pilot, truncated: Sequence[tuple[Group, int]], more: int) -> list[Group]:
    """Sample up to ``more`` tokens after each truncated completion; score what it has become."""
    config = pilot.config
    requests = []
    prefixes = {}  # the key of a request's draws -> the completion that it continues, and its last token
    for group, sample in truncated:
        completion = group.completions[sample]
        stream = key(config.seed, "preview", group.problem.id, sample)
        prompt = np.concatenate([group.prompt, completion.tokens])
        requests.append(Request(prompt, [stream], len(completion.tokens), problem=group.problem))
        prefixes[stream] = (completion, len(completion.tokens) - 1)
    params = replace(sampling_params(config.rollout), max_tokens=more)
    sampler = PrefixSampler(pilot.run.sampler, prefixes, pilot.run.rewards.reader.decode)
    return score_all(requests, sampler, params, Scorer(pilot.run.rewards), pilot.run.monitor.on_sample)


def _some_truncated(groups: Sequence[Group], most: int) -> list[tuple[Group, int]]:
    """Return about ``most`` truncated completions, at equal distances: their groups and numbers."""
    truncated = [
        (group, sample)
        for group in groups
        for sample, completion in enumerate(group.completions)
        if completion.finish == "length"
    ]
    truncated = _spread(truncated, MAX_CONTINUED)
    return truncated[:: max(1, len(truncated) // most)]


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` items, at equal distances."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(most, len(items))).astype(int)]


# GPU kernels run asynchronously: wait for them before the clock is read.
def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
