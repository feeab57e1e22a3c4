"""Checks of the terms of a loss by their factors, read off the gradients that came back to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, mode

from covey.audit.checks.check import Fault
from covey.audit.checks.logprobs import old, pairs, reference
from covey.audit.record import AuditRecord, Use

MIN_CALLS = 2
"""Fewest calls whose terms must be known."""
MIN_STEPS = 3
"""Fewest optimizer steps that must have the same number of calls."""
KL_COEFFICIENT = "kl_coef"
"""Metric of an update with the coefficient of its KL, where that changes."""
MIN_CHANGES = 8
"""Fewest changes of a coefficient that show how it follows the KL."""
COEFFICIENTS = {"kl": "beta", "entropy": "algorithm.entropy.coef"}
"""Term of a loss -> setting of its coefficient."""


def factor_of(record: AuditRecord, name: str) -> float | None:
    """Return a term's factor relative to the policy term's; None if it is unknown."""
    whole = {term.call: term.factor for term in record.terms if term.name == "policy" and term.factor}
    terms = [term for term in record.terms if term.name == name and term.call in whole]
    return median(term.factor / whole[term.call] for term in terms) if len(terms) >= MIN_CALLS else None


def kl_is_subtracted(record: AuditRecord) -> Fault | None:
    """The KL of the loss has a negative factor."""
    factor = factor_of(record, "kl")
    if factor is None or factor >= 0:
        return None
    sentence = f"the KL enters the loss times {factor:.4g}"
    return Fault(f"{sentence}: the policy is paid for leaving its reference")


def kl_has_its_arguments_exchanged(record: AuditRecord) -> Fault | None:
    """The KL of the loss gets the reference's log-probs as the policy's, and the reverse."""
    exchanged = [term.exchanged for term in record.terms if term.name == "kl" and term.exchanged is not None]
    if len(exchanged) < MIN_CALLS or not all(exchanged):
        return None
    sentence = "the KL in the loss has its arguments exchanged"
    return Fault(f"{sentence}: it goes from the reference to the policy")


def entropy_enters_with_the_wrong_sign(record: AuditRecord) -> Fault | None:
    """The entropy has a positive factor in the loss, its coefficient being positive."""
    factor = factor_of(record, "entropy")
    coef = record.number(COEFFICIENTS["entropy"], 0.0)
    if factor is None or factor <= 0 or coef <= 0:
        return None
    name = record.own_name(COEFFICIENTS["entropy"])
    return Fault(f"the entropy enters the loss times {factor:.4g}: {name}={coef:g} drives it down")


def coefficient_is_another(record: AuditRecord) -> Fault | None:
    """The KL or the entropy enters the loss with a factor other than its coefficient."""
    for term, setting in COEFFICIENTS.items():
        factor, coef = factor_of(record, term), record.number(setting, 0.0)
        # With a target, a controller changes the coefficient during the run, so any factor may be right.
        adaptive = record.setting("kl_target") is not None and term == "kl"
        if factor is None or coef == 0 or adaptive or abs(abs(factor) - abs(coef)) <= 0.05 * abs(coef):
            continue
        sentence = (
            f"the {term} enters the loss times {factor:.4g} where {record.own_name(setting)} is {coef:g}"
        )
        return Fault(sentence)
    return None


def controller_is_inverted(record: AuditRecord) -> Fault | None:
    """Over at least eight changes, the coefficient of the KL always fell after the larger KLs and rose after
    the smaller ones, the reverse of what a controller should do.
    """
    updates = [
        (update.metrics.get(KL_COEFFICIENT), _mean_kl(record.uses_of(update))) for update in record.updates
    ]
    changes = [
        (kl, following > coef)
        for (coef, kl), (following, _) in pairwise(updates)
        if coef is not None and following is not None and kl is not None and following != coef
    ]
    risen = [kl for kl, rises in changes if rises]
    fallen = [kl for kl, rises in changes if not rises]
    if len(changes) < MIN_CHANGES or not risen or not fallen or max(risen) >= min(fallen):
        return None
    sentence = f"the KL's coefficient falls after KLs of {min(fallen):.2g} and more nats per token"
    return Fault(f"{sentence}, and rises after those of {max(risen):.2g} and less: it is upside down")


def _mean_kl(uses: Sequence[Use]) -> float | None:
    """Return an update's mean KL to the reference, in nats per token; None if it is unknown."""
    logs = [y - x for use in uses for _, x, y in pairs(use, old, reference)]
    return fmean(math.exp(log) - log - 1 for log in logs) if logs else None


def gradient_is_rescaled(record: AuditRecord) -> Fault | None:
    """Between calls of the loss without an optimizer step, the gradient so far is multiplied by a number
    other than 1: probably it was clipped after each micro-batch. Or it is set to 0 in every such call of at
    least three optimizer steps with the same number of calls.
    """
    if _gradient_is_dropped(record):
        sentence = (
            "the gradient is set to 0 between the micro-batches of an update: only the last one is trained"
        )
        return Fault(sentence)
    unmoved = {call.step for call in record.calls if call.moved is False}
    multiples = [(term.call, term.gradient_scaled) for term in record.terms if term.call in unmoved]
    scaled = [(call, by) for call, by in multiples if by is not None and abs(by - 1) > 1e-3]
    if len(scaled) < MIN_CALLS:
        return None
    call, by = scaled[0]
    sentence = f"between micro-batches of an update the gradient is multiplied by {by:.3g}"
    return Fault(f"{sentence} (before call {call}): the last ones count most")


def _gradient_is_dropped(record: AuditRecord) -> bool:
    steps = [n for n, call in enumerate(record.calls) if call.moved]
    sizes = {later - earlier for earlier, later in pairwise(steps)}
    kept = {term.call: term.gradient_kept for term in record.terms if term.name == "policy"}
    between = [kept.get(call.step) for call in record.calls if call.moved is False]
    # Weights too coarse to move in every step would also seem to rest, but not for equal numbers of calls.
    is_regular = len(steps) >= MIN_STEPS and len(sizes) == 1 and max(sizes) > 1
    return is_regular and len(between) >= MIN_CALLS and all(value is False for value in between)


def micro_batches_have_own_means(record: AuditRecord) -> Fault | None:
    """In OpenRLHF, the loss divides by the tokens of its micro-batch instead of the update's: a token counts
    1.1 times as much in one call as in another, although the two terms have the same factor.
    """
    if record.header.framework != "openrlhf" or any(call.tokens is not None for call in record.calls):
        return None
    factors = {term.call: round(term.factor, 6) for term in record.terms if term.name == "policy"}
    usual = mode(factors.values()) if factors else 1.0
    micro_batches = [call for call in record.calls if factors.get(call.step) == usual]
    sizes = [sum(sum(row.mask) for row in call.rows) for call in micro_batches]
    if usual >= 1 or len(sizes) < MIN_CALLS or min(sizes) == 0 or max(sizes) <= 1.1 * min(sizes):
        return None
    sentence = f"each micro-batch has a mean of its own: a token of one of {min(sizes)} tokens"
    times = max(sizes) / min(sizes)
    return Fault(f"{sentence} counts {times:.2g} times as much as a token of one of {max(sizes)}")


CHECKS = {
    "controller_inverted": controller_is_inverted,
    "coefficient_differs": coefficient_is_another,
    "gradient_rescaled": gradient_is_rescaled,
    "micro_means": micro_batches_have_own_means,
}
