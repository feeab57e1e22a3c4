"""Checks of exchanged values: those of another completion, or of another argument of the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from covey.audit.checks.check import Fault
from covey.audit.checks.logprobs import (
    SAME_PROGRAM_NATS,
    UNEXPLAINED_PART,
    recomputed,
    reference,
    sampler,
    trainer,
)
from covey.audit.checks.logprobs import old as old_logprobs
from covey.audit.checks.tokens import MIN_COMPLETIONS, location
from covey.audit.record import AuditRecord, LossCall, Numbers, Use

KEY = 8
"""Number of log-probs by which a completion is recognized."""
MIN_KEY = 4
"""Fewest log-probs by which a shorter completion is recognized."""
COMPARED_TOKENS = 16
"""Tokens of a completion that are compared with those of others."""
MAX_SUSPECTS = 64
"""Most completions of an update whose log-probs are searched for among the others."""
Key = tuple[float, ...]


def key_of(values: Numbers | None, mask: Sequence[bool] | None) -> Key:
    """Return the first trained values, which tell completions apart; () if there are none."""
    return tuple(v for v, on in zip(values or (), mask or (), strict=False) if on and v is not None)[:KEY]


# --- another completion's ---------------------------------------------------------------------------


class Suspect(NamedTuple):
    """A completion in an update, with log-probs that are certainly its own, if any, and doubtful ones."""

    use: Use
    certain: Numbers | None
    doubted: Numbers

    def distance(self, other: Suspect) -> float | None:
        """Return the mean distance of its certain log-probs from another's doubted ones; None without any."""
        masks = zip(self.use.row.mask or (), other.use.row.mask or (), strict=False)
        values = zip(masks, self.certain or (), other.doubted, strict=False)
        apart = [abs(a - b) for on, a, b in values if all(on) and a is not None and b is not None]
        return fmean(apart[:COMPARED_TOKENS]) if apart else None


def logprobs_are_in_another_order(record: AuditRecord) -> Fault | None:
    """The old log-probs, the sampler's or the reference's belong to other completions of the same update:
    nine in ten of the completions that differ from the trainer have the log-probs of another one.
    """
    by_calls = _certain_by_calls(record)
    comparisons = [(old_logprobs, certain, "old") for certain in (recomputed, trainer, by_calls)]
    comparisons += [(sampler, certain, "sampler's") for certain in (recomputed, by_calls)]
    # The reference is the policy, and so recognized, until the first update.
    comparisons.append((reference, trainer, "reference's"))
    # If nothing certain is known, the two can still contradict each other.
    comparisons.append((old_logprobs, sampler, "old or the sampler's"))
    faults = (_in_another_order(record, certain, doubted, whose) for doubted, certain, whose in comparisons)
    return next((fault for fault in faults if fault is not None), None)


def _certain_by_calls(record: AuditRecord) -> Callable[[Use], Numbers | None]:
    """Return a function from a completion to its log-probs in the loss before any weight has moved."""
    by_key: dict[Key, Numbers] = {}
    for n, call in enumerate(record.calls):
        # Only the first call certainly comes before any motion; later ones must say so.
        if n > 0 and call.moved is not False:
            break
        by_key |= {key_of(row.old_logprobs, row.mask): row.logprobs for row in call.rows}
    return lambda use: by_key.get(key_of(use.row.old_logprobs, use.row.mask))


def _in_another_order(
    record: AuditRecord,
    certain: Callable[[Use], Numbers | None],
    doubted: Callable[[Use], Numbers | None],
    whose: str,
) -> Fault | None:
    uses_at_first = [use for use in record.uses if use.first and use.row.mask]
    for _, uses in groupby(uses_at_first, key=lambda use: use.update.step):
        values = [(use, certain(use), doubted(use)) for use in uses]
        suspects = [Suspect(use, a, b) for use, a, b in values if b is not None]
        distant = [s for s in suspects if (s.distance(s) or 0.0) > SAME_PROGRAM_NATS][:MAX_SUSPECTS]
        moved = [(suspect, owner) for suspect in distant for owner in _owners(suspect, suspects)[:1]]
        if len(moved) >= MIN_COMPLETIONS and len(moved) >= 0.9 * len(distant):
            moved_suspect, owner = moved[0]
            sentence = f"the {whose} log-probs of {len(moved)} completions belong to others in the same batch"
            example = f"{owner.use.row.completion} has the ones of {moved_suspect.use.row.completion}"
            return Fault(
                f"{sentence}: completion {example}", moved_suspect.use.update.step, location(owner.use)
            )
    return None


def _owners(suspect: Suspect, suspects: Sequence[Suspect]) -> list[Suspect]:
    """Return the completions that have this completion's log-probs."""
    limit = min(SAME_PROGRAM_NATS, UNEXPLAINED_PART * (suspect.distance(suspect) or 0.0))
    distances = [(owner, suspect.distance(owner)) for owner in suspects if owner is not suspect]
    return [owner for owner, nats in distances if nats is not None and nats < limit]


# --- the other argument of a loss -------------------------------------------------------------------


class AdvantagePair(NamedTuple):
    """The advantage that a loss got for a completion, and the advantage that its batch has for it."""

    call: LossCall
    use: Use
    used: float
    due: float


Buckets = Mapping[int, Sequence[tuple[Use, Key]]]
"""Completions of a batch by the first number of their keys, so that each row is compared with a few only."""


