"""Sampling of groups: each completion goes to the rewards as soon as it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from covey.config.sampling import Rollout
from covey.rewards.scorer import GroupScoring, Scorer
from covey.rng import key
from covey.rollouts.groups import OnProgress, complete_groups
from covey.rollouts.store import CompletionStore, stored_or_sampled
from covey.sampling.base import Request, Sampler, SamplingParams
from covey.sampling.prompts import Prompted


class GroupRequest(NamedTuple):
    """A group to sample."""

    prompted: Prompted
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
            scorer.begin_group(prompted.problem, prompted.tokens, len(request.streams))
            for prompted, request, scorer, _ in group_requests
        ]
        tickets = [g.ticket for g in group_requests if g.ticket is not None]
        # Only requests ahead of their step have tickets, and only their completions are worth storing.
        if self.store is None or not tickets:
            completions = self.sampler.sample(requests, self.params)
        else:
            completions = stored_or_sampled(self.sampler, self.store, tickets, requests, self.params)
        for number, group in complete_groups(groups, completions, progress):
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
    # A key of its own, as keys identify completions.
    twin = replace(request, streams=[key(request.streams[0], "greedy")], greedy=True)
    return group_request._replace(request=twin)
