"""The choice of a step's problems, and of how many completions each gets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from covey.config.sampling import Rollout
from covey.rng import key, permutation
from covey.tasks.difficulty import Difficulty, allocate


class ProblemChoice(NamedTuple):
    """A problem to sample."""

    problem: int
    """The problem's number."""
    occasion: int
    """The epoch, or the step if difficulty decides; part of the key of every draw."""


@dataclass(frozen=True)
class ProblemRound:
    """The problems of one round of sampling."""

    choices: list[ProblemChoice]
    passed: int
    """Places that the cursor moves: these problems, and retired ones that were skipped."""


class Chooser:
    """Chooses problems in an order that is new in every epoch, or by their pass rates."""

    def __init__(self, problems: int, rollout: Rollout, seed: int) -> None:
        self.problems = problems
        self.rollout = rollout
        self.seed = seed
        # A step can reach into the next epoch, hence two orders.
        self._order = lru_cache(2)(lambda epoch: permutation(key(seed, "order", epoch), problems))

    @property
    def remembers(self) -> bool:
        """Whether the choice depends on earlier pass rates."""
        rollout = self.rollout
        return rollout.curriculum != "off" or rollout.adapt_group_size or rollout.retire_after > 0

    def choose(
        self, step: int, cursor: int, used: int, count: int, earlier: Collection[int], difficulty: Difficulty
    ) -> ProblemRound:
        """Return the next ``count`` problems; the step has used ``used`` places before.

        Under ``curriculum: frontier`` they have pass rates near 1/2, and none of them came ``earlier``.
        """
        retired = difficulty.retired_mask(self.rollout.retire_after)
        if self.rollout.curriculum == "frontier":
            stream = key(self.seed, "frontier", step, used)
            excluded = {*earlier, *map(int, np.flatnonzero(retired))}
            chosen = difficulty.choose(stream, count, without=list(excluded))
            return ProblemRound([ProblemChoice(problem, step) for problem in chosen], len(chosen))
        choices: list[ProblemChoice] = []
        passed = 0
        while len(choices) < count:
            choice = self.at(cursor + used + passed)
            # A retired problem moves the cursor as well, so that it is not met again in this epoch.
            passed += 1
            if not retired[choice.problem]:
                choices.append(choice)
        return ProblemRound(choices, passed)

    def at(self, ticket: int) -> ProblemChoice:
        """Return the problem at this place of the data, epoch after epoch."""
        epoch, index = divmod(ticket, self.problems)
        return ProblemChoice(int(self._order(epoch)[index]), epoch)

    def sizes(self, choices: Sequence[ProblemChoice], difficulty: Difficulty) -> list[int]:
        """Return how many completions to sample of each problem."""
        size = self.rollout.group_size
        if not self.rollout.adapt_group_size:
            return [size] * len(choices)
        rates = difficulty.rates[[choice.problem for choice in choices]].tolist()
        # The total stays that of groups of equal size.
        return allocate(rates, size * len(choices), max_size=8 * size)
