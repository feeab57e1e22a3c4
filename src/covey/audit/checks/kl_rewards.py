"""Checks of a KL to the reference in the rewards of tokens and completions: it has to be subtracted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from covey.audit.checks.check import Fault
from covey.audit.checks.rescored import sum_of
from covey.audit.frameworks import FRAMEWORKS
from covey.audit.record import AuditRecord, Use

MIN_FACTOR = 1e-5
"""The smallest coefficient of a charged KL."""
MIN_COMPLETIONS = 8
"""Fewest completions from whose rewards and scores a KL is inferred."""


def kl_is_paid(record: AuditRecord) -> Fault | None:
    """Return a fault if a KL is added to rewards."""
    if record.setting("algorithm.use_kl_in_reward") is True:
        return _kl_is_paid_by_token(record) or _kl_is_paid_by_verl(record)
    factor = kl_in_rewards(record)
    if factor is None or factor < 0:
        return _kl_is_paid_by_token(record)
    sentence = f"the KL is added to the rewards of completions, times {factor:.4g}"
    return Fault(f"{sentence}: the policy is paid for leaving its reference")


@lru_cache(maxsize=8)
def kl_in_rewards(record: AuditRecord) -> float | None:
    """Return the factor of the KL of completions (k1) in the rewards of a trainer of no framework.

    None if rewards are not their scores plus a multiple of that KL.
    """
    changes = list[tuple[float, float]]()
    for use in record.uses if record.header.framework not in FRAMEWORKS else ():
        sample = use.sample
        if use.first and sample.reward is not None and sample.rewards:
            changes.append((sample.reward - sum_of(record, sample.rewards), _completion_kl(use)))
    return _factor(changes) if len(changes) >= MIN_COMPLETIONS else None


def _completion_kl(use: Use) -> float:
    """Return the KL (k1) of a completion, from its recorded log-probs."""
    row = use.row
    values = zip(row.old_logprobs or (), row.ref_logprobs or (), row.mask or (), strict=False)
    return sum(old - ref for old, ref, on in values if on and old is not None and ref is not None)


def _factor(changes: Sequence[tuple[float, float]]) -> float | None:
    """Return the factor of the KL that the pairs (change of a reward, KL) have in common, by least squares;
    None if more than a hundredth of the squares is left over.
    """
    squares = sum(kl * kl for _, kl in changes)
    factor = sum(change * kl for change, kl in changes) / squares if squares else 0.0
    left_over = sum((change - factor * kl) ** 2 for change, kl in changes)
    # Both comparisons are false for a NaN, which says nothing, so it gives None.
    fits = abs(factor) >= MIN_FACTOR and left_over <= 0.01 * sum(change**2 for change, _ in changes)
    return factor if fits else None


def _kl_is_paid_by_token(record: AuditRecord) -> Fault | None:
    """Return a fault if the rewards of tokens are their scores plus a multiple of the recorded KL."""
    rows = [
        (use.row.token_rewards or (), use.row.token_scores or (), use.row.kl or ()) for use in record.uses
    ]
    changes = [
        (reward - score, kl)
        for row in rows
        for reward, score, kl in zip(*row, strict=False)
        if reward is not None and score is not None and kl is not None
    ]
    factor = _factor(changes)
    if factor is None or factor < 0:
        return None
    sentence = f"the KL is added to the rewards of tokens, times {factor:.4g}"
    return Fault(f"{sentence}: the policy is paid for leaving its reference")


def _kl_is_paid_by_verl(record: AuditRecord) -> Fault | None:
    """Return a fault if verl's rewards are their scores plus, not minus, the KL in the reward (k1)."""
    coef = record.number("algorithm.kl_ctrl.kl_coef", 0.0)
    added = 0
    subtracted = 0
    for use in record.uses:
        sample = use.sample
        scores = [score for score in sample.rewards.values() if score is not None]
        kl = _completion_kl(use)
        if sample.reward is None or not scores or abs(coef * kl) < 1e-3:
            continue
        change = sample.reward - sum(scores)
        added += math.isclose(change, coef * kl, rel_tol=0.02)
        subtracted += math.isclose(change, -coef * kl, rel_tol=0.02)
    if added < 4 or subtracted:
        return None
    return Fault(
        f"the KL is added to the reward in {added} completions: the policy is paid for leaving its reference"
    )
