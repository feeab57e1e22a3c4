"""Estimates of the probability of a dead group, by group size, with intervals, from a few groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb

import numpy as np
import torch

from covey.runs.estimates import Estimate, wilson
from covey.types import Group

Outcome = float | frozenset[tuple[str, float]] | None
"""The reward of a completion. None ties with no other completion, not even with another None."""
Counts = Mapping[Outcome, int]
"""Number of completions of a problem with each outcome."""
CONCENTRATIONS = np.logspace(-3, 3, 61)


def reward_counts(group: Group) -> Counts:
    """Count the completions of a group with each outcome; those without a reward are not counted.

    With credit by step, the outcome is the one value that each function paid to all steps. If the values
    differ from step to step, or are compared with a critic's, the outcome is None: the completion makes any
    group live.
    """
    return Counter(_outcome(group, int(i)) for i in np.flatnonzero(group.scorable))


def _outcome(group: Group, i: int) -> Outcome:
    if group.credit == "completion":
        return float(group.rewards[i])
    paid = group.values_of(i)
    if group.credit == "token" or any(len(values) > 1 for values in paid.values()):
        return None
    return frozenset((name, value) for name, values in paid.items() for value in values)


def dead_share(counts: Sequence[Counts], size: int) -> Estimate:
    """Estimate the fraction of groups of ``size`` that are dead, with a 95 % interval over problems.

    A group of G whose rewards r have probabilities p_r ties with probability sum_r p_r^G; for correct and
    incorrect that is p^G + (1-p)^G. Plugging in the measured rate k/n is too pessimistic: 0 of 8 would mean
    p = 0. For G up to the n samples, sum_r C(k_r, G) / C(n, G) is unbiased. Beyond n it is the mean under
    the posterior of a Dirichlet prior that was fitted to all problems. There a problem counts as sqrt(n / G)
    of one with G samples, with which the interval mostly covered the truth in simulations.
    """
    if not counts:
        return wilson(0, 0)
    ties = tie_chances(counts, size)
    samples = np.array([max(sum(problem_counts.values()), 1) for problem_counts in counts])
    weight = float(np.mean(np.minimum(1.0, samples / size))) ** 0.5
    return wilson(float(ties.sum()) * weight, len(ties) * weight)


def tie_chances(counts: Sequence[Counts], size: int) -> np.ndarray:
    """Return (N,) probabilities that a group of ``size`` ties, one per problem; see ``dead_share``."""
    prior = _prior(counts)
    return np.array([_tie(problem_counts, size, prior) for problem_counts in counts])


def _tie(counts: Counts, size: int, prior: Mapping[Outcome, float]) -> float:
    """Return the probability that a group of one problem ties, given the outcomes of its completions."""
    samples = sum(counts.values())
    if samples < 2:
        return float(None not in counts)
    if size <= samples:
        ties = sum(comb(k, size) for outcome, k in counts.items() if outcome is not None)
        return ties / comb(samples, size)
    total = samples + sum(prior.values())
    weights = np.array([w + counts.get(r, 0) for r, w in prior.items() if r is not None])
    # E[p_r^G] under a Dirichlet is (w_r)_G / (sum w)_G with rising factorials, in logs.
    rising = _lgamma(weights + size) - _lgamma(weights)
    return float(np.exp(rising - _lgamma(total + size) + _lgamma(total)).sum())


def _prior(counts: Sequence[Counts]) -> dict[Outcome, float]:
    """Return Dirichlet pseudo-counts of each reward: the pooled rewards, stronger if problems are alike.

    A reward that has not been seen yet (NaN) gets half a completion: 0 of 200 correct does not prove never.
    """
    pooled: Counter[Outcome] = Counter()
    for problem_counts in counts:
        pooled.update(problem_counts)
    total = sum(pooled.values()) + 0.5
    mean = np.array([*(n / total for n in pooled.values()), 0.5 / total])
    # (problems, rewards + 1): the last column is the reward not seen yet.
    rows = [[*(problem_counts.get(r, 0) for r in pooled), 0] for problem_counts in counts]
    table = np.array(rows, dtype=float)
    samples = table.sum(1)

    # Log-likelihood of the Dirichlet-multinomial with prior strength * mean, up to constants.
    def likelihood(strength: float) -> float:
        fits = _lgamma(strength * mean + table) - _lgamma(strength * mean)
        return float(fits.sum() + (_lgamma(strength) - _lgamma(strength + samples)).sum())

    best = max(CONCENTRATIONS, key=likelihood)
    return dict(zip([*pooled, float("nan")], (best * mean).tolist(), strict=True))


def _lgamma(values: np.ndarray | float) -> np.ndarray:
    return torch.lgamma(torch.as_tensor(values, dtype=torch.float64)).numpy()
