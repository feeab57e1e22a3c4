"""The odds that a group is dead, by its size: from the rewards of a few groups, with what is not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb

import numpy as np
import torch

from covey.estimates import Estimate, wilson
from covey.types import Group

Outcome = float | frozenset[tuple[str, float]] | None
"""What a completion was paid; None where it ties with no other, not even with one of its kind."""
Counts = Mapping[Outcome, int]
"""How many completions of a problem had each outcome."""
CONCENTRATIONS = np.logspace(-3, 3, 61)


def reward_counts(group: Group) -> Counts:
    """How many completions of a group had each outcome; those without a reward teach nothing: not counted.

    Of credit by step, an outcome is what each function paid all steps of a completion; where that differs
    from step to step, or is compared with a critic's values, the completion makes any group live.
    """
    return Counter(_outcome(group, int(i)) for i in np.flatnonzero(group.scorable))


def _outcome(group: Group, i: int) -> Outcome:
    if group.credit == "completion":
        return float(group.rewards[i])
    paid = group.compared(i)
    if group.credit == "token" or any(len(values) > 1 for values in paid.values()):
        return None
    return frozenset((name, value) for name, values in paid.items() for value in values)


def dead_share(counts: Sequence[Counts], size: int) -> Estimate:
    """The fraction of groups of ``size`` whose rewards all tie, with a 95 % interval; problems are the unit.

    A problem whose rewards r have probabilities p_r ties with sum_r p_r^G, which for right and wrong is
    p^G + (1-p)^G. The measured share k/n put in for p would be too pessimistic: of 8 failures it makes
    certain failure. Up to the n completions drawn, sum_r C(k_r, G) / C(n, G) has the right mean; beyond n
    the mean under the posterior of a Dirichlet prior fitted to all problems is taken; there a problem says as
    much as sqrt(n / G) of one drawn in full, so that in simulations the interval mostly holds the truth.
    """
    if not counts:
        return wilson(0, 0)
    ties = tie_chances(counts, size)
    known = float(np.mean([min(1.0, max(sum(own.values()), 1) / size) for own in counts])) ** 0.5
    return wilson(float(ties.sum()) * known, len(ties) * known)


def tie_chances(counts: Sequence[Counts], size: int) -> np.ndarray:
    """(N,) for each problem, how likely a group of ``size`` ties, as ``dead_share`` has it."""
    prior = _prior(counts)
    return np.array([_tie(own, size, prior) for own in counts])


def _tie(own: Counts, size: int, prior: Mapping[Outcome, float]) -> float:
    drawn = sum(own.values())
    if drawn < 2:
        return float(None not in own)
    if size <= drawn:
        return sum(comb(k, size) for r, k in own.items() if r is not None) / comb(drawn, size)
    total = drawn + sum(prior.values())
    weights = np.array([w + own.get(r, 0) for r, w in prior.items() if r is not None])
    rising = _lgamma(weights + size) - _lgamma(weights)
    return float(np.exp(rising - _lgamma(total + size) + _lgamma(total)).sum())


def _prior(counts: Sequence[Counts]) -> dict[Outcome, float]:
    """Pseudo-counts of each reward: the rewards of all problems together, as strong as they are alike.

    A reward that nobody has seen yet (NaN) gets half a completion: 0 of 200 correct does not prove never.
    """
    pooled: Counter[Outcome] = Counter()
    for own in counts:
        pooled.update(own)
    total = sum(pooled.values()) + 0.5
    mean = np.array([*(n / total for n in pooled.values()), 0.5 / total])
    table = np.array([[own.get(r, 0) for r in pooled] + [0] for own in counts], dtype=float)
    drawn = table.sum(1)

    def likelihood(strength: float) -> float:
        fits = _lgamma(strength * mean + table) - _lgamma(strength * mean)
        return float(fits.sum() + (_lgamma(strength) - _lgamma(strength + drawn)).sum())

    best = max(CONCENTRATIONS, key=likelihood)
    return dict(zip([*pooled, float("nan")], (best * mean).tolist(), strict=True))


def _lgamma(values: np.ndarray | float) -> np.ndarray:
    return torch.lgamma(torch.as_tensor(values, dtype=torch.float64)).numpy()
