"""The small samples that a preview concludes from; each stays within its seconds at the measured speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from covey.config.schema import Config
from covey.errors import Stopped
from covey.insight.answers import AnswerVariant, Readings, answer_forms
from covey.insight.forecast import pace_at, sampled_at_once
from covey.insight.preview import Longer, Measured
from covey.learner.batching import with_signal
from covey.learner.objectives import PolicyObjective
from covey.learner.old_logprobs import old_logprob_source
from covey.objective.controllers import first_coefficients
from covey.rewards.groups import with_credit
from covey.rewards.scorer import Rewards, Scorer
from covey.rng import key
from covey.rollouts.groups import GroupRequest, GroupSampler, sampling_params, score_all
from covey.rollouts.segments import Cut, PrefixSampler, SegmentSettings, with_segments
from covey.sampling.base import Request
from covey.sampling.prompts import EncodedProblem
from covey.training.rl import prepare, step_minibatches
from covey.training.run import Run
from covey.types import Completion, Group, Problem

T = TypeVar("T")
TIMED = 16
"""Number of completions on which each reward is timed alone."""
FIRST = 2
"""Problems of the first wave."""
SHORTEST = 16
"""Tokens of a completion that are sampled however slow the model is."""
WORST = 2.0
"""Times that the first wave may take its seconds if all completions have the full length."""
NEARLY = 0.75
"""Fraction of the tokens of a completion that fit, from which on all of them are waited for."""
STEPS = 8
"""Tokens by which the speed is measured before the first wave."""
SLOW = 4.0
"""Seconds of two tokens, after which the speed is known well enough."""
CONTINUED = 16
"""Truncated completions that are continued, at most."""
FEWEST_CONTINUED = 4
MOST_REREAD = 48
"""Most completions whose answers the verdict gets in other forms."""
SLOW_VERDICT = 0.02
"""Seconds per completion beyond which a verdict does not get them."""


@dataclass(frozen=True)
class Pilot:
    """The parts of a run that are measured."""

    run: Run
    problems: Sequence[EncodedProblem]

    @property
    def config(self) -> Config:
        """The run's config."""
        return self.run.loaded.config

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


