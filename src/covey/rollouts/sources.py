"""The sources of a step's groups: sampled in the step that uses them, or ahead of it in a thread.

A group's ticket is its place in the data, epoch after epoch; both threads name groups by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from covey.config.sampling import Rollout
from covey.rewards.scorer import Rewards, Scorer
from covey.rng import key
from covey.rollouts.choose import Chooser, ProblemChoice
from covey.rollouts.groups import GroupRequest, OnProgress, PendingGroup, SampleGroups, share
from covey.rollouts.prefetch import Prefetcher
from covey.sampling.base import Request, Sampler
from covey.sampling.prompts import EncodedProblem


@dataclass(frozen=True)
class SamplingRound:
    """Groups that a step asks for at once; it may ask several times."""

    step: int
    cursor: int
    """The place in the data at which the step began."""
    ticket: int
    """The place of the first group."""
    choices: Sequence[ProblemChoice]
    sizes: Sequence[int]
    """Completions of each group."""
    scorer: Scorer


class GroupSource(Protocol):
    """Samples groups, by itself or by asking a thread for them."""

    def draw(self, sampling_round: SamplingRound) -> dict[int, PendingGroup]:
        """Return this process' part of a round, by number in the round."""
        ...

    def close(self) -> None:
        """End what runs ahead."""
        ...


@dataclass(frozen=True)
class RequestMaker:
    """Makes the requests of groups, with a random key for each completion."""

    problems: Sequence[EncodedProblem]
    seed: int

    def request(self, choice: ProblemChoice, samples: int, step: int | None) -> Request:
        """Return the request of a group; one sampled ahead does not know its step, so its key has none."""
        prompted = self.problems[choice.problem]
        steps = () if step is None else (step,)
        identity = (self.seed, "rollout", *steps, prompted.problem.id, choice.occasion)
        return prompted.request([key(*identity, sample) for sample in range(samples)])


@dataclass(frozen=True)
class StepSource:
    """Samples each group in the step that uses it."""

    maker: RequestMaker
    sampler: Sampler
    sample_groups: SampleGroups
    progress: OnProgress

    def draw(self, sampling_round: SamplingRound) -> dict[int, PendingGroup]:
        """Sample this process' part of a round."""
        numbers = share(len(sampling_round.choices), self.sampler)
        requests = [
            self.maker.request(sampling_round.choices[n], sampling_round.sizes[n], sampling_round.step)
            for n in numbers
        ]
        groups = self.sample_groups([GroupRequest(r, sampling_round.scorer) for r in requests], self.progress)
        return {numbers[place]: pending for place, pending in groups}

    def close(self) -> None:
        """Do nothing: nothing runs ahead."""


class AheadSource:
    """Takes groups that a thread has sampled, at most ``rollout.staleness`` steps ahead of their step.

    Only groups that a step is certain to use are sampled, so that the thread changes nothing about which
    groups a step uses.
    """

    def __init__(
        self,
        maker: RequestMaker,
        sampler: Sampler,
        sample_groups: SampleGroups,
        progress: OnProgress,
        *,
        chooser: Chooser,
        rewards: Rewards,
        rollout: Rollout,
        steps: int | None,
        cursor: int,
    ) -> None:
        """``steps``: number of steps of the run. ``cursor``: the first place that is sampled."""
        self.maker = maker
        self.sampler = sampler
        self.sample_groups = sample_groups
        self.progress = progress
        self.chooser = chooser
        self.rewards = rewards
        self.rollout = rollout
        self.steps = steps
        # The thread reads step and cursor as one tuple, so that they always belong together; for that no
        # lock is needed. It begins only once a round is drawn.
        self.step_and_cursor = (0, cursor)
        self.prefetcher = Prefetcher(self._sample_ahead, cursor)

    def draw(self, sampling_round: SamplingRound) -> dict[int, PendingGroup]:
        """Take this process' part of a round, and let the thread continue."""
        self.step_and_cursor = (sampling_round.step, sampling_round.cursor)
        tickets = range(sampling_round.ticket, sampling_round.ticket + len(sampling_round.choices))
        own_tickets = self._own_tickets(tickets)
        # This round and the first rounds of the steps ahead are certain to be used, whatever is filtered.
        until = tickets.stop + self._steps_ahead(sampling_round.step) * self.rollout.prompts_per_step
        groups = zip(own_tickets, self.prefetcher.take(own_tickets, until, self.progress), strict=True)
        return {ticket - tickets.start: group for ticket, group in groups}

    def close(self) -> None:
        """Stop the thread; its unfinished groups are dropped."""
        self.prefetcher.close()

    def _sample_ahead(self, tickets: range, ended: Callable[[], None]) -> Iterator[tuple[int, PendingGroup]]:
        """Sample this process' part of some places of the data before their step, in the thread."""
        torch.set_num_threads(torch.get_num_threads())  # OpenMP has a thread count of its own for each thread
        step, cursor = self.step_and_cursor
        own_tickets = self._own_tickets(tickets)
        group_requests = []
        for ticket in own_tickets:
            # A filter may move this group to another step. Rewards get the step it would have without one.
            expected_step = step + (ticket - cursor) // self.rollout.prompts_per_step
            request = self.maker.request(self.chooser.at(ticket), self.rollout.group_size, step=None)
            group_requests.append(GroupRequest(request, Scorer(self.rewards, expected_step), ticket))
        # ``ended`` raises when the prefetcher is closed, which ends this thread's sampling.
        for number, pending in self.sample_groups(group_requests, lambda *_: ended()):
            yield own_tickets[number], pending

    def _own_tickets(self, tickets: range) -> list[int]:
        """Return the places of the data that this process samples."""
        # Shared by place of the data, not by round, so that both threads agree on who samples it.
        assigned = set(share(tickets.stop, self.sampler))
        return [ticket for ticket in tickets if ticket in assigned]

    def _steps_ahead(self, step: int) -> int:
        """Return for how many later steps groups may be sampled; each uses at least ``prompts_per_step``."""
        later = self.rollout.staleness if self.steps is None else self.steps - step - 1
        return max(0, min(self.rollout.staleness, later))
