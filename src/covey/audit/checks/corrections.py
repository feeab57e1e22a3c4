"""Checks of importance weights: the factors of a loss for the difference of trainer and sampler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import mode
from typing import NamedTuple

from covey.audit.checks.check import Fault
from covey.audit.checks.exchanges import exchanged_with_the_sampler
from covey.audit.checks.logprobs import old as old_logprobs
from covey.audit.checks.logprobs import pairs, sampler
from covey.audit.checks.tokens import location
from covey.audit.record import AuditRecord, Use

MIN_LOG_RATIO = 0.01
"""Fewest nats between trainer and sampler at which a token's weight shows its direction."""
MIN_WEIGHTS = 16
"""Fewest importance weights of an update that are judged."""


def weights_are_inverted(record: AuditRecord) -> Fault | None:
    """Recorded importance weights are the sampler's probability over the trainer's."""
    clear = [correction for use in record.uses for correction in _corrected(use)]
    wrong = [correction for correction in clear if correction.inverted]
    if len(wrong) < 4 or len(wrong) <= 0.5 * len(clear):
        return None
    use, token, weight, due = wrong[0][:4]
    sentence = f"importance weights are sampler over trainer: {weight:.4g}"
    return Fault(f"{sentence} where {due:.4g} is expected", use.update.step, location(use, token))


def exchanged_weights(record: AuditRecord) -> Fault | None:
    """The loss gets the two log-probs of its correction in the other order."""
    call = exchanged_with_the_sampler(record)
    if call is None:
        return None
    sentence = "the loss gets the sampler's log-probs as the old ones, and the old ones as the sampler's"
    return Fault(f"{sentence} (call {call.step} of {call.name})")


class Correction(NamedTuple):
    """The importance weight of a token at which trainer and sampler clearly differ."""

    use: Use
    token: int
    weight: float
    due: float
    """Trainer over sampler, for the token, or for the completion if the weight is a completion's."""
    inverted: bool
    """Whether the weight is sampler over trainer."""


def _corrected(use: Use) -> Iterator[Correction]:
    weights = use.row.corrections or ()
    apart = [(token, old - sampled) for token, old, sampled in pairs(use, old_logprobs, sampler)]
    # The weight of a whole completion is the product of its tokens' ratios.
    whole = sum(d for _, d in apart)
    for token, log_ratio in apart:
        weight = weights[token] if token < len(weights) else None
        if weight is None or weight <= 0 or abs(log_ratio) < MIN_LOG_RATIO:
            continue
        log = math.log(weight)
        d = log_ratio if abs(abs(log) - abs(log_ratio)) < abs(abs(log) - abs(whole)) else whole
        yield Correction(use, token, weight, math.exp(d), math.isclose(log, -d, rel_tol=0.05))


def corrections_are_constant(record: AuditRecord) -> Fault | None:
    """More than nine in ten importance weights of an update are the same number other than 1: probably all
    were clipped at a bound, and they do not follow from the log-probs of trainer and sampler.
    """
    for update in record.updates:
        weights = [w for use in record.uses_of(update) for w in _weights(use)]
        usual = mode(weights) if weights else 1.0
        count = weights.count(usual)
        capped = not math.isclose(usual, 1.0, rel_tol=1e-3)
        if capped and count >= MIN_WEIGHTS and count > 0.9 * len(weights):
            sentence = f"{count} of {len(weights)} importance weights are {usual:.4g}"
            return Fault(f"{sentence}: a bound clips what it should let pass", update.step)
    return None


def _weights(use: Use) -> list[float]:
    """Return the importance weights of trained tokens that are not the expected ones. A weight of 0 leaves
    its token out and does not count.
    """
    due = {token: math.exp(old - sampled) for token, old, sampled in pairs(use, old_logprobs, sampler)}
    trained = zip(use.row.corrections or (), use.row.mask or (), strict=False)
    weights = {token: weight for token, (weight, on) in enumerate(trained) if on and weight}
    return [w for token, w in weights.items() if not math.isclose(w, due.get(token, 0.0), rel_tol=0.01)]


CHECKS = {"correction_constant": corrections_are_constant}
