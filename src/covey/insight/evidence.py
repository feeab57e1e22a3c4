"""How sure a change of a mean over steps is, where it is looked at after every step.

Two standard errors are wrong in one look of twenty, so of a run of a hundred looks nearly always in some.
Here the looks share one error rate: the n-th may use ``RATE`` / (n (n + 1)), and all of these sum to
``RATE``. Looks at overlapping windows of steps see nearly the same, so each window counts as a look.
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
"""How often chance alone may ever make a comparison speak, in a run of any length."""
SHARES = "groups/dead"
"""Metrics whose names begin so are shares of the groups of a step."""
OFTEN = 15
"""Degrees of freedom of a step's standard error where the number of its groups is not known."""


@dataclass(frozen=True)
class Noise:
    """What chance does to a metric of one step."""

    variance: float
    freedom: float
    """Degrees of freedom of the variance; 0 where nothing is known of it."""

    def error(self, *windows: int) -> float:
        """The standard error of a mean over so many steps, or of the difference of two of these."""
        return math.sqrt(self.variance * sum(1 / max(1, steps) for steps in windows))


def known_values(records: Records, name: str) -> list[float]:
    """Those of the steps that have it."""
    values = (r.get(name) for r in records)
    return [v for v in values if v is not None and not math.isnan(v)]


def error_name(metric: str) -> str:
    """Under which name the standard error of a step's metric is logged, clustered by group.

    >>> error_name("reward/form/mean"), error_name("accuracy")
    ('reward/form/stderr', 'accuracy/stderr')
    """
    return f"{metric.removesuffix('/mean')}/stderr"


def noise(windows: Sequence[Records], name: str) -> Noise:
    """The noise of a metric, pooled over windows of steps.

    From the standard errors that were logged with it; of a share of the groups from their number; without
    these from what it differs by from one step to the next, which a slow course does not enlarge.
    """
    logged = [(r, r.get(error_name(name))) for window in windows for r in window if r.get(name) is not None]
    errors = [float(error) for _, error in logged if error is not None and not math.isnan(error)]
    if logged and len(errors) == len(logged):
        groups = [max(1.0, float(r.get("groups/count") or OFTEN + 1) - 1) for r, _ in logged]
        return Noise(sum(e**2 for e in errors) / len(errors), sum(groups))
    counts = [float(r.get("groups/count") or 0) for r, _ in logged]
    if name.startswith(SHARES) and all(counts) and counts:
        return _noise_of_share([float(r[name]) for r, _ in logged], counts)
    steps = [
        (later - earlier) ** 2 / 2
        for values in (known_values(window, name) for window in windows)
        for earlier, later in pairwise(values)
    ]
    return Noise(sum(steps) / len(steps), 2 * len(steps) / 3) if steps else Noise(math.inf, 0.0)


def _noise_of_share(shares: Sequence[float], counts: Sequence[float]) -> Noise:
    """Binomial, by the rule of succession: what was so in all groups so far need not be so in the next."""
    held = sum(share * count for share, count in zip(shares, counts, strict=True))
    likely = (held + 1) / (sum(counts) + 2)
    return Noise(likely * (1 - likely) * len(counts) / sum(counts), math.inf)


def errors_needed(freedom: float, looks: float, rate: float = RATE) -> float:
    """By how many standard errors a mean has to be off in the ``looks``-th look, on one side.

    Student's quantile; without end where nothing is known of the error.
    """
    return student(NormalDist().inv_cdf(1 - rate / (looks * (looks + 1))), freedom)


def student(normal: float, freedom: float) -> float:
    """Student's quantile where the normal one is ``normal``, by Wallace's approximation.

    >>> round(student(1.959964, 10), 2), student(3.0, math.inf)
    (2.23, 3.0)
    """
    if not freedom > 0:
        return math.inf
    if math.isinf(freedom):
        return normal
    wide = normal * (8 * freedom + 3) / (8 * freedom + 1)
    exponent = min(wide**2 / freedom, 700.0)  # of one degree of freedom it has no end
    return math.sqrt(freedom * math.expm1(exponent))
