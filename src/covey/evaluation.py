"""Held-out accuracy: greedy, pass@k without bias, majority vote, each with an interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey.rewards.base import Reward, Rewards
from covey.rewards.extract import extract
from covey.rng import key
from covey.rollout import Progress, Prompted, score_all
from covey.sampling.base import Request, Sampler, SamplingParams
from covey.types import Group

Z95 = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A share with its 95 % interval.

    >>> str(wilson(31, 100))
    '31 % [23, 41]'
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.0f} % [{100 * self.low:.0f}, {100 * self.high:.0f}]"


@dataclass(frozen=True)
class Evaluation:
    """What a policy does on held-out problems. n problems, k samples each."""

    greedy: np.ndarray
    """(n,) bool: the greedy completion is right."""
    correct: np.ndarray
    """(n,) int64: how many of the k samples are right."""
    majority: np.ndarray
    """(n,) bool: the most frequent answer among the k samples is right."""
    samples: int
    """k."""

    def summary(self) -> dict[str, Estimate]:
        """greedy, pass@1, pass@2, ... pass@k, maj@k."""
        n = len(self.greedy)
        found = {"greedy": wilson(int(self.greedy.sum()), n)}
        for k in (k for k in (1, 2, 4, 8, 16, 32, 64) if k <= self.samples):
            found[f"pass@{k}"] = mean_interval(pass_at_k(self.correct, self.samples, k))
        found[f"maj@{self.samples}"] = wilson(int(self.majority.sum()), n)
        return found

    def record(self) -> dict[str, Any]:
        """As JSON: the summary with the ends of each interval, and the outcome of every problem."""
        found: dict[str, Any] = {"problems": len(self.greedy), "samples": self.samples}
        for name, estimate in self.summary().items():
            found |= {name: estimate.value, f"{name}/low": estimate.low, f"{name}/high": estimate.high}
        outcome = {n: getattr(self, n).astype(int).tolist() for n in ("greedy", "correct", "majority")}
        return found | {"outcome": outcome}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Evaluation:
        """The evaluation that ``record`` wrote."""
        outcome = {name: np.array(values) for name, values in record["outcome"].items()}
        return cls(
            greedy=outcome["greedy"].astype(bool),
            correct=outcome["correct"],
            majority=outcome["majority"].astype(bool),
            samples=record["samples"],
        )


def evaluate(
    problems: Sequence[Prompted],
    sampler: Sampler,
    rewards: Rewards,
    params: SamplingParams,
    samples: int,
    seed: int,
    progress: Progress,
) -> Evaluation:
    """Sample each problem greedily and ``samples`` times. The first reward above 1/2 means right.

    The draws are keyed by seed and problem alone, so two policies meet the same luck.
    """

    def groups(count: int, params: SamplingParams) -> list[Group]:
        requests = [
            Request(p.tokens, [key(seed, "eval", p.problem.id, s) for s in range(count)]) for p in problems
        ]
        return score_all(problems, requests, sampler, params, rewards, progress)

    drawn, greedy = groups(samples, params), groups(1, replace(params, temperature=0.0))
    return Evaluation(
        greedy=np.array([bool(g.correct[0]) for g in greedy]),
        correct=np.array([int(g.correct.sum()) for g in drawn]),
        majority=np.array([_majority(g, rewards[0]) for g in drawn]),
        samples=samples,
    )


def pass_at_k(correct: np.ndarray, samples: int, k: int) -> np.ndarray:
    """1 - C(n - c, k) / C(n, k) for each problem: unbiased. (n,) -> (n,). Chen et al., 2107.03374.

    >>> pass_at_k(np.array([0, 1, 4]), samples=4, k=2).tolist()
    [0.0, 0.5, 1.0]
    """
    return np.array([1 - math.comb(samples - int(c), k) / math.comb(samples, k) for c in correct])


def wilson(successes: int, trials: int) -> Estimate:
    """A proportion with its Wilson score interval."""
    if trials == 0:
        return Estimate(math.nan, 0.0, 1.0)
    p, z2 = successes / trials, Z95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(values: np.ndarray) -> Estimate:
    """The mean over problems with a normal interval: problems are the unit, not samples."""
    mean = float(values.mean())
    half = Z95 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 1.0
    return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half))


def gain(before: np.ndarray, after: np.ndarray) -> Estimate:
    """Mean paired difference over the same problems, with its interval. (n,), (n,) -> Estimate.

    One pseudo-observation of each sign keeps the interval honest when all problems agree.
    """
    difference = after.astype(float) - before.astype(float)
    padded = np.concatenate((difference, [1.0, -1.0]))
    half = Z95 * float(padded.std(ddof=1)) / math.sqrt(len(padded))
    mean = float(difference.mean())
    return Estimate(mean, mean - half, mean + half)


def _majority(group: Group, reward: Reward) -> bool:
    rule = reward.settings.get("rule")
    texts = [extract(c.text, rule) if rule else c.text for c in group.completions]
    votes = Counter(t for t in texts if t is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return bool(group.correct[texts.index(winner)])
