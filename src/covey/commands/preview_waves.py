"""Groups that a preview samples in waves; each stays within its seconds at the measured speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from covey.config.schema import Config
from covey.errors import Stopped
from covey.insight.forecast import pace_at, sampled_at_once
from covey.insight.preview import SampledGroups
from covey.rewards.groups import with_credit
from covey.rewards.scorer import Scorer
from covey.rng import key
from covey.rollouts.groups import GroupRequest, GroupSampler, sampling_params
from covey.sampling.base import Request
from covey.sampling.prompts import EncodedProblem
from covey.training.run import Run
from covey.types import Group

FIRST_WAVE_PROBLEMS = 2
MIN_COMPLETION = 16
"""Tokens of a completion that are sampled however slow the model is."""
MAX_SLOWDOWN = 2.0
"""Times that the first wave may take its seconds if all completions have the full length."""
NEARLY_FULL_FRACTION = 0.75
"""Fraction of the tokens of a completion that fit, from which on all of them are waited for."""
SPEED_TOKENS = 8
"""Tokens by which the speed is measured before the first wave."""
SLOW_SECONDS = 4.0
"""Seconds of two tokens, after which the speed is known well enough."""


@dataclass(frozen=True)
class Pilot:
    """The parts of a run that are measured."""

    run: Run
    problems: Sequence[EncodedProblem]

    @property
    def config(self) -> Config:
        """The run's config."""
        return self.run.resolved.config

    def begin(self, what: str, completions: int = 0) -> None:
        """Show the work that begins, whose progress counts ``completions``."""
        console = self.run.journal.console
        console.end()
        console.begin("preview", completions, by_completion=True)
        console.loading(what)


class Wave(NamedTuple):
    """Groups that were sampled together."""

    groups: list[Group]
    width: int
    """Number of completions at once."""
    seconds: float
    stop: Stopped | None = None
    """The stop that ended it before its last group."""


