"""Checks of runs that learn from pairs of a chosen and a rejected completion, as DPO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from covey.audit.checks.check import Fault
from covey.audit.record import AuditRecord, Use
from covey.objective.axis_function import bind, setting_defaults
from covey.objective.preference import PREFERENCES, PreferenceData

MIN_UPDATES = 8
"""Fewest updates whose margins are all 0."""
TOLERANCE = 5e-3
"""Largest relative difference by rounding; the largest absolute one is a fiftieth of it."""
FROM_DATA = {"sft", "dpo", "kto", "reward"}
"""First words of the algorithms that learn from completions of their data."""
PAIR = ("chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_lengths", "rejected_lengths")
"""Data of pairs that a record has."""


def learns_from_data(record: AuditRecord) -> bool:
    """Whether a run's completions come from its data, and were not drawn from its policy."""
    return _name(record) in PREFERENCES or _name(record).partition(" ")[0] in FROM_DATA


def _name(record: AuditRecord) -> str:
    return str(record.setting("algorithm", "")).lower()


def preference_loss_differs(record: AuditRecord) -> Fault | None:
    """In a run whose `algorithm` is a preference loss, such as dpo, a known mistake explains all losses that
    are not those of their pairs, more than half of all. A pair is a group of two; the completion with the
    higher reward is chosen. Other differences may be terms that covey's loss of that name lacks.
    """
    if _name(record) not in PREFERENCES:
        return None
    updates = [(u.step, u.loss, _pairs(record.uses_of(u))) for u in record.updates]
    losses = [(step, loss, pairs) for step, loss, pairs in updates if loss is not None and pairs is not None]
    off = [case for case in losses if not _agrees(case[1], _loss(record, case[2]))]
    if not off or len(off) <= 0.5 * len(losses):
        return None
    for mistake in MISTAKES:
        if all(_agrees(value, _mistaken(record, pairs, mistake)) for _, value, pairs in off):
            step, value, pairs = off[0]
            due = _loss(record, pairs)
            return Fault(f"the loss of the pairs is {value:.4g} where {due:.4g} is expected: {mistake}", step)
    return None


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


def _total(values: Sequence[float | None], mask: Sequence[bool]) -> float:
    return sum(value or 0.0 for value, on in zip(values, mask, strict=False) if on)


def _loss(record: AuditRecord, pairs: PreferenceData, **changes: float) -> float:
    function = PREFERENCES[_name(record)]
    defaults = setting_defaults(function)
    numbers = {name: record.number(name, v) for name, v in defaults.items() if isinstance(v, float)}
    if "tau" in numbers:  # TRL calls it beta
        numbers["tau"] = record.number("tau", record.number("beta", defaults["tau"]))
    rule = bind(function, **{**numbers, **changes})
    return float(rule(pairs).mean()) if set(rule.needs) <= set(PAIR) else float("nan")


def _mistaken(record: AuditRecord, pairs: PreferenceData, mistake: str) -> float:
    """Return the loss as a mistake would make it."""
    if mistake == BETA_OUTSIDE:
        is_without = "beta" not in setting_defaults(PREFERENCES[_name(record)])
        beta = record.number("beta", 0.1)
        return float("nan") if is_without else beta * _loss(record, pairs, beta=1.0)
    changes = {field: _changed(pairs, other) for field, other in MISTAKES[mistake].items()}
    return _loss(record, replace(pairs, **changes))


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


def kl_is_of_its_own_completion(record: AuditRecord) -> Fault | None:
    """In KTO, more than a tenth of the completions from which the KL is estimated are the completion itself,
    beyond what equal completions of a batch explain, by 4 standard errors.
    """
    count = repeats = 0
    expected = variance = 0.0
    for rollout in record.rollouts:
        batch = [s for s in rollout.completions if s.ids and s.kl_ids]
        for sample in batch:
            ids = sample.ids or []
            equal = sum((other.ids or []) == ids for other in batch) - 1
            chance = equal / max(1, len(batch) - 1)
            count += 1
            repeats += (sample.kl_ids or [])[: len(ids)] == ids
            expected += chance
            variance += chance * (1 - chance)
    beyond = repeats - expected - 4 * math.sqrt(variance)
    if repeats < 4 or beyond <= 0.1 * count:
        return None
    return Fault(f"the KL of {repeats} of {count} completions is that of the completion itself")


CHECKS = {
    "preference_differs": preference_loss_differs,
    "margins_zero": margins_are_zero,
    "kl_own": kl_is_of_its_own_completion,
}
