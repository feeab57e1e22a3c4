"""Tests whether a mean over steps has changed, repeated after every step.

A test at two standard errors gives a false alarm in one of twenty looks, so nearly every run of a hundred
looks has some. Here all looks share one error rate: the n-th may spend ``RATE`` / (n (n + 1)), which sums to
``RATE``. Looks at overlapping windows see nearly the same data, so each window of steps counts as one look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any

Records = Sequence[Mapping[str, Any]]
RATE = 0.002
"""Probability of a false alarm of one comparison, over a run of any length."""
GROUP_FRACTIONS = "groups/dead"
"""Prefix of metrics that are fractions of the groups of a step."""
ASSUMED_FREEDOM = 15
"""Degrees of freedom of a step's standard error if the number of its groups is unknown."""


@dataclass(frozen=True)
class Noise:
    """The sampling noise of a metric in one step."""

    variance: float
    freedom: float
    """Degrees of freedom of the variance; 0 if nothing is known about it."""

    def error(self, *windows: int) -> float:
        """Return the standard error of a mean over a window of steps, or of the difference of two windows."""
        return math.sqrt(self.variance * sum(1 / max(1, steps) for steps in windows))


def known_values(records: Records, name: str) -> list[float]:
    """Return the values of a metric in the steps that have it."""
    values = (r.get(name) for r in records)
    return [v for v in values if v is not None and not math.isnan(v)]


def error_name(metric: str) -> str:
    """Return the name under which the standard error of a metric is logged, clustered by group.

    >>> error_name("reward/form/mean"), error_name("accuracy")
    ('reward/form/stderr', 'accuracy/stderr')
    """
    return f"{metric.removesuffix('/mean')}/stderr"


def noise(windows: Sequence[Records], name: str) -> Noise:
    """Return the noise of a metric, pooled over windows of steps.

    It comes from the logged standard errors, or for a fraction of groups from the number of groups. Without
    either it comes from the differences of successive steps, which a slow trend hardly enlarges.
    """
    logged = [record for window in windows for record in window if record.get(name) is not None]
    errors = known_values(logged, error_name(name))
    if logged and len(errors) == len(logged):
        # A step of unknown size counts as one of ASSUMED_FREEDOM degrees of freedom.
        freedoms = [
            max(1.0, float(record.get("groups/count") or ASSUMED_FREEDOM + 1) - 1) for record in logged
        ]
        return Noise(sum(error**2 for error in errors) / len(errors), sum(freedoms))
    counts = [float(record.get("groups/count") or 0) for record in logged]
    if name.startswith(GROUP_FRACTIONS) and all(counts) and counts:
        return _noise_of_share([float(record[name]) for record in logged], counts)
    return _noise_of_changes([known_values(window, name) for window in windows])


def _noise_of_changes(windows: Sequence[Sequence[float]]) -> Noise:
    # Half of a squared difference of two steps is an estimate of the variance. Neighbouring differences share
    # a step, so n of them count for about 2n / 3 degrees of freedom.
    squares = [(later - earlier) ** 2 / 2 for values in windows for earlier, later in pairwise(values)]
    return Noise(sum(squares) / len(squares), 2 * len(squares) / 3) if squares else Noise(math.inf, 0.0)


def _noise_of_share(shares: Sequence[float], counts: Sequence[float]) -> Noise:
    """Return binomial noise with (k + 1) / (n + 2) for the rate: a rate of 0 or 1 must not mean no noise."""
    successes = sum(share * count for share, count in zip(shares, counts, strict=True))
    rate = (successes + 1) / (sum(counts) + 2)
    return Noise(rate * (1 - rate) * len(counts) / sum(counts), math.inf)


def errors_needed(freedom: float, looks: float, rate: float = RATE) -> float:
    """Return how many standard errors a mean has to differ in look number ``looks``, one-sided.

    This is Student's quantile; infinite if nothing is known about the error.
    """
    return student(NormalDist().inv_cdf(1 - rate / (looks * (looks + 1))), freedom)


def student(normal: float, freedom: float) -> float:
    """Return Student's quantile for a normal quantile ``normal``, by Wallace's approximation.

    >>> round(student(1.959964, 10), 2), student(3.0, math.inf)
    (2.23, 3.0)
    """
    if not freedom > 0:
        return math.inf
    if math.isinf(freedom):
        return normal
    wide = normal * (8 * freedom + 3) / (8 * freedom + 1)
    exponent = min(wide**2 / freedom, 700.0)  # it overflows with one degree of freedom
    return math.sqrt(freedom * math.expm1(exponent))