def sample_in_waves(pilot: Pilot, group_sizes: range, seconds: float | None) -> SampledGroups:
    """Sample each problem, in waves that fit into ``seconds``; None: all problems, however long they take.

    ``group_sizes`` are the numbers of completions that a problem may get: fewer where the model is slow, and
    then shorter ones. After a stop the complete groups are kept. Raises Stopped if there is none.
    """
    count = len(pilot.problems)
    step = _seconds_of_step(pilot, group_sizes[-1])
    rollout = pilot.config.rollout
    width = sampled_at_once(pilot.config, rollout.completions_per_step)
    group_size = group_sizes[-1]
    limit = rollout.max_tokens
    # Without a limit, as many completions as a step samples, to learn its speed, and then the rest.
    size = min(max(1, width // group_size), count)
    if seconds is not None:
        size = min(FIRST_WAVE_PROBLEMS, count)
        group_size, limit = _fit_samples(group_sizes, limit, MAX_SLOWDOWN * seconds / (step * size))
    scorer = Scorer(pilot.run.rewards)
    sample_wave = partial(_sample_wave, pilot, group_size=group_size, limit=limit, scorer=scorer)
    waves = _sample_waves(sample_wave, pilot.problems, size, seconds)
    groups = [group for wave in waves for group in wave.groups]
    paces = _paces(waves)
    return SampledGroups(
        groups,
        pace_at(paces, width) * max(sampled_tokens(groups), 1),
        count,
        scorer.stats,
        waves[-1].stop is not None,
        paces=paces,
        limit=limit if limit < rollout.max_tokens else None,
        by_time=seconds is not None,
    )


def _sample_waves(
    sample_wave: Callable[[Sequence[EncodedProblem]], Wave],
    problems: Sequence[EncodedProblem],
    size: int,
    seconds: float | None,
) -> list[Wave]:
    """Sample the first ``size`` problems, and then as many as fit into ``seconds``, or all others."""
    waves = list[Wave]()
    waiting = list(problems)
    while size:
        wave = sample_wave(waiting[:size])
        if wave.stop and not (waves or wave.groups):
            raise wave.stop
        waves.append(wave)
        waiting = waiting[size:]
        if wave.stop:
            break
        fits = len(waiting)
        if seconds is not None:
            # Each wave is twice as large as the one before, if that fits into the time that is left.
            fits = min(2 * size, int((seconds - sum(w.seconds for w in waves)) * size / wave.seconds))
        size = max(0, min(fits, len(waiting)))
    return waves


def _paces(waves: Sequence[Wave]) -> dict[int, float]:
    """Return the seconds per token by the number of completions at once; of equal waves the fastest counts.

    A wave that was stopped counts only if there is no other.
    """
    complete = [w for w in waves if w.stop is None] or waves
    paces = dict[int, float]()
    for wave in complete:
        pace = wave.seconds / max(sampled_tokens(wave.groups), 1)
        paces[wave.width] = min(pace, paces.get(wave.width, pace))
    return paces


def _fit_samples(group_sizes: range, limit: int, room: float) -> tuple[int, int]:
    """Return how many completions of a problem, and of how many tokens, fit.

    ``room`` is the number of tokens of a problem's completions that fit into the time of a wave; the time of
    a token grows with the number of completions.
    """
    fits = room * group_sizes[-1] / limit
    count = max(group_sizes[0], min(group_sizes[-1], int(fits)))
    if fits < NEARLY_FULL_FRACTION * count:
        limit = min(limit, max(MIN_COMPLETION, int(limit * fits / count)))
    return count, limit


def _sample_wave(
    pilot: Pilot, problems: Sequence[EncodedProblem], group_size: int, limit: int, scorer: Scorer
) -> Wave:
    """Sample some problems; after a stop the complete groups are kept."""
    pilot.begin(
        f"sampling {_problem_count(len(problems))}, {group_size} completions each", len(problems) * group_size
    )
    temperature = pilot.config.rollout.temperature
    width = sampled_at_once(pilot.config, len(problems) * group_size)
    groups = list[Group]()
    start = time.monotonic()
    try:
        for group in _draw_groups(pilot, problems, group_size, temperature, limit, scorer):
            groups.append(group)
    except Stopped as stop:
        return Wave(groups, width, time.monotonic() - start, stop)
    return Wave(groups, width, time.monotonic() - start)


def sampled_tokens(groups: Sequence[Group]) -> int:
    """Return the number of tokens that were sampled."""
    return sum(len(c.tokens) for g in groups for c in g.completions)


def _problem_count(count: int) -> str:
    return f"{count} problem{'s' if count > 1 else ''}"


def _seconds_of_step(pilot: Pilot, group_size: int) -> float:
    """Return the seconds of a token of ``group_size`` completions, without work that is done only once."""
    pilot.begin("measuring the speed", group_size)
    per_token = 0.0
    for tokens in (2, SPEED_TOKENS):
        start = time.monotonic()
        params = replace(sampling_params(pilot.config.rollout), max_tokens=tokens)
        list(pilot.run.sampler.sample([_request(pilot, pilot.problems[0], group_size)], params))
        per_token = (time.monotonic() - start) / tokens
        if 2 * per_token > SLOW_SECONDS:
            break
    return per_token


def _request(pilot: Pilot, problem: EncodedProblem, group_size: int) -> Request:
    name = problem.problem.id
    return problem.request([key(pilot.config.seed, "preview", name, s) for s in range(group_size)])


def _draw_groups(
    pilot: Pilot,
    problems: Sequence[EncodedProblem],
    group_size: int,
    temperature: float,
    limit: int,
    scorer: Scorer,
) -> Iterator[Group]:
    """Yield the groups of problems in the order in which they are complete."""
    params = replace(sampling_params(pilot.config.rollout), temperature=temperature, max_tokens=limit)
    requests = [GroupRequest(_request(pilot, p, group_size), scorer) for p in problems]
    for _, pending in GroupSampler(pilot.run.sampler, params)(requests, pilot.run.monitor.on_sample):
        yield with_credit(pending.scoring.result(), pilot.run.resolved.algorithm.credit)


def sample_at_temperature(
    pilot: Pilot, samples: SampledGroups, temperature: float, seconds: float | None
) -> Sequence[Group]:
    """Sample the same problems again at another temperature: as many as fit into ``seconds``, at least two.

    Empty if not even two fit, or after a stop.
    """
    order = {g.problem.id: n for n, g in enumerate(samples.groups)}
    problems = sorted((p for p in pilot.problems if p.problem.id in order), key=lambda p: order[p.problem.id])
    if seconds is not None:
        fits = int(seconds / (samples.seconds / len(samples.groups)))
        problems = problems[: max(FIRST_WAVE_PROBLEMS, fits)]
    group_size = len(samples.groups[0].completions)
    words = f"sampling {_problem_count(len(problems))} again at temperature {temperature:g}"
    pilot.begin(words, len(problems) * group_size)
    limit = samples.limit or pilot.config.rollout.max_tokens
    groups = list[Group]()
    try:
        for group in _draw_groups(pilot, problems, group_size, temperature, limit, Scorer(pilot.run.rewards)):
            groups.append(group)
    except Stopped:
        if len(groups) < FIRST_WAVE_PROBLEMS:
            return ()
    return groups