def advantages_of_calls_are_others(record: AuditRecord) -> Fault | None:
    """More than a quarter of the completions that are recognized by their old log-probs enter the loss with
    the advantage of another completion of their batch.
    """
    uses = [use for use in record.uses if use.row.advantage is not None]
    advantages = list(_advantages_of_calls(record.calls, uses))
    moved = [advantage for advantage in advantages if advantage.used != advantage.due]
    if len(moved) < MIN_COMPLETIONS or len(moved) <= 0.25 * len(advantages):
        return None
    # Numbers that the batch does not have were computed again, not moved between completions.
    batch_values = {_first(use.row.advantage, use.row.mask or ()) for use in uses}
    if any(advantage.used not in batch_values for advantage in moved):
        return None
    call, use, used, due = moved[0]
    sentence = f"the loss gets completions with the advantages of others: {used:.4g} for {due:.4g}"
    return Fault(f"{sentence} (call {call.step} of {call.name})", use.update.step, location(use))


def _advantages_of_calls(calls: Sequence[LossCall], uses: Sequence[Use]) -> Iterator[AdvantagePair]:
    """Yield the advantages of completions that are recognized in calls of a loss."""
    buckets = _buckets(uses)
    for call in calls:
        for row in call.rows:
            use = _recognized_use(key_of(row.old_logprobs, row.mask), buckets)
            if use is None:
                continue
            used = _first(row.advantage, row.mask)
            due = _first(use.row.advantage, use.row.mask or ())
            if used is not None and due is not None:
                yield AdvantagePair(call, use, used, due)


def _buckets(uses: Sequence[Use]) -> Buckets:
    """Return the completions by bucket. Each is in the adjacent buckets too, which may hold similar keys."""
    buckets = defaultdict[int, list[tuple[Use, Key]]](list)
    for use in uses:
        key = key_of(use.row.old_logprobs, use.row.mask)
        for number in (-1, 0, 1):
            buckets[_bucket_of(key) + number].append((use, key))
    return buckets


def _bucket_of(key: Key) -> int:
    return round(100 * key[0]) if key else 0


def _recognized_use(key: Key, buckets: Buckets) -> Use | None:
    """Return the completion with these log-probs; None if there is none, or if copies share them."""
    near = [use for use, candidate in buckets.get(_bucket_of(key), ()) if _is_near(key, candidate)]
    completions = {(use.row.rollout, use.row.completion) for use in near}
    return near[0] if len(completions) == 1 else None


def _is_near(key: Key, candidate: Key) -> bool:
    """Whether two keys belong to one completion, even if computed in different micro-batches."""
    return len(key) == len(candidate) >= MIN_KEY and all(
        abs(a - b) < 1e-3 for a, b in zip(key, candidate, strict=True)
    )


def _first(advantage: float | Numbers | None, mask: Sequence[bool]) -> float | None:
    """Return the advantage of a completion's first trained token, in five digits; None if it is unknown."""
    values = advantage if isinstance(advantage, list) else [advantage] * len(mask)
    on = [value for value, trained in zip(values, mask, strict=False) if trained]
    return float(f"{on[0]:.5g}") if on and on[0] is not None else None


def old_logprobs_are_replaced(record: AuditRecord) -> Fault | None:
    """In a quarter of its calls, and in at least two, the loss gets old log-probs that the batch never had,
    neither the present ones nor the sampler's, while other calls get the batch's.
    """
    keys = {key_of(use.row.old_logprobs, use.row.mask) for use in record.uses}
    keys |= {key_of(use.sample.sampler_logprobs, use.row.mask) for use in record.uses}
    updated = [call for call in record.calls if any(row.logprobs != row.old_logprobs for row in call.rows)]
    unknown = [c for c in updated if not any(key_of(row.old_logprobs, row.mask) in keys for row in c.rows)]
    if len(unknown) < 2 or len(unknown) == len(updated) or len(unknown) < 0.25 * len(updated):
        return None
    sentence = (
        f"in {len(unknown)} of {len(updated)} calls the loss gets old log-probs that its batch never had"
    )
    return Fault(f"{sentence} (call {unknown[0].step} of {unknown[0].name}): ratios start again at 1")


def old_and_present_are_exchanged(record: AuditRecord) -> Fault | None:
    """The loss gets the old and the present log-probs exchanged: where the two differ, those it gets as
    present are the batch's old ones.
    """
    recorded = {key_of(use.row.old_logprobs, use.row.mask) for use in record.uses}
    for call in record.calls:
        keys = [(key_of(row.logprobs, row.mask), key_of(row.old_logprobs, row.mask)) for row in call.rows]
        are_exchanged = [
            present in recorded and old not in recorded
            for present, old in keys
            if present and old and present != old
        ]
        if are_exchanged and all(are_exchanged):
            sentence = "the loss gets the policy's log-probs and the old ones exchanged"
            return Fault(f"{sentence} (call {call.step} of {call.name}): the gradient has the wrong sign")
    return None


def exchanged_with_the_sampler(record: AuditRecord) -> LossCall | None:
    """Return a call that gets the sampler's recorded log-probs as the old ones, and the reverse."""
    recorded = {key_of(use.row.old_logprobs, use.row.mask) for use in record.uses}
    sampled = {key_of(use.sample.sampler_logprobs, use.row.mask) for use in record.uses}
    for call in record.calls:
        keys = [(key_of(r.old_logprobs, r.mask), key_of(r.sampler_logprobs, r.mask)) for r in call.rows]
        are_exchanged = [
            old in sampled - recorded and sampler_key in recorded - sampled
            for old, sampler_key in keys
            if old and sampler_key
        ]
        if are_exchanged and all(are_exchanged):
            return call
    return None


CHECKS = {
    "logprobs_order": logprobs_are_in_another_order,
    "loss_order": advantages_of_calls_are_others,
    "old_replaced": old_logprobs_are_replaced,
    "old_exchanged": old_and_present_are_exchanged,
}
