"""Statistics of held-out evaluations: accuracy and reward with intervals, unbiased pass@k, majority vote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey.errors import CheckpointError
from covey.system.notebook import result_html
from covey.system.text import percent

Z95 = 1.959964
"""The 97.5 % quantile of the normal distribution: standard errors on each side of a 95 % interval."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; with ``is_fraction`` it is a fraction, shown in percent.

    >>> str(wilson(31, 100)), str(Estimate(0.5, 0.25, 0.75, is_fraction=False))
    ('31 % [23, 41]', '0.5 [0.25, 0.75]')
    """

    value: float
    low: float
    high: float
    is_fraction: bool = True

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        if self.is_fraction:
            return f"{percent(self.value)} [{100 * self.low:.0f}, {100 * self.high:.0f}]"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"

    def __neg__(self) -> Estimate:
        return replace(self, value=-self.value, low=-self.high, high=-self.low)

    def as_json(self) -> dict[str, float]:
        """Return the mean and the ends of its interval."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Basis:
    """Hashes of an evaluation's verdict, rewards and problems; empty where they are not known."""

    verdict: str = ""
    """Hash of the function that decides what is correct: its source and its settings."""
    rewards: str = ""
    """Hash of all rewards, with weights and gates."""
    problems: tuple[str, ...] = ()
    """Hash of each problem: its prompt and its columns."""


@dataclass(frozen=True)
class Evaluation:
    """The results of a policy on n held-out problems, with k samples each."""

    greedy: np.ndarray
    """(n,) bool: whether the greedy completion is correct."""
    correct: np.ndarray
    """(n,) int64: number of correct samples among the k."""
    majority: np.ndarray
    """(n,) bool: whether the most frequent answer among the k samples is correct."""
    reward: np.ndarray
    """(n,) float64: mean reward of the k samples, weighted as in training; NaN where none was scored."""
    samples: int
    """Number of samples a problem, k."""
    verdict: str = ""
    """Name of the reward that decides what is correct."""
    basis: Basis = Basis()

    @property
    def pass_rate(self) -> np.ndarray:
        """(n,) float64: fraction of the samples that are correct."""
        return self.correct / self.samples

    def summary(self) -> dict[str, Estimate]:
        """The estimates by name: greedy, pass@1, pass@2, ... pass@k, maj@k, reward."""
        n = len(self.greedy)
        estimates = {"greedy": wilson(int(self.greedy.sum()), n)}
        for k in (k for k in (1, 2, 4, 8, 16, 32, 64) if k <= self.samples):
            estimates[f"pass@{k}"] = mean_interval(unbiased_pass_at_k(self.correct, self.samples, k))
        estimates[f"maj@{self.samples}"] = wilson(int(self.majority.sum()), n)
        estimates["reward"] = mean_interval(self.reward[~np.isnan(self.reward)], is_fraction=False)
        return estimates

    def reaches(self, bar: float, second_measurement: bool) -> bool:
        """Whether sampled accuracy has reached a bar.

        The first evaluation above a bar is partly luck. A second measurement, on other problems, corrects for
        it; without one the lower end of the interval has to reach the bar, or all problems have to be solved.
        """
        rate = self.summary()["pass@1"]
        return (rate.value if second_measurement else rate.low) >= bar or rate.value == 1

    def _repr_html_(self) -> str:
        """Return what a notebook shows: each estimate with its interval."""
        return result_html([f"{name}: {estimate}" for name, estimate in self.summary().items()])

    def record(self) -> dict[str, object]:
        """The evaluation as JSON: its summary with each interval's ends, and the outcome of every problem."""
        result: dict[str, object] = {
            "problems": len(self.greedy),
            "samples": self.samples,
            "verdict": self.verdict,
        }
        for name, estimate in self.summary().items():
            ends = {name: estimate.value, f"{name}/low": estimate.low, f"{name}/high": estimate.high}
            # JSON has no NaN, so what is not known becomes null.
            result |= {key: None if math.isnan(value) else value for key, value in ends.items()}
        outcome = {n: getattr(self, n).astype(int).tolist() for n in ("greedy", "correct", "majority")}
        rewards = [None if math.isnan(r) else r for r in self.reward.tolist()]
        basis = {**vars(self.basis), "problems": list(self.basis.problems)}
        return result | {"outcome": {**outcome, "reward": rewards}, "basis": basis}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Evaluation:
        """The evaluation that ``record`` wrote. Raises CheckpointError for a damaged one."""
        try:
            outcome = record["outcome"]
            basis = dict(record.get("basis", {}))
            basis["problems"] = tuple(basis.get("problems", ()))
            estimate = cls(
                greedy=np.array(outcome["greedy"], dtype=bool),
                correct=np.array(outcome["correct"], dtype=np.int64),
                majority=np.array(outcome["majority"], dtype=bool),
                reward=np.array(outcome["reward"], dtype=np.float64),
                samples=int(record["samples"]),
                verdict=str(record["verdict"]),
                basis=Basis(**basis),
            )
            per_problem = (estimate.greedy, estimate.correct, estimate.majority, estimate.reward)
            count = len(estimate.greedy)
            # Old records have no hashes of problems; those that do have one for each.
            if any(a.shape != (count,) for a in per_problem) or len(basis["problems"]) not in (0, count):
                raise ValueError("the number of outcomes is not that of the problems")
            if (
                not ((estimate.correct >= 0) & (estimate.correct <= estimate.samples)).all()
                or estimate.samples < 1
            ):
                raise ValueError(f"not 0 to {estimate.samples} correct samples")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"evals.jsonl: the evaluation of step {record.get('step')} is damaged ({error!r}). Restore "
                "the file, or remove its line"
            ) from None
        return estimate


