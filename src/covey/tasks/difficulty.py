"""How hard each problem is for the policy now, and what follows: which to sample, how often.

A problem teaches most where it is solved half of the time: its group then rarely ties. Pass rates are
remembered with forgetting, because the policy moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from covey.rng import uniforms

FORGETTING = 0.5
"""Weight of the newest pass rate in the remembered one."""
UNTRIED = 0.5
"""Pass rate assumed of a problem that has not been tried."""
SOLVED = 0.9
"""Pass rate from which a problem counts as solved, as in ScaleRL, arXiv 2510.13786."""
LEAST = 0.05
"""Every problem keeps this share of the largest weight, so that none is lost for good."""


Memory: TypeAlias = Mapping[str, Sequence[float]]


class Difficulty:
    """Remembered pass rates of a fixed list of problems."""

    def __init__(self, count: int) -> None:
        self.rates = np.full(count, UNTRIED)
        self.tried = np.zeros(count, dtype=np.int64)
        self.solved = np.zeros(count, dtype=np.int64)
        """How often in a row, up to now."""

    def update(self, index: int, pass_rate: float) -> None:
        """A group of problem ``index`` was scored."""
        weight = FORGETTING if self.tried[index] else 1.0
        self.rates[index] += weight * (pass_rate - self.rates[index])
        self.tried[index] += 1
        self.solved[index] = self.solved[index] + 1 if pass_rate >= SOLVED else 0

    def retired(self, after: int) -> np.ndarray:
        """(problems,) bool: solved ``after`` times in a row, 0 for never; none if that leaves nothing."""
        done = self.solved >= after if after else self.solved < 0
        return done & ~done.all()

    def choose(self, stream: int, count: int, without: Sequence[int] = ()) -> list[int]:
        """Draw different problems, likelier near the frontier of a pass rate of one half.

        Weighted sampling without replacement: the largest u^(1/w), w = 4 p (1 - p), with keyed u
        (Efraimidis and Spirakis 2006). Fewer come back when there are not enough.
        """
        weights = np.maximum(4 * self.rates * (1 - self.rates), LEAST)
        order = np.log(np.maximum(uniforms(stream, len(weights)), 1e-30)) / weights
        order[list(without)] = -np.inf
        chosen = np.argsort(-order, kind="stable")[: min(count, len(weights) - len(set(without)))]
        return [int(i) for i in chosen]

    def metrics(self, buckets: int = 10) -> dict[str, float]:
        """Share of problems that were tried, and of these by pass rate: the frontier over time."""
        known = self.rates[self.tried > 0]
        counts = np.bincount(np.minimum((known * buckets).astype(int), buckets - 1), minlength=buckets)
        shares = counts / max(len(known), 1)
        names = [f"difficulty/pass_rate_{b / buckets:.2f}_{(b + 1) / buckets:.2f}" for b in range(buckets)]
        return {
            "difficulty/tried": len(known) / len(self.rates),
            "difficulty/solved": float((self.solved > 0).mean()),
            **dict(zip(names, shares.tolist(), strict=True)),
        }

    def state(self) -> Memory:
        """As JSON: the problems tried, by number: pass rate, times tried, times solved in a row."""
        return {
            str(i): (float(self.rates[i]), int(self.tried[i]), int(self.solved[i]))
            for i in np.flatnonzero(self.tried)
        }

    def load(self, state: Memory) -> None:
        """Restore ``state``; older ones have no third number."""
        for name, (rate, tried, *solved) in state.items():
            index = int(name)
            self.rates[index], self.tried[index], self.solved[index] = rate, int(tried), sum(map(int, solved))


def allocate(rates: Sequence[float], total: int, least: int = 2, most: int = 64) -> list[int]:
    """Spread ``total`` completions over prompts by how much a further one tells: sqrt(p (1 - p)).

    The standard deviation of a reward is what more samples average out (Neyman allocation); easy and
    hopeless prompts get few. Sizes are within [least, most] and sum to ``total`` where that is possible.

    >>> allocate([0.5, 0.98, 0.5, 0.02], total=32)
    [13, 3, 13, 3]
    """
    spread = np.sqrt(np.maximum(np.asarray(rates) * (1 - np.asarray(rates)), 1e-3))
    sizes = np.clip(np.floor(total * spread / spread.sum()), least, most).astype(int)
    order = np.argsort(-spread, kind="stable")
    while sizes.sum() != total:
        step = 1 if sizes.sum() < total else -1
        free = [i for i in order if least <= sizes[i] + step <= most]
        if not free:
            break
        for i in free[: abs(total - int(sizes.sum()))]:
            sizes[i] += step
    return sizes.tolist()
