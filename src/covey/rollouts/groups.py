"""Scored groups from requests: each completion is judged as soon as it ends, while others are generated.

Each of several processes samples and judges its part, and gets the groups of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from covey.rewards.scorer import GroupScoring, Scorer
from covey.sampling.base import Request, Sampled, Sampler, SamplingParams
from covey.sampling.prompts import Prompted
from covey.system.processes import gather_from_all, is_rank_zero, rank_slice, world_size
from covey.types import NO_PROBLEM, Group

Progress = Callable[[int, int], None]
"""Called with (completions done, completions requested); may raise to stop."""


def score_all(
    problems: Sequence[Prompted],
    requests: Sequence[Request],
    sampler: Sampler,
    params: SamplingParams,
    scorer: Scorer,
    progress: Progress,
) -> list[Group]:
    """Sample and judge all requests. The groups are in their order, in whatever order completions end."""
    numbers = share(len(requests), sampler)

    def ours() -> dict[int, Group]:
        own_problems = [problems[n] for n in numbers]
        own_requests = [requests[n] for n in numbers]
        # place: a request's number among this process' own; number: among all.
        scorings = dict(score_each(own_problems, own_requests, sampler, params, scorer, progress))
        return {number: scorings[place].result() for place, number in enumerate(numbers)}

    return gather_groups(problems, ours)


def share(count: int, sampler: Sampler) -> Sequence[int]:
    """Return the numbers of ``count`` requests that this process samples."""
    if world_size() == 1 or sampler.shares:
        return rank_slice(count)
    # A sampler that does not share is used by rank 0 alone.
    return range(count) if is_rank_zero() else range(0)


def gather_groups(problems: Sequence[Prompted], draw_share: Callable[[], Mapping[int, Group]]) -> list[Group]:
    """Return the groups of all problems, in order; each of several processes makes some, by number."""

    def without_problems() -> Mapping[int, Group]:
        groups = draw_share()
        if world_size() == 1:
            return groups
        # Every process has the problems already, so they are not sent.
        return {number: replace(group, problem=NO_PROBLEM) for number, group in groups.items()}

    by_number = dict[int, Group]()
    for groups in gather_from_all(without_problems):
        by_number.update(groups)
    return [replace(by_number[n], problem=p.problem, prompt=p.tokens) for n, p in enumerate(problems)]


def score_each(
    problems: Sequence[Prompted],
    requests: Sequence[Request],
    sampler: Sampler,
    params: SamplingParams,
    scorer: Scorer,
    progress: Progress,
) -> Iterator[tuple[int, GroupScoring]]:
    """Yield the groups of ``score_all``, each with its number once its last completion has ended."""
    sizes = [len(request.streams) for request in requests]
    groups = [scorer.begin_group(p.problem, p.tokens, n) for p, n in zip(problems, sizes, strict=True)]
    return complete_groups(groups, sampler.sample(requests, params), progress)


def complete_groups(
    groups: Sequence[GroupScoring], drawn: Iterable[Sampled], progress: Progress
) -> Iterator[tuple[int, GroupScoring]]:
    """Add completions to their groups as they end; yield each group with its number once it is complete."""
    total = sum(group.size for group in groups)
    progress(0, total)
    for count, (number, sample, completion) in enumerate(drawn, start=1):
        progress(count, total)
        groups[number].add(sample, completion)
        if len(groups[number].completions) == groups[number].size:
            yield number, groups[number]
