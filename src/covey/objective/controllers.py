"""Controllers: loss coefficients adapted after every step, by KL, by entropy and by the KL guard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from covey.objective.algorithms import Algorithm


@dataclass(frozen=True)
class Coefficients:
    """Coefficients in the loss that are adapted from step to step."""

    kl: float = 0.0
    entropy: float = 0.0


def first_coefficients(algorithm: Algorithm) -> Coefficients:
    """Return the coefficients that a run begins with."""
    kl = algorithm.kl
    entropy = algorithm.entropy
    return Coefficients(kl.coef if kl else 0.0, entropy.coef if entropy else 0.0)


def resumed_coefficients(saved: Coefficients, algorithm: Algorithm, guarded: bool) -> Coefficients:
    """Return a checkpoint's coefficients where they are adapted, else the config's, which may have changed.

    ``guarded``: the KL guard adapts the coefficient of the KL.
    """
    first = first_coefficients(algorithm)
    moves_kl = guarded or (algorithm.kl is not None and algorithm.kl.target is not None)
    moves_entropy = algorithm.entropy is not None and algorithm.entropy.target is not None
    return Coefficients(saved.kl if moves_kl else first.kl, saved.entropy if moves_entropy else first.entropy)


def next_coefficients(
    current: Coefficients,
    algorithm: Algorithm,
    metrics: Mapping[str, float],
    completions: int,
    too_far: bool | None,
) -> Coefficients:
    """Return the next step's coefficients, after ``completions`` were sampled.

    ``too_far``: whether the KL exceeds the guard's bound, if the guard may raise the coefficient, else None.
    """
    coef = current.kl
    bonus = current.entropy
    kl = algorithm.kl
    entropy = algorithm.entropy
    if kl is not None and too_far is not None:
        coef = raise_coef(coef, kl.coef, too_far)
    if kl is not None and kl.target is not None and "kl/completion_k1" in metrics:
        coef = adaptive_kl(coef, metrics["kl/completion_k1"], kl.target, completions, kl.horizon)
    # NaN in a step without trained tokens; the bonus then stays as it is.
    measured = metrics.get("entropy", math.nan)
    if entropy is not None and entropy.target is not None and math.isfinite(measured):
        bonus = adaptive_entropy(bonus, measured, entropy.target)
    return Coefficients(coef, bonus)


def adaptive_kl(coef: float, kl: float, target: float, completions: int, horizon: int) -> float:
    """coef (1 + clip(kl / target - 1, -.2, .2) min(n / horizon, 1)). Ziegler et al., 1909.08593.

    ``kl`` and ``target`` are nats per completion; n completions were seen since the last update.

    >>> round(adaptive_kl(0.1, kl=12.0, target=6.0, completions=1000, horizon=10_000), 4)
    0.102
    """
    # At most 20 % in a step, however far the KL is from the target.
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(completions / horizon, 1.0))


def adaptive_entropy(
    coef: float, entropy: float, target: float, step: float = 0.005, highest: float = 0.1
) -> float:
    """Raise the bonus by ``step`` while entropy < target, else lower it; within [0, highest].

    Entropy in nats per token. Skywork-OR1, arXiv 2505.22312, without its gate, which drops the bonus
    at once while entropy > target; here it fades out by ``step``.

    >>> adaptive_entropy(0.0, entropy=0.1, target=0.2)
    0.005
    """
    return min(max(coef + (step if entropy < target else -step), 0.0), highest)


def raise_coef(coef: float, start: float, too_far: bool, factor: float = 1.5) -> float:
    """coef times ``factor`` in each step above the KL guard's bound, and back towards ``start`` below it.

    >>> raise_coef(0.1, start=0.1, too_far=True), raise_coef(0.15, start=0.1, too_far=False)
    (0.15000000000000002, 0.1)
    """
    return coef * factor if too_far else max(start, coef / factor)
