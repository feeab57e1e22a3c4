"""Checks of runs that learn from pairs of a chosen and a rejected completion, as DPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from covey.audit.check import Fault
from covey.audit.record import AuditRecord, Use
from covey.objective.axis_function import bind
from covey.objective.preference import PREFERENCES, PreferenceData

MIN_UPDATES = 8
"""Updates of which a margin that stays 0 is told."""
TOLERANCE = 5e-3
"""Relative difference of a loss that rounding may make; a fiftieth of it, absolute."""


def learns_from_pairs(record: AuditRecord) -> bool:
    """Whether a run's completions are no draws of its policy but answers of its data."""
    return _name(record) in PREFERENCES


def _name(record: AuditRecord) -> str:
    return str(record.setting("algorithm", "")).lower()


def preference_loss_differs(record: AuditRecord) -> Fault | None:
    """In a run whose `algorithm` is a preference loss, as dpo, all losses are others than those of its pairs.
    A pair is a group of two, of which the one with the higher reward is chosen.
    """
    if not learns_from_pairs(record):
        return None
    updates = [(u.step, u.loss, _pairs(record.uses_of(u))) for u in record.updates]
    losses = [(step, loss, pairs) for step, loss, pairs in updates if loss is not None and pairs is not None]
    beta = record.number("beta", 0.1)
    off = [loss for loss in losses if not _agrees(loss[1], _loss(record, loss[2], beta))]
    if not off or len(off) <= 0.5 * len(losses):
        return None
    words = "no known mistake explains it"
    for name in MISTAKES:
        if all(_agrees(value, _mistaken(record, pairs, beta, name)) for _, value, pairs in off):
            words = name
            break
    step, value, pairs = off[0]
    due = _loss(record, pairs, beta)
    return Fault(f"the loss of the pairs is {value:.4g} where {due:.4g} is expected: {words}", step)


def _agrees(recorded: float, due: float) -> bool:
    return abs(recorded - due) <= TOLERANCE * (0.02 + abs(due))


def _pairs(uses: Sequence[Use]) -> PreferenceData | None:
    """Return the sums of an update's pairs; None if it has anything else, or lacks what they need."""
    by_group: dict[int, list[Use]] = {}
    for use in uses:
        by_group.setdefault(use.sample.group or 0, []).append(use)
    answers: dict[str, list[float]] = {name: [] for name in PAIR}
    for group in by_group.values():
        rewards = [use.sample.reward for use in group]
        if len(group) != 2 or None in rewards or rewards[0] == rewards[1]:
            return None
        chosen, rejected = sorted(group, key=lambda use: -(use.sample.reward or 0.0))
        for name, use in (("chosen", chosen), ("rejected", rejected)):
            mask = use.row.mask or []
            if not use.row.logprobs or not mask:
                return None
            answers[name].append(_total(use.row.logprobs, mask))
            answers[f"ref_{name}"].append(_total(use.row.ref_logprobs or [0.0] * len(mask), mask))
            answers[f"{name}_lengths"].append(float(sum(mask)))
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in answers.items()}
    return PreferenceData(**tensors) if by_group else None


PAIR = ("chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_lengths", "rejected_lengths")
"""Data of pairs that a record has."""


def _total(values: Sequence[float | None], mask: Sequence[bool]) -> float:
    return sum(value or 0.0 for value, on in zip(values, mask, strict=False) if on)


def _loss(record: AuditRecord, pairs: PreferenceData, beta: float) -> float:
    name = _name(record)
    rule = bind(PREFERENCES[name], **{"tau" if name == "ipo" else "beta": beta})
    return float(rule(pairs).mean()) if set(rule.needs) <= set(PAIR) else float("nan")


def _mistaken(record: AuditRecord, pairs: PreferenceData, beta: float, name: str) -> float:
    """Return the loss as a mistake would make it."""
    if name == BETA_OUTSIDE:
        return beta * _loss(record, pairs, 1.0)
    changes = {field: _changed(pairs, other) for field, other in MISTAKES[name].items()}
    return _loss(record, replace(pairs, **changes), beta)


def _changed(pairs: PreferenceData, other: str) -> Tensor:
    """Return the data of another name; a mean over tokens, if it ends so; zeros without a name."""
    field, _, kind = other.partition(" ")
    values = getattr(pairs, field or "ref_chosen")
    if not field:
        return torch.zeros_like(values)
    return values / getattr(pairs, f"{field.removeprefix('ref_')}_lengths") if kind == "mean" else values


BETA_OUTSIDE = "beta multiplies the loss and not the margin"
MISTAKES: Mapping[str, Mapping[str, str]] = {
    "chosen and rejected are exchanged": {
        "chosen": "rejected",
        "rejected": "chosen",
        "ref_chosen": "ref_rejected",
        "ref_rejected": "ref_chosen",
    },
    "log-probs are means over tokens and not sums": {name: f"{name} mean" for name in PAIR[:4]},
    "the reference's log-probs of chosen and rejected are exchanged": {
        "ref_chosen": "ref_rejected",
        "ref_rejected": "ref_chosen",
    },
    "the reference is left out": {"ref_chosen": "", "ref_rejected": ""},
    BETA_OUTSIDE: {},
}
"""Mistake in words -> field of a pair -> the field whose values it gets."""


def margins_are_zero(record: AuditRecord) -> Fault | None:
    """TRL's metric of the margins between chosen and rejected is 0 in every update, of at least eight."""
    margins = [update.metrics.get("rewards/margins") for update in record.updates]
    logged = [margin for margin in margins if margin is not None]
    if len(logged) < MIN_UPDATES or any(logged):
        return None
    chosen = [update.metrics.get("rewards/chosen") for update in record.updates]
    cause = "chosen and rejected are the same text" if any(chosen) else "the reference is the policy itself"
    return Fault(f"the margin between chosen and rejected is 0 in all {len(logged)} updates: {cause}")


CHECKS = {"preference_differs": preference_loss_differs, "margins_zero": margins_are_zero}
