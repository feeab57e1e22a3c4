"""The difficulty of each problem for the current policy, and the choice of problems and group sizes.

A problem teaches most if it is solved half of the time: its group then rarely ties. Pass rates are
exponential moving averages, because the policy changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from covey.rng import uniforms

NEWEST_WEIGHT = 0.5
"""Weight of the newest pass rate in the average."""
UNTRIED_PASS_RATE = 0.5
"""Pass rate assumed of a problem that has not been tried."""
SOLVED_PASS_RATE = 0.9
"""Pass rate from which a problem counts as solved (ScaleRL, arXiv 2510.13786)."""
MIN_DRAW_WEIGHT = 0.05
"""Smallest weight of a problem over the largest weight; above 0, so that no problem is lost forever."""


Memory: TypeAlias = Mapping[str, tuple[float, int, int]]
"""Number of a problem -> (pass rate, times tried, times solved in a row)."""


class Difficulty:
    """Remembered pass rates of a fixed list of problems."""

    def __init__(self, count: int) -> None:
        self.rates = np.full(count, UNTRIED_PASS_RATE)
        self.tried = np.zeros(count, dtype=np.int64)
        self.solved = np.zeros(count, dtype=np.int64)
        """Number of times in a row, up to the latest, that each problem was solved."""

    def update(self, index: int, pass_rate: float) -> None:
        """Record the pass rate of a new group of problem ``index``."""
        weight = NEWEST_WEIGHT if self.tried[index] else 1.0
        self.rates[index] += weight * (pass_rate - self.rates[index])
        self.tried[index] += 1
        self.solved[index] = self.solved[index] + 1 if pass_rate >= SOLVED_PASS_RATE else 0

    def retired_mask(self, after: int) -> np.ndarray:
        """Return (problems,) bool: True if solved ``after`` times in a row.

        All are False if ``after`` is 0, or if no problem would be left.
        """
        if not after:
            return np.zeros(len(self.solved), dtype=bool)
        mastered = self.solved >= after
        return mastered & ~mastered.all()

    def choose(self, stream: int, count: int, without: Sequence[int] = ()) -> list[int]:
        """Draw different problems, likelier near the frontier of a pass rate of one half.

        This is weighted sampling without replacement: the largest u^(1/w), w = 4 p (1 - p), with keyed u
        (Efraimidis and Spirakis 2006). Fewer are returned if there are not enough.
        """
        weights = np.maximum(4 * self.rates * (1 - self.rates), MIN_DRAW_WEIGHT)
        # log(u) / w has the order of u^(1/w).
        order = np.log(np.maximum(uniforms(stream, len(weights)), 1e-30)) / weights
        order[list(without)] = -np.inf
        chosen = np.argsort(-order, kind="stable")[: min(count, len(weights) - len(set(without)))]
        return [int(i) for i in chosen]

    def metrics(self, buckets: int = 10) -> dict[str, float]:
        """Return the fractions of problems tried and solved, and a histogram of pass rates."""
        rates = self.rates[self.tried > 0]
        counts = np.bincount(np.minimum((rates * buckets).astype(int), buckets - 1), minlength=buckets)
        fractions = counts / max(len(rates), 1)
        names = [f"difficulty/pass_rate_{b / buckets:.2f}_{(b + 1) / buckets:.2f}" for b in range(buckets)]
        return {
            "difficulty/tried": len(rates) / len(self.rates),
            "difficulty/solved": float((self.solved > 0).mean()),
            **dict(zip(names, fractions.tolist(), strict=True)),
        }

    def state(self) -> Memory:
        """Return the tried problems as JSON: number -> (pass rate, times tried, times solved in a row)."""
        return {
            str(i): (float(self.rates[i]), int(self.tried[i]), int(self.solved[i]))
            for i in np.flatnonzero(self.tried)
        }

    def load(self, state: Memory) -> None:
        """Restore ``state``."""
        for name, (rate, tried, solved) in state.items():
            index = int(name)
            self.rates[index] = rate
            self.tried[index] = tried
            self.solved[index] = solved


def allocate(rates: Sequence[float], total: int, max_size: int) -> list[int]:
    """Spread ``total`` completions over prompts in proportion to sqrt(p (1 - p)).

    That is the standard deviation of a reward, which more samples average out (Neyman allocation); easy and
    hopeless prompts get few. Sizes are within [2, max_size] and sum to ``total`` if that is possible.

    >>> allocate([0.5, 0.98, 0.5, 0.02], total=32, max_size=64)
    [13, 3, 13, 3]
    """
    # 1e-3 keeps a weight for prompts of pass rate 0 or 1.
    spread = np.sqrt(np.maximum(np.asarray(rates) * (1 - np.asarray(rates)), 1e-3))
    sizes = np.clip(np.floor(total * spread / spread.sum()), 2, max_size).astype(int)
    order = np.argsort(-spread, kind="stable")
    # Rounding and the bounds leave a difference: distribute it one by one, largest spread first.
    while sizes.sum() != total:
        step = 1 if sizes.sum() < total else -1
        free = [i for i in order if 2 <= sizes[i] + step <= max_size]
        if not free:
            break
        for i in free[: abs(total - int(sizes.sum()))]:
            sizes[i] += step
    return sizes.tolist()