def unbiased_pass_at_k(correct: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Unbiased pass@k of each problem: 1 - C(n - c, k) / C(n, k). (n,) -> (n,). Chen et al., 2107.03374.

    >>> unbiased_pass_at_k(np.array([0, 1, 4]), samples=4, k=2).tolist()
    [0.0, 0.5, 1.0]
    """
    return np.array([1 - math.comb(samples - int(c), k) / math.comb(samples, k) for c in correct])


def chance_of_dead(pass_rate: float, size: int) -> float:
    """The probability that a group of G is all correct or all incorrect: p^G + (1 - p)^G.

    >>> round(chance_of_dead(0.2, 8), 3)
    0.168
    """
    return float(pass_rate**size + (1 - pass_rate) ** size)


def wilson(successes: float, trials: float) -> Estimate:
    """A proportion with its Wilson score interval; for means of fractions it is wider than necessary."""
    if trials == 0:
        return Estimate(math.nan, 0.0, 1.0)
    p = successes / trials
    z2 = Z95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(values: np.ndarray, is_fraction: bool = True) -> Estimate:
    """The mean over problems with its interval: problems are the unit, not samples.

    Fractions get the interval of ``over_seeds``, which has width even if nothing is solved, or everything.
    Other values get the normal interval; it is infinite for fewer than two values.
    """
    if is_fraction and len(values):  # as one seed, (1, n)
        return over_seeds(values[None])
    least, most = (0.0, 1.0) if is_fraction else (-math.inf, math.inf)
    if len(values) < 2:
        return Estimate(float(values.mean()) if len(values) else math.nan, least, most, is_fraction)
    mean = float(values.mean())
    half = Z95 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, is_fraction)


def gain(
    before: np.ndarray,
    after: np.ndarray,
    doubt: float = 1.0,
    is_fraction: bool = True,
    standard_errors: float = Z95,
) -> Estimate:
    """Mean paired difference over the same problems, with its interval. (n,), (n,) -> Estimate.

    ``standard_errors`` is the number of them on either side; the default gives a 95 % interval. One
    pseudo-observation of each sign, of size ``doubt``, keeps the width positive when all problems agree. A
    fraction cannot change by more than 1.
    """
    difference = after.astype(float) - before.astype(float)
    difference = difference[~np.isnan(difference)]
    bound = 1.0 if is_fraction else math.inf
    if not len(difference):
        return Estimate(math.nan, -bound, bound, is_fraction)
    padded = np.concatenate((difference, [doubt, -doubt]))
    # Cornish and Fisher: z + (z^3 + z) / 4 df is Student's quantile for z, up to terms of 1 / df^2.
    student = standard_errors + (standard_errors**3 + standard_errors) / (4 * (len(padded) - 1))
    half = student * float(padded.std(ddof=1)) / math.sqrt(len(padded))
    mean = float(difference.mean())
    return Estimate(mean, max(-bound, mean - half), min(bound, mean + half), is_fraction)


def paired_bootstrap(before: np.ndarray, after: np.ndarray) -> Estimate:
    """Mean difference over the same problems, with its 95 % bootstrap interval over problems. (n,), (n,).

    One pseudo-problem of each sign, as large as the range of the values, is drawn with the others: otherwise
    a few problems that agree would have an interval of no width. Equal inputs give equal intervals.
    """
    difference = after - before
    difference = difference[~np.isnan(difference)]
    if not len(difference):
        return Estimate(math.nan, -math.inf, math.inf, is_fraction=False)
    values = np.concatenate((before, after))
    doubt = float(np.ptp(values[~np.isnan(values)]))
    padded = np.concatenate((difference, [doubt, -doubt]))
    # (4000, n + 2) differences, each row one resampled set of problems.
    means = np.random.default_rng(0).choice(padded, (4000, len(padded))).mean(1)
    mean = float(difference.mean())
    # The pseudo-problems sum to 0 but shrink the mean, so the interval is moved back around the real one.
    low, high = np.quantile(means, (0.025, 0.975)) - padded.mean() + mean
    return Estimate(mean, float(low), float(high), is_fraction=False)


def why_incomparable(
    before: Evaluation, after: Evaluation, times: tuple[str, str] = ("at first", "at the end")
) -> str:
    """The reason why the accuracies of two evaluations cannot be compared; empty if they can."""
    if before.verdict != after.verdict:
        return f"correct meant {before.verdict} {times[0]} and {after.verdict} {times[1]}"
    if before.basis.verdict and after.basis.verdict and before.basis.verdict != after.basis.verdict:
        return f"{before.verdict}, which says what is correct, is not the same {times[0]} and {times[1]}"
    if not len(on_shared_problems(before, after)[0].greedy):
        return f"the held-out problems {times[0]} and {times[1]} have none in common"
    return ""


def on_shared_problems(before: Evaluation, after: Evaluation) -> tuple[Evaluation, Evaluation]:
    """Restrict both evaluations to the problems that both have measured, in the same order.

    A resume may have changed the file, or eval.problems. If the rewards differ, their values become NaN.
    """
    hashes = [_number_repeats(e.basis.problems) for e in (before, after)]
    if all(hashes):
        shared = [h for h in hashes[0] if h in hashes[1]]
        places = [np.array([index_of[h] for h in shared], dtype=np.int64) for index_of in hashes]
    else:  # without hashes all that can be assumed is the same order
        places = [np.arange(min(len(before.greedy), len(after.greedy)))] * 2
    names = ("greedy", "correct", "majority", "reward")
    # The hashes of all problems would no longer fit the selected ones, so they are dropped.
    first, second = (
        replace(
            e, **{name: getattr(e, name)[index_of] for name in names}, basis=replace(e.basis, problems=())
        )
        for e, index_of in zip((before, after), places, strict=True)
    )
    if before.basis.rewards and after.basis.rewards and before.basis.rewards != after.basis.rewards:
        first = replace(first, reward=np.full(len(first.reward), np.nan))
    return first, second


def _number_repeats(hashes: Sequence[str]) -> dict[tuple[str, int], int]:
    """(hash, its number of earlier occurrences) -> its index: a problem may occur twice."""
    occurrences = Counter[str]()
    indices = dict[tuple[str, int], int]()
    for index, digest in enumerate(hashes):
        indices[digest, occurrences[digest]] = index
        occurrences[digest] += 1
    return indices


def gains(before: Evaluation, after: Evaluation, standard_errors: float = Z95) -> dict[str, Estimate]:
    """The changes from one evaluation to the other: ``greedy``, ``sampled`` and ``reward``.

    ``standard_errors`` is the number of them on either side of their intervals.

    Averaging k samples divides the doubt by sqrt(k); a reward's range is taken from the values at hand.
    """
    before, after = on_shared_problems(before, after)
    doubt = 1 / math.sqrt(min(before.samples, after.samples))
    rewards = np.concatenate((before.reward, after.reward))
    spread = float(np.ptp(rewards[~np.isnan(rewards)])) if not np.isnan(rewards).all() else 0.0
    return {
        "greedy": gain(before.greedy, after.greedy, standard_errors=standard_errors),
        "sampled": gain(before.pass_rate, after.pass_rate, doubt, standard_errors=standard_errors),
        "reward": gain(
            before.reward, after.reward, doubt * spread, is_fraction=False, standard_errors=standard_errors
        ),
    }


STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t distribution for 1 to 10 degrees of freedom."""


def over_seeds(values: np.ndarray, low: float = 0.0) -> Estimate:
    """The mean over seeds and problems with its interval. (S, n) -> Estimate; values in ``low`` to 1.

    Two variances add up: that of the seeds' means, with Student's quantile, and that of the problems' means,
    with the normal one and two pseudo-problems at either end (Agresti and Coull). One seed has no variance
    of the first kind. For the difference of two settings, pair by seed and problem first.

    >>> str(over_seeds(np.array([[1.0] * 100 + [0.0] * 100])))
    '50 % [43, 57]'
    """
    # (n + 4,): each problem's mean over seeds, and the pseudo-problems.
    seeds = len(values)
    by_problem = np.append(values.mean(0), (low, 1.0, low, 1.0))
    variance = Z95**2 * float(by_problem.var(ddof=1)) / len(by_problem)
    if seeds > 1:
        # S seeds have S - 1 degrees of freedom; beyond the table, the expansion that ``gain`` uses.
        quantile = STUDENT[seeds - 2] if seeds < 12 else Z95 + (Z95**3 + Z95) / (4 * (seeds - 1))
        variance += quantile**2 * float(values.mean(1).var(ddof=1)) / seeds
    half = math.sqrt(variance)
    centre = float(by_problem.mean())
    return Estimate(float(values.mean()), max(low, centre - half), min(1.0, centre + half))
