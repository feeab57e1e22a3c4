"""Which problems a step samples, and how many completions of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from covey.config.sampling import Rollout
from covey.rng import key, permutation
from covey.tasks.difficulty import Difficulty, allocate


class Choice(NamedTuple):
    """A problem to sample."""

    problem: int
    """Its number."""
    turn: int
    """The epoch, or the step where difficulty decides: part of the key of every draw."""


@dataclass(frozen=True)
class Chosen:
    """The problems of one round of sampling."""

    choices: list[Choice]
    passed: int
    """By how much the cursor moves: these problems, and retired ones that were skipped."""


class Chooser:
    """Takes problems in the order of the data, a new one in every epoch, or by their pass rates."""

    def __init__(self, problems: int, rollout: Rollout, seed: int) -> None:
        self.problems, self.rollout, self.seed = problems, rollout, seed
        self._order = lru_cache(2)(lambda epoch: permutation(key(seed, "order", epoch), problems))

    @property
    def remembers(self) -> bool:
        """Whether what is sampled depends on how hard problems were."""
        rollout = self.rollout
        return rollout.curriculum != "off" or rollout.adapt_group_size or rollout.retire_after > 0

    def choose(
        self, step: int, cursor: int, used: int, wanted: int, seen: Collection[int], difficulty: Difficulty
    ) -> Chosen:
        """The next ``wanted`` problems; ``used`` ones were taken before in this step.

        Under ``curriculum: frontier`` they are drawn with pass rates near 1/2, those ``seen`` excluded.
        """
        retired = difficulty.retired(self.rollout.retire_after)
        if self.rollout.curriculum == "frontier":
            stream = key(self.seed, "frontier", step, used)
            excluded = {*seen, *map(int, np.flatnonzero(retired))}
            drawn = difficulty.choose(stream, wanted, without=list(excluded))
            return Chosen([Choice(problem, step) for problem in drawn], len(drawn))
        choices: list[Choice] = []
        passed = 0
        while len(choices) < wanted:
            choice = self.at(cursor + used + passed)
            passed += 1
            if not retired[choice.problem]:
                choices.append(choice)
        return Chosen(choices, passed)

    def at(self, ticket: int) -> Choice:
        """The problem at this place of the data, epoch after epoch."""
        epoch, place = divmod(ticket, self.problems)
        return Choice(int(self._order(epoch)[place]), epoch)

    def sizes(self, choices: Sequence[Choice], difficulty: Difficulty) -> list[int]:
        """How many completions to sample of each problem."""
        size = self.rollout.group_size
        if not self.rollout.adapt_group_size:
            return [size] * len(choices)
        rates = difficulty.rates[[choice.problem for choice in choices]].tolist()
        return allocate(rates, size * len(choices), most=8 * size)
