"""Coefficients that follow a step: adaptive KL, adaptive entropy, and the KL guard that raises its weight."""

from __future__ import annotations

import math
from collections.abc import Mapping

from covey.objective.algorithms import Algorithm
from covey.objective.controllers import adaptive_entropy, adaptive_kl, raised
from covey.runs.checkpoint import Coefficients


def first(algorithm: Algorithm) -> Coefficients:
    """What a run begins with."""
    kl, entropy = algorithm.kl, algorithm.entropy
    return Coefficients(kl.coef if kl else 0.0, entropy.coef if entropy else 0.0)


def after(
    now: Coefficients, algorithm: Algorithm, metrics: Mapping[str, float], completions: int, level: int | None
) -> Coefficients:
    """The next step's coefficients, after ``completions`` were sampled.

    ``level`` is that of the KL guard (``guards.kl_level``) where it raises the coefficient, None elsewhere.
    """
    coef, bonus = now.kl, now.entropy
    kl, entropy = algorithm.kl, algorithm.entropy
    if kl is not None and level is not None:
        coef = raised(coef, kl.coef, level)
    if kl is not None and kl.target is not None and "kl/completion_k1" in metrics:
        coef = adaptive_kl(coef, metrics["kl/completion_k1"], kl.target, completions, kl.horizon)
    seen = metrics.get("entropy", math.nan)
    if entropy is not None and entropy.target is not None and math.isfinite(seen):
        bonus = adaptive_entropy(bonus, seen, entropy.target)
    return Coefficients(coef, bonus)
