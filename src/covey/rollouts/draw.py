"""Drawing: samples the completions of groups and hands each to the rewards as soon as it ends."""

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


class Draw(NamedTuple):
    """A group to draw."""

    prompted: Prompted
    request: Request
    scorer: Scorer
    ticket: int | None = None
    """The problem's place in the data, if the group is drawn ahead of its step."""


class PendingGroup(NamedTuple):
    """A group whose completions have been drawn; some of them may still be scored."""

    scoring: GroupScoring
    request: Request
    greedy: PendingGroup | None = None
    """The greedy completion of the same problem, for estimators that use it as a baseline."""


DrawGroups = Callable[[Sequence[Draw], OnProgress], Iterator[tuple[int, PendingGroup]]]
"""Yields the number of each draw with its group, once all its completions have ended."""


def sampling_params(rollout: Rollout) -> SamplingParams:
    """Return the sampling parameters of a config."""
    return SamplingParams(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop)


@dataclass(frozen=True)
class Drawing:
    """``DrawGroups`` by a sampler. Completions drawn ahead of their step outlive a kill in ``store``."""

    sampler: Sampler
    params: SamplingParams
    store: CompletionStore | None = None

    def __call__(self, draws: Sequence[Draw], progress: OnProgress) -> Iterator[tuple[int, PendingGroup]]:
        """Draw all groups at once."""
        requests = [draw.request for draw in draws]
        groups = [
            d.scorer.begin_group(d.prompted.problem, d.prompted.tokens, len(d.request.streams)) for d in draws
        ]
        tickets = [draw.ticket for draw in draws if draw.ticket is not None]
        # Only draws ahead of their step have tickets, and only these are worth storing.
        if self.store is None or not tickets:
            drawn = self.sampler.sample(requests, self.params)
        else:
            drawn = stored_or_sampled(self.sampler, self.store, tickets, requests, self.params)
        for number, group in complete_groups(groups, drawn, progress):
            yield number, PendingGroup(group, requests[number])


def with_greedy_twins(draw: DrawGroups) -> DrawGroups:
    """Draw the greedy completion of each group's problem together with the group."""

    def both(draws: Sequence[Draw], progress: OnProgress) -> Iterator[tuple[int, PendingGroup]]:
        # The twin of draw n is draw len(draws) + n; all are drawn at once, so none waits.
        drawn = dict(draw([*draws, *map(_greedy_twin, draws)], progress))
        for number in range(len(draws)):
            yield number, drawn[number]._replace(greedy=drawn[len(draws) + number])

    return both


def _greedy_twin(draw: Draw) -> Draw:
    request = draw.request
    # A key of its own, as keys identify completions.
    return draw._replace(request=replace(request, streams=[key(request.streams[0], "greedy")], greedy=True))
