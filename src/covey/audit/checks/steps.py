"""Checks of the way from the loss to the weights: gradient, norm, learning rate, step, and after it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from covey.audit.checks.check import Fault
from covey.audit.record import AuditRecord, Motion, Update

MIN_UPDATES = 2
"""Fewest updates of which "most" is said."""
OUTSIDE_PART = 0.01
"""Part of the motion of steps that is more than rounding."""
OTHER_STEP = 0.1
"""Part of a step that its formula must not leave unexplained."""
OTHER_NORM = 0.02
"""Relative difference between two norms of one gradient."""
OTHER_GRADIENT = 0.98
"""Cosine below which two gradients are not one gradient with rounding; 16 runs in float32 had .9999999."""
ROUNDED_GRADIENT = 0.9
"""The same with products in bfloat16 or float16."""
OTHER_RATE = 0.01
"""Relative difference between two learning rates."""


def weights_move_between_steps(record: AuditRecord) -> Fault | None:
    """In at least a tenth of the updates, and in at least two, weights have moved since the end of the
    previous step, by more than a hundredth of a step's motion.
    """
    outside = [(update, _total(update, "outside")) for update in record.updates]
    later = [(update, moved) for update, moved in outside if moved is not None]
    by_steps = [_total(update, "change") or 0.0 for update, _ in later]
    apart = [
        (update, moved)
        for (update, moved), change in zip(later, by_steps, strict=True)
        if moved > OUTSIDE_PART * change
    ]
    if len(apart) < MIN_UPDATES or len(apart) < 0.1 * len(later):
        return None
    sentence = f"weights move between the optimizer's steps in {len(apart)} of {len(later)} updates"
    between = median(moved for _, moved in apart)
    sizes = f"by {between:.2g} of the norm, and by {median(by_steps):.2g} in a step"
    return Fault(f"{sentence}: {sizes}", apart[0][0].step)


def _total(update: Update, name: str) -> float | None:
    """Return the norm over all watched tensors; None if none of them has it."""
    values = (getattr(motion, name) for motion in update.motions)
    norms = [value for value in values if value is not None]
    return math.hypot(*norms) if norms else None


def steps_are_others(record: AuditRecord) -> Fault | None:
    """In more than half of the updates, and in at least two, a watched tensor moves otherwise than the
    optimizer's formula says, by a tenth of its motion.
    """
    judged = [update for update in record.updates if any(m.due for m in update.motions)]
    off = [(update, motion) for update in judged for motion in update.motions if _is_off(motion)]
    updates = {update.step for update, _ in off}
    if len(updates) < MIN_UPDATES or len(updates) <= 0.5 * len(judged):
        return None
    motions = [motion for _, motion in off]
    names = {motion.name for motion in motions}
    watched = len({m.name for update in judged for m in update.motions})
    sentence = f"{len(names)} of {watched} watched tensors ({off[0][1].name})"
    return Fault(f"{sentence} {_kind_of(motions)}", off[0][0].step)


def _is_off(motion: Motion) -> bool:
    largest = max(motion.change or 0.0, motion.due or 0.0)
    return motion.off is not None and motion.off > OTHER_STEP * largest > 0


def _kind_of(motions: Sequence[Motion]) -> str:
    """Return how tensors move that do not move as their optimizer's formula moves them."""
    if not any(motion.change for motion in motions):
        return "do not move, though they have a gradient"
    if all((m.fresh or 0.0) <= OTHER_STEP * (m.change or 0.0) for m in motions):
        return "move as in an optimizer's first step each time: its moments are lost"
    factors = list(_factors(motions))
    if len(factors) < len(motions):
        return "move otherwise than the optimizer's formula moves them by their gradients"
    factor = median(factors)
    return (
        f"move against their gradients, times {-factor:.2g}"
        if factor < 0
        else f"move {factor:.2g} times as far as the optimizer's formula gives"
    )


def _factors(motions: Sequence[Motion]) -> Iterator[float]:
    """Yield by what each motion is multiplied, of those that are multiples of what is due."""
    for motion in motions:
        change, due, off = motion.change or 0.0, motion.due or 0.0, motion.off or 0.0
        factor = (change**2 + due**2 - off**2) / (2 * due**2) if due else 0.0
        left_over = change**2 - (factor * due) ** 2
        if left_over <= (OTHER_STEP * change) ** 2:
            yield factor


