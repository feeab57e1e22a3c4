"""A check of how tokens were drawn, by the entropy of the distribution that the trainer gives them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from covey.audit.check import Fault
from covey.audit.logprobs import SAME_PROGRAM_NATS, distance, first_uses, recomputed, trainer
from covey.audit.record import AuditRecord, Use

MIN_TOKENS = 256
"""Fewest tokens that a distribution is compared with."""
ERRORS = 5.0
"""Number of standard errors that chance does not reach."""
MIN_NATS = 0.05
"""A mean difference that matters."""
CUT = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Setting of sampling that leaves tokens out -> its value without effect."""


def drawn_from_another_distribution(record: AuditRecord) -> Fault | None:
    """TRL's generation_kwargs have another temperature than its log-probs. Or the tokens of first updates are
    likelier for the trainer than its own entropy lets draws of it be, or less likely: by 5 standard errors
    and .05 nats per token. Not asked of a run whose settings cut the distribution, whose sampler has
    log-probs of its own, or whose trainer differs from its own model.
    """
    hot = record.header.settings.get("generation_kwargs.temperature")
    temperature = record.number("temperature", 1.0)
    if isinstance(hot, int | float) and hot != temperature:
        return Fault(
            f"generation_kwargs draw tokens at temperature {hot:g}, and log-probs are at {temperature:g}"
        )
    declared = any(max(record.number(name, neutral), 0.0) != neutral for name, neutral in CUT.items())
    if declared or "sampler_logprobs" in record.fields:
        return None
    if distance(first_uses(record), trainer, recomputed) > SAME_PROGRAM_NATS:
        return None
    # Log-prob plus entropy is 0 on average, whatever came before the token.
    surplus = [value for use in first_uses(record) for value in _surplus(use)]
    error = math.sqrt(sum(value**2 for value in surplus))
    mean = sum(surplus) / max(len(surplus), 1)
    if len(surplus) < MIN_TOKENS or abs(mean) < MIN_NATS or abs(sum(surplus)) < ERRORS * error:
        return None
    kind = "sharper" if mean > 0 else "flatter"
    sentence = f"tokens are drawn from a {kind} distribution than the trainer's: their log-probs are"
    return Fault(f"{sentence} {abs(mean):.2g} nats {'above' if mean > 0 else 'below'} what its entropy gives")


def _surplus(use: Use) -> Iterator[float]:
    inserted = use.sample.inserted or [False] * len(use.sample.ids or ())
    # All sampled tokens: a mask that leaves out truncated completions would choose among them.
    rows = zip(use.row.logprobs or (), use.row.entropies or (), inserted, strict=False)
    return (p + h for p, h, off in rows if p is not None and h is not None and not off)


CHECKS = {"drawn_otherwise": drawn_from_another_distribution}