def sampled(pilot: Pilot, samples: range, seconds: float | None) -> Measured:
    """Sample each problem, in waves that fit into ``seconds``; None: all problems, however long they take.

    ``samples`` are the numbers of completions that a problem may get: fewer where the model is slow, and then
    shorter ones. After a stop the complete groups are kept. Raises Stopped if there is none.
    """
    count = len(pilot.problems)
    step = _seconds_of_step(pilot, samples[-1])
    rollout = pilot.config.rollout
    width = sampled_at_once(pilot.config, rollout.completions_per_step)
    group_size = samples[-1]
    limit = rollout.max_tokens
    # Without a limit, as many completions as a step samples, to learn its speed, and then the rest.
    size = min(max(1, width // group_size), count)
    if seconds is not None:
        size = min(FIRST, count)
        group_size, limit = _fitting(samples, limit, WORST * seconds / (step * size))
    scorer = Scorer(pilot.run.rewards)
    sample_wave = partial(_wave, pilot, group_size=group_size, limit=limit, scorer=scorer)
    waves = _sample_waves(sample_wave, pilot.problems, size, seconds)
    groups = [group for wave in waves for group in wave.groups]
    paces = _paces(waves)
    return Measured(
        groups,
        pace_at(paces, width) * max(_sampled_tokens(groups), 1),
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
        pace = wave.seconds / max(_sampled_tokens(wave.groups), 1)
        paces[wave.width] = min(pace, paces.get(wave.width, pace))
    return paces


def _fitting(samples: range, limit: int, room: float) -> tuple[int, int]:
    """Return how many completions of a problem, and of how many tokens, fit.

    ``room`` is the number of tokens of a problem's completions that fit into the time of a wave; the time of
    a token grows with the number of completions.
    """
    fits = room * samples[-1] / limit
    count = max(samples[0], min(samples[-1], int(fits)))
    if fits < NEARLY * count:
        limit = min(limit, max(SHORTEST, int(limit * fits / count)))
    return count, limit


def _wave(
    pilot: Pilot, problems: Sequence[EncodedProblem], group_size: int, limit: int, scorer: Scorer
) -> Wave:
    """Sample some problems; after a stop the complete groups are kept."""
    pilot.begin(
        f"sampling {_problems(len(problems))}, {group_size} completions each", len(problems) * group_size
    )
    temperature = pilot.config.rollout.temperature
    width = sampled_at_once(pilot.config, len(problems) * group_size)
    groups = list[Group]()
    start = time.monotonic()
    try:
        for group in _draw(pilot, problems, group_size, temperature, limit, scorer):
            groups.append(group)
    except Stopped as stop:
        return Wave(groups, width, time.monotonic() - start, stop)
    return Wave(groups, width, time.monotonic() - start)


def _sampled_tokens(groups: Sequence[Group]) -> int:
    return sum(len(c.tokens) for g in groups for c in g.completions)


def _problems(count: int) -> str:
    return f"{count} problem{'s' if count > 1 else ''}"


def _seconds_of_step(pilot: Pilot, samples: int) -> float:
    """Return the seconds of a token of ``samples`` completions, without work that is done only once."""
    pilot.begin("measuring the speed", samples)
    per_token = 0.0
    for tokens in (2, STEPS):
        start = time.monotonic()
        params = replace(sampling_params(pilot.config.rollout), max_tokens=tokens)
        list(pilot.run.sampler.sample([_request(pilot, pilot.problems[0], samples)], params))
        per_token = (time.monotonic() - start) / tokens
        if 2 * per_token > SLOW:
            break
    return per_token


def _request(pilot: Pilot, problem: EncodedProblem, samples: int) -> Request:
    name = problem.problem.id
    return problem.request([key(pilot.config.seed, "preview", name, s) for s in range(samples)])


def _draw(
    pilot: Pilot,
    problems: Sequence[EncodedProblem],
    samples: int,
    temperature: float,
    limit: int,
    scorer: Scorer,
) -> Iterator[Group]:
    """Yield the groups of problems in the order in which they are complete."""
    params = replace(sampling_params(pilot.config.rollout), temperature=temperature, max_tokens=limit)
    requests = [GroupRequest(_request(pilot, p, samples), scorer) for p in problems]
    for _, pending in GroupSampler(pilot.run.sampler, params)(requests, pilot.run.on_sample):
        yield with_credit(pending.scoring.result(), pilot.run.loaded.algorithm.credit)


def at_temperature(
    pilot: Pilot, measured: Measured, temperature: float, seconds: float | None
) -> Sequence[Group]:
    """Sample the same problems again at another temperature: as many as fit into ``seconds``, at least two.

    Empty if not even two fit, or after a stop.
    """
    order = {g.problem.id: n for n, g in enumerate(measured.groups)}
    problems = sorted((p for p in pilot.problems if p.problem.id in order), key=lambda p: order[p.problem.id])
    if seconds is not None:
        fits = int(seconds / (measured.seconds / len(measured.groups)))
        problems = problems[: max(FIRST, fits)]
    samples = len(measured.groups[0].completions)
    words = f"sampling {_problems(len(problems))} again at temperature {temperature:g}"
    pilot.begin(words, len(problems) * samples)
    limit = measured.limit or pilot.config.rollout.max_tokens
    groups = list[Group]()
    try:
        for group in _draw(pilot, problems, samples, temperature, limit, Scorer(pilot.run.rewards)):
            groups.append(group)
    except Stopped:
        if len(groups) < FIRST:
            return ()
    return groups


def continue_truncated(pilot: Pilot, measured: Measured, seconds: float) -> Longer | None:
    """Continue some truncated completions to twice their tokens and score them again.

    None if tools answer in between, or if there is no time or context for a quarter more tokens.
    """
    config = pilot.config
    limit = config.rollout.max_tokens
    # As many tokens as fit, at the pace of the groups.
    room = seconds / (measured.seconds / max(_sampled_tokens(measured.groups), 1))
    truncated = _some_truncated(measured.groups, most=max(FEWEST_CONTINUED, int(room / limit)))
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
    return score_all(requests, sampler, params, Scorer(pilot.run.rewards), pilot.run.on_sample)


def _some_truncated(groups: Sequence[Group], most: int) -> list[tuple[Group, int]]:
    """Return about ``most`` truncated completions, at equal distances: their groups and numbers."""
    truncated = [
        (group, sample)
        for group in groups
        for sample, completion in enumerate(group.completions)
        if completion.finish == "length"
    ]
    truncated = _spread(truncated, CONTINUED)
    return truncated[:: max(1, len(truncated) // most)]


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` items, at equal distances."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(most, len(items))).astype(int)]


def read_otherwise(pilot: Pilot, measured: Measured) -> Readings | None:
    """Give the verdict the answers of completions that it rejects in other forms.

    None if it is slow, or reads more than a text.
    """
    verdict = pilot.run.rewards.verdict
    slow = measured.reward_seconds.get(verdict.name, 0.0) > SLOW_VERDICT
    if slow or pilot.config.rollout.tools is not None:
        return None
    rejected = [
        (g.problem, c)
        for g in measured.groups
        for c, ok in zip(g.completions, g.correct, strict=True)
        if not ok
    ]
    rejected = _spread(rejected, MOST_REREAD)
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


def with_times(pilot: Pilot, measured: Measured, seconds: float) -> Measured:
    """Time each reward, and an update on as many completions as fit into ``seconds``."""
    pilot.begin("timing rewards and an update")
    measured = replace(measured, reward_seconds=_rewards_timed(pilot.run.rewards, measured.groups))
    # As many groups as a step has, live ones first: dead ones cost an update nothing.
    few = sorted(measured.groups, key=lambda g: g.dead)[: pilot.config.rollout.prompts_per_step]
    valued, _ = _continued(pilot, [_part(min(few, key=_tokens), 2)], measured)
    start = time.monotonic()
    prepared, updating, tokens = _update_timed(pilot, valued)
    # The first update may include work that is done only once, such as compilation.
    if time.monotonic() - start < seconds / 4:
        prepared, updating, tokens = _update_timed(pilot, valued)
    # Groups and, where not even one fits, some of its completions.
    room = seconds * tokens / max(prepared + updating, 1e-9)
    ends = np.cumsum([_tokens(g) for g in few])
    chosen = few[: int((ends <= room).sum())]
    if not chosen:
        chosen = [_part(few[0], max(2, int(len(few[0].completions) * room / ends[0])))]
    valued, measured = _continued(pilot, chosen, measured)
    prepared, updating, tokens = _update_timed(pilot, valued)
    return replace(measured, prepare=prepared, update=updating, update_tokens=tokens)


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


def _rewards_timed(rewards: Rewards, groups: Sequence[Group]) -> dict[str, float]:
    """Return each reward's seconds per completion, called one after another."""
    chosen = [(g.problem, c.text) for g in groups for c in g.completions[:1]][:TIMED]
    scorer = Scorer(rewards)
    seconds = {}
    for reward in rewards:
        start = time.monotonic()
        for problem, text in chosen:
            scorer.score(reward, problem, text)
        seconds[reward.name] = (time.monotonic() - start) / len(chosen)
    return seconds


def _continued(pilot: Pilot, groups: Sequence[Group], measured: Measured) -> tuple[Sequence[Group], Measured]:
    """Return groups with the values of their segments, if the algorithm needs them, and the cost of these."""
    config = pilot.config
    settings = SegmentSettings.of(pilot.run.loaded.algorithm)
    if settings is None:
        return groups, measured

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
    took = (time.monotonic() - start) / count
    return cut, replace(measured, continued=tokens / count, continuing=took)


def _update_timed(pilot: Pilot, groups: Sequence[Group]) -> tuple[float, float, int]:
    """Return the seconds to prepare a batch and to compute its gradient, and the number of its tokens.

    Of a group that trains nothing no token is counted; of the others the prompt, once.
    """
    config = pilot.config
    algorithm = pilot.run.loaded.algorithm
    learner = pilot.run.learner
    old = old_logprob_source(algorithm, pilot.run.sampler, config.train.updates_per_rollout_batch)
    objective = PolicyObjective.of(algorithm, config.rollout, first_coefficients(algorithm))
    start = time.monotonic()
    batch = with_signal(prepare(pilot.run, groups, old))
    _wait(learner.network.device)
    prepared = time.monotonic() - start
    tokens = 0
    for minibatch in step_minibatches(batch, pilot.run.loaded, old, step=0):
        learner.forward_backward(minibatch, objective)
        # Completions without an advantage may be skipped by the learner: they take no time.
        busy = minibatch.has_gradient(algorithm.skips_idle)
        prompts = {id(p): len(p) for p, trained in zip(minibatch.prompts, busy, strict=True) if trained}
        tokens += int(minibatch.mask[busy].sum()) + sum(prompts.values())
        learner.clear()
    _wait(learner.network.device)
    return prepared, time.monotonic() - start - prepared, tokens


# GPU kernels run asynchronously: wait for them before the clock is read.
def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
