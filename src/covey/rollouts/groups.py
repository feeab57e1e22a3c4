"""Sampling of groups: each completion goes to the rewards as soon as it ends, while others are generated.

Each of several processes samples and scores its part, and gets the groups of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from covey.config.sampling import Rollout
from covey.rewards.scorer import GroupScoring, Scorer
from covey.rng import key
from covey.rollouts.store import CompletionStore, stored_or_sampled
from covey.sampling.base import Request, Sampler, SamplingParams
from covey.sampling.prompts import EncodedProblem
from covey.system.processes import gather_from_all, is_rank_zero, rank_slice, world_size
from covey.types import NO_PROBLEM, Group

OnProgress = Callable[[int, int], None]
"""Called with (completions done, completions requested); may raise to stop."""


class GroupRequest(NamedTuple):
    """A group to sample."""

    request: Request
    scorer: Scorer
    ticket: int | None = None
    """The problem's place in the data, if the group is sampled ahead of its step."""


class PendingGroup(NamedTuple):
    """A group whose completions have been sampled; some of them may still be scored."""

    scoring: GroupScoring
    request: Request
    greedy: PendingGroup | None = None
    """The greedy completion of the same problem, for estimators that use it as a baseline."""


SampleGroups = Callable[[Sequence[GroupRequest], OnProgress], Iterator[tuple[int, PendingGroup]]]
"""Yields the number of each request with its group, once all its completions have ended."""


def sampling_params(rollout: Rollout) -> SamplingParams:
    """Return the sampling parameters of a config."""
    return SamplingParams(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop)


@dataclass(frozen=True)
class GroupSampler:
    """``SampleGroups`` by a sampler. Completions sampled ahead of their step outlive a kill in ``store``."""

    sampler: Sampler
    params: SamplingParams
    store: CompletionStore | None = None

    def __call__(
        self, group_requests: Sequence[GroupRequest], progress: OnProgress
    ) -> Iterator[tuple[int, PendingGroup]]:
        """Sample all groups at once."""
        requests = [group_request.request for group_request in group_requests]
        groups = [
            scorer.begin_group(request.problem, request.problem_prompt, len(request.streams))
            for request, scorer, _ in group_requests
        ]
        tickets = [g.ticket for g in group_requests if g.ticket is not None]
        # Only requests ahead of their step have tickets, and only their completions are worth storing.
        if self.store is None or not tickets:
            completions = self.sampler.sample(requests, self.params)
        else:
            completions = stored_or_sampled(self.sampler, self.store, tickets, requests, self.params)
        total = sum(group.size for group in groups)
        progress(0, total)
        for count, (number, sample, completion) in enumerate(completions, start=1):
            progress(count, total)
            group = groups[number]
            group.add(sample, completion)
            if len(group.completions) == group.size:
                yield number, PendingGroup(group, requests[number])


def with_greedy_twins(sample_groups: SampleGroups) -> SampleGroups:
    """Sample the greedy completion of each group's problem together with the group."""

    def sample_both(
        requests: Sequence[GroupRequest], progress: OnProgress
    ) -> Iterator[tuple[int, PendingGroup]]:
        # The twin of request n is request len(requests) + n; all are sampled at once, so none waits.
        groups = dict(sample_groups([*requests, *map(_greedy_twin, requests)], progress))
        for number in range(len(requests)):
            yield number, groups[number]._replace(greedy=groups[len(requests) + number])

    return sample_both


def _greedy_twin(group_request: GroupRequest) -> GroupRequest:
    request = group_request.request
    # The twin needs a key of its own, because keys identify completions.
    twin = replace(request, streams=[key(request.streams[0], "greedy")], greedy=True)
    return group_request._replace(request=twin)


def score_all(
    requests: Sequence[Request],
    sampler: Sampler,
    params: SamplingParams,
    scorer: Scorer,
    progress: OnProgress,
) -> list[Group]:
    """Sample and score all requests. The groups are in their order, in whatever order completions end."""
    numbers = share(len(requests), sampler)

    def ours() -> dict[int, Group]:
        own_requests = [GroupRequest(requests[n], scorer) for n in numbers]
        # place: a request's number among this process' own; number: among all.
        pending = dict(GroupSampler(sampler, params)(own_requests, progress))
        return {number: pending[place].scoring.result() for place, number in enumerate(numbers)}

    return gather_groups([EncodedProblem(r.problem, r.problem_prompt) for r in requests], ours)


def share(count: int, sampler: Sampler) -> Sequence[int]:
    """Return the numbers of ``count`` requests that this process samples."""
    if world_size() == 1 or sampler.samples_on_every_rank:
        return rank_slice(count)
    # A sampler that does not share is used by rank 0 alone.
    return range(count) if is_rank_zero() else range(0)


def gather_groups(
    problems: Sequence[EncodedProblem], draw_share: Callable[[], Mapping[int, Group]]
) -> list[Group]:
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