def gradients_have_other_parts(record: AuditRecord) -> Fault | None:
    """The gradient of the weights before a step has a cosine below .98 (.9 with bf16 or fp16) with the
    gradient of the loss of its completions, which covey computes again. Or, in more than half of the updates
    and at least two, the gradient of the optimizer's step is longer than max_grad_norm or, in TRL, does not
    have the logged norm clipped to max_grad_norm, by 2 %.
    """
    cosines = [(update, update.gradient_cosine) for update in record.updates]
    is_rounded = record.setting("bf16") or record.setting("fp16") or record.setting("dtype") != "float32"
    bound = ROUNDED_GRADIENT if is_rounded else OTHER_GRADIENT
    off = [(update, c) for update, c in cosines if c is not None and c < bound]
    if not off:
        return _norms_are_others(record)
    update, cosine = min(off, key=lambda pair: pair[1])
    sentence = f"the gradient of the weights is not that of the loss: their cosine is {cosine:.2f}"
    return Fault(
        f"{sentence}, in {len(off)} of {sum(c is not None for _, c in cosines)} updates", update.step
    )


def _norms_are_others(record: AuditRecord) -> Fault | None:
    bound = record.number("max_grad_norm", 0.0) or math.inf
    norms = [(update, update.grad_norm, update.step_norm) for update in record.updates]
    clipped = [(u, min(logged, bound), norm) for u, logged, norm in norms if logged and norm is not None]
    # Another trainer may log the norm of other weights than those that are watched.
    is_same = record.header.framework == "trl"
    off = [
        (update, due, norm)
        for update, due, norm in clipped
        if norm > (1 + OTHER_NORM) * (due if is_same else bound)
        or (is_same and norm < (1 - OTHER_NORM) * due)
    ]
    if len(off) < MIN_UPDATES or len(off) <= 0.5 * len(clipped):
        return None
    update, due, norm = off[0]
    sentence = f"the optimizer's steps get another gradient than the clipped one in {len(off)} updates"
    return Fault(f"{sentence}: of norm {norm:.3g} where {due:.3g} is expected", update.step)


def rates_are_others(record: AuditRecord) -> Fault | None:
    """In at least half of the updates, and in at least two, the learning rate differs, by a hundredth of its
    peak, from all that lr_scheduler_type (linear, cosine, constant) gives the update and those before and
    after it. Or, without such a setting, it is above learning_rate.
    """
    peak = record.number("learning_rate", 0.0)
    rates = [(u, u.learning_rate) for u in record.updates if u.learning_rate is not None and peak > 0]
    off = list[tuple[Update, float, float]]()
    for update, rate in rates:
        near = [_part_of_peak(record, update.step + by) for by in (0, -1, 1)]
        parts = [part for part in near if part is not None]
        if parts and not min(parts) - OTHER_RATE <= rate / peak <= max(parts) + OTHER_RATE:
            off.append((update, rate, peak * parts[0]))
        elif record.setting("lr_scheduler_type") is None and rate > (1 + OTHER_RATE) * peak:
            off.append((update, rate, peak))
    if len(off) < MIN_UPDATES or len(off) < 0.5 * len(rates):
        return None
    update, rate, due = off[0]
    sentence = f"the learning rate is not that of the settings in {len(off)} of {len(rates)} updates"
    return Fault(f"{sentence}: {rate:.3g} where {due:.3g} is expected", update.step)


def _part_of_peak(record: AuditRecord, step: int) -> float | None:
    """Return the part of the learning rate that a schedule of transformers gives an update; None if it is
    unknown.
    """
    kind, steps = str(record.setting("lr_scheduler_type", "")), record.number("max_steps", 0.0)
    warmup = record.number("warmup_steps", 0.0) or record.number("warmup_ratio", 0.0)
    if record.setting("lr_scheduler_kwargs") or (steps <= 0 and kind != "constant"):
        return None
    # Below 1 it is a part of the run.
    warmup = math.ceil(steps * warmup) if warmup < 1 else int(warmup)
    step = max(step, 0)
    if step < warmup and kind != "constant":
        return step / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    parts = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "constant": 1.0,
        "constant_with_warmup": 1.0,
    }
    return parts.get(kind)


CHECKS = {
    "gradient_unexplained": gradients_have_other_parts,
    "step_differs": steps_are_others,
    "moved_between": weights_move_between_steps,
    "rate_differs": rates_are_others,
}
