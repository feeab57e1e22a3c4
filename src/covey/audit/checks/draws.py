"""A check of how tokens were drawn, by the entropy of the distribution that the trainer gives them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from covey.audit.checks.check import Fault, MissingField
from covey.audit.checks.logprobs import (
    SAME_PROGRAM_NATS,
    at_1,
    distance,
    first_uses,
    recomputed,
    sampler,
    trainer,
)
from covey.audit.record import AuditRecord, Numbers, Use

MIN_TOKENS = 256
"""Fewest tokens that a distribution is compared with."""
ERRORS = 5.0
"""Number of standard errors that chance does not reach."""
MIN_NATS = 0.05
"""A mean difference that matters."""
CUT = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Setting of sampling that leaves tokens out -> its value without effect."""


def drawn_from_another_distribution(record: AuditRecord) -> Fault | MissingField | None:
    """TRL's generation_kwargs have another temperature than its log-probs. Or, in first updates, the
    trainer's log-probs of the sampled tokens are higher or lower than its own entropy allows for draws from
    it. Or, without entropies, its log-probs at temperature 1 are higher than those at the sampling
    temperature, which cannot be on average for tokens that were drawn there. Each must exceed 5 standard
    errors and .05 nats per token. A run is not judged if its settings cut the distribution, if its sampler
    has log-probs of its own, or if its trainer differs from its own model.
    """
    hot = record.header.settings.get("generation_kwargs.temperature")
    temperature = record.number("temperature", 1.0)
    if isinstance(hot, int | float) and hot != temperature:
        sentence = f"generation_kwargs draw tokens at temperature {hot:g}"
        return Fault(f"{sentence}, and log-probs are at {temperature:g}")
    declared = any(max(record.number(name, neutral), 0.0) != neutral for name, neutral in CUT.items())
    if declared or _has_another_sampler(record):
        return None
    if distance(first_uses(record), trainer, recomputed) > SAME_PROGRAM_NATS:
        return None
    if "entropies" not in record.fields:
        return _drawn_at_1(record) if temperature != 1 else MissingField("entropies")
    # Log-prob plus entropy is 0 on average, whatever came before the token.
    by_use = [(use, [*_sums_of_tokens(use, trainer(use), use.row.entropies)]) for use in first_uses(record)]
    mean = _mean_beyond_chance([value for _, values in by_use for value in values])
    if mean is None:
        return None
    at_first = [value for use, values in by_use if not use.changed_before for value in values]
    if mean < 0 and at_first and sum(at_first) / len(at_first) > 0.25 * mean and not _beyond(at_first):
        sentence = "tokens are drawn from the trainer's distribution until its weights change, and then their"
        sentence += (
            f" log-probs are {-mean:.2g} nats below what its entropy gives: the sampler has older weights"
        )
        return Fault(sentence, next(use.update.step for use, _ in by_use if use.changed_before))
    kind = "sharper" if mean > 0 else "flatter"
    sentence = f"tokens are drawn from a {kind} distribution than the trainer's: their log-probs are"
    return Fault(f"{sentence} {abs(mean):.2g} nats {'above' if mean > 0 else 'below'} what its entropy gives")


def _has_another_sampler(record: AuditRecord) -> bool:
    """Whether the sampler's log-probs are recorded, and are not the model's own."""
    uses = first_uses(record)
    return "sampler_logprobs" in record.fields and not distance(uses, sampler, recomputed) < SAME_PROGRAM_NATS


def _drawn_at_1(record: AuditRecord) -> Fault | None:
    """Return a fault if tokens are likelier at temperature 1 than at the sampling temperature."""
    gains = [
        value for use in first_uses(record) for value in _sums_of_tokens(use, recomputed(use), at_1(use), -1)
    ]
    mean = _mean_beyond_chance(gains)
    if mean is None or mean > 0:
        return None
    temperature = record.number("temperature", 1.0)
    sentence = f"tokens are likelier at temperature 1 than at {temperature:g}, at which they should be drawn"
    return Fault(f"{sentence}: by {-mean:.2g} nats")


def _beyond(values: Sequence[float]) -> bool:
    """Whether a sum of terms that have a mean of 0 is probably not chance."""
    return abs(sum(values)) > 3 * math.sqrt(sum(value**2 for value in values))


def _mean_beyond_chance(values: Sequence[float]) -> float | None:
    """Return the mean of numbers that have a mean of 0 by chance; None if it may be chance."""
    error = math.sqrt(sum(value**2 for value in values))
    mean = sum(values) / max(len(values), 1)
    is_chance = len(values) < MIN_TOKENS or abs(mean) < MIN_NATS or abs(sum(values)) < ERRORS * error
    return None if is_chance else mean


def _sums_of_tokens(use: Use, a: Numbers | None, b: Numbers | None, factor: int = 1) -> Iterator[float]:
    """Yield a plus a multiple of b for each sampled token.

    A mask does not matter: one that leaves out truncated completions would choose among them.
    """
    inserted = use.sample.inserted or [False] * len(use.sample.ids or ())
    values = zip(a or (), b or (), inserted, strict=False)
    return (x + factor * y for x, y, off in values if x is not None and y is not None and not off)


CHECKS = {"drawn_otherwise": drawn_from_another_distribution}
