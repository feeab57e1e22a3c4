"""Checks of updates: the loss computed again, its direction, rates, norms and settings that undo it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from covey.audit.advantages import groups_of
from covey.audit.check import Trouble
from covey.audit.conventions import convention_of, same_loss
from covey.audit.logprobs import after, before, pairs, ratios_are_wide
from covey.audit.record import AuditRecord, Numbers, Update, Use
from covey.audit.tokens import place
from covey.objective.data import LossInputs
from covey.objective.loss import Loss, policy_loss
from covey.objective.reductions import Totals, token_mean

FEWEST = 2
"""Updates that a check of all of them needs."""
LEAST_RATE = 1e-10
"""A learning rate below moves no weight, whatever its precision."""


def _loss(record: AuditRecord, update: Update) -> Loss | None:
    """Return the loss of an update by covey's own formula; None where a value that it needs is missing."""
    algorithm = convention_of(record)
    uses = record.uses_of(update)
    rows = [use.row for use in uses]
    whole = all(r.mask and r.logprobs and isinstance(r.advantage, float) for r in rows)
    if algorithm is None or not rows or not whole or len(rows) < len(update.rows):
        return None
    if algorithm.kl is not None and any(r.ref_logprobs is None for r in rows):
        return None
    # A mean over tokens is TRL's mean over a whole rollout, so the update must be all of one.
    used = {r.rollout for r in rows}
    if algorithm.reduce.function is token_mean and (len(used) > 1 or len(rows) != _sampled(record, used)):
        return None
    return policy_loss(algorithm, _inputs(record, uses, algorithm.kl is not None))


def _inputs(record: AuditRecord, uses: Sequence[Use], reference: bool) -> LossInputs:
    """Return what a loss is made of. ``reference``: its log-probs are among it."""
    rows = [use.row for use in uses]
    mask = _padded([[float(m) for m in r.mask or ()] for r in rows]).bool()
    totals = Totals(
        tokens=int(mask.sum()),
        completions=int(mask.any(-1).sum()),
        prompts=len(set(groups_of([u.sample for u in uses]))),
        max_tokens=int(record.number("max_completion_length", 0)),
        rows=len(rows),
    )
    advantages = torch.tensor([r.advantage for r in rows], dtype=torch.float64)
    return LossInputs(
        logprobs=_padded([r.logprobs or [] for r in rows], mask),
        mask=mask,
        advantages=advantages[:, None].expand(mask.shape),
        old_logprobs=_padded([r.old_logprobs or r.logprobs or [] for r in rows], mask),
        totals=totals,
        group_tokens=mask.sum(-1),
        ref_logprobs=_padded([r.ref_logprobs or [] for r in rows], mask) if reference else None,
    )


def _sampled(record: AuditRecord, numbers: set[int]) -> int:
    return sum(len(r.completions) for r in record.rollouts if r.number in numbers)


def _padded(rows: list[Numbers] | list[list[float]], mask: Tensor | None = None) -> Tensor:
    """Return rows of numbers as (N, T) float64, 0 behind their ends and where unknown."""
    values = [torch.tensor([0.0 if v is None else v for v in row], dtype=torch.float64) for row in rows]
    padded = pad_sequence(values, batch_first=True)
    if mask is None:
        return padded
    result = torch.zeros(mask.shape, dtype=torch.float64)
    width = min(mask.shape[1], padded.shape[1])
    result[:, :width] = padded[:, :width]
    return result


def _differing(record: AuditRecord) -> list[tuple[Update, float, Loss]]:
    """Return the updates whose loss is another one than covey's: (update, its loss, covey's)."""
    if not same_loss(record):
        return []
    every = [(update, _loss(record, update)) for update in record.updates if update.loss is not None]
    known = [(update, float(update.loss or 0), loss) for update, loss in every if loss is not None]
    return [(u, found, due) for u, found, due in known if not _alike(found, float(due.total))]


def _alike(found: float, due: float) -> bool:
    return abs(found - due) <= 1e-4 + 5e-3 * abs(due)


def _explained(record: AuditRecord, words: str, explains: Callable[[float, Loss], bool]) -> Trouble | None:
    off = _differing(record)
    if not off or not all(explains(found, due) for _, found, due in off):
        return None
    update, found, due = max(off, key=lambda o: abs(o[1] - float(o[2].total)))
    return Trouble(f"{words}: {found:.4g} where {float(due.total):.4g} is expected", update.step)


def loss_is_negated(record: AuditRecord) -> Trouble | None:
    """The loss has the other sign than the one computed from its own numbers."""

    def negated(found: float, due: Loss) -> bool:
        return _alike(-found, float(due.total)) and abs(found) > 1e-3

    return _explained(record, "the loss has the wrong sign", negated)


def kl_has_the_wrong_sign(record: AuditRecord) -> Trouble | None:
    """The coefficient of the KL is negative; or the loss is the expected one with the KL subtracted."""
    name = "beta" if record.setting("beta") is not None else "kl_coef"
    coef = record.number(name, 0.0)
    if coef < 0:
        return Trouble(f"{record.own_name(name)} is {coef:g}: the policy is paid for leaving its reference")

    if record.setting("algorithm.use_kl_in_reward") is True:
        return _kl_is_paid(record)

    def subtracted(found: float, due: Loss) -> bool:
        return float(due.kl) > 1e-4 and _alike(found, float(due.total) - 2 * coef * float(due.kl))

    return _explained(record, "the KL is subtracted from the loss", subtracted)


def _kl_is_paid(record: AuditRecord) -> Trouble | None:
    """Compare verl's rewards with their scores: the KL in the reward (k1) has to be subtracted."""
    coef = record.number("algorithm.kl_ctrl.kl_coef", 0.0)
    paid = fined = 0
    for use in record.uses:
        row, sample = use.row, use.sample
        scores = [score for score in sample.rewards.values() if score is not None]
        values = zip(row.old_logprobs or (), row.ref_logprobs or (), row.mask or (), strict=False)
        kl = sum(old - ref for old, ref, on in values if on and old is not None and ref is not None)
        if sample.reward is None or not scores or abs(coef * kl) < 1e-3:
            continue
        change = sample.reward - sum(scores)
        paid += math.isclose(change, coef * kl, rel_tol=0.02)
        fined += math.isclose(change, -coef * kl, rel_tol=0.02)
    if paid < 4 or fined:
        return None
    return Trouble(
        f"the KL is added to the reward in {paid} completions: the policy is paid for leaving its reference"
    )


def loss_is_scaled(record: AuditRecord) -> Trouble | None:
    """The loss is the expected one times the number of accumulated micro-batches, or over it."""
    count = record.number("gradient_accumulation_steps", 1)

    def scaled(found: float, due: Loss) -> bool:
        sides = (found / count, found * count)
        return count > 1 and any(_alike(side, float(due.total)) for side in sides)

    said = f"the loss is scaled by gradient_accumulation_steps={count:g}"
    return _explained(record, said, scaled)


def loss_differs(record: AuditRecord) -> Trouble | None:
    """The loss differs from the one that covey computes from its log-probs, masks and advantages."""
    return _explained(record, "the loss is not the one of its settings", lambda _found, _due: True)


def step_goes_the_wrong_way(record: AuditRecord) -> Trouble | None:
    """Over the first updates on rollouts, completions with a positive advantage become less likely and those
    with a negative one more likely: advantage times change is negative, beyond chance by 3.5 standard errors.
    """
    terms = [(use, _gain(use)) for use in record.uses if use.first]
    gains = [gain for _, gain in terms if gain]
    # As many independent terms of any size have this sum by chance: it is their sum over its standard error.
    error = math.sqrt(sum(gain**2 for gain in gains))
    if len(gains) < 16 or not sum(gains) < -3.5 * error:
        return None
    use = min(terms, key=lambda term: term[1])[0]
    said = "updates make completions with positive advantages less likely and others more likely"
    return Trouble(f"{said}, by {abs(sum(gains) / error):.1f} standard errors", use.update.step, place(use))


def _gain(use: Use) -> float:
    """Return advantage times the change of its log-prob for one completion; 0 if it was not looked at."""
    if not isinstance(use.row.advantage, float):
        return 0.0
    return use.row.advantage * sum(y - x for _, x, y in pairs(use, before, after))


def rate_is_zero(record: AuditRecord) -> Trouble | None:
    """The learning rate is at most 1e-10 in every update."""
    rates = [u.learning_rate for u in record.updates if u.learning_rate is not None]
    if len(rates) < FEWEST or max(rates) > LEAST_RATE:
        return None
    return Trouble(
        f"the learning rate is at most {max(rates):g} in all {len(rates)} updates", record.updates[0].step
    )


def warmup_is_longer_than_the_run(record: AuditRecord) -> Trouble | None:
    """The warm-up takes at least as many steps as the run."""
    warmup, steps = record.number("warmup_steps", 0), record.number("max_steps", -1)
    rates = [u.learning_rate for u in record.updates if u.learning_rate is not None]
    if not 0 < steps <= warmup or not rates:
        return None
    due = record.number("learning_rate", 0.0)
    reached = f"the learning rate of {due:g} is never reached, {max(rates):.2g} at most"
    return Trouble(
        f"the warm-up takes {warmup:g} steps and the run {steps:g}: {reached}", record.updates[0].step
    )


def weights_do_not_move(record: AuditRecord) -> Trouble | None:
    """Weights are the same after updates with a gradient and a learning rate above 0."""
    asked = [
        u
        for u in record.updates
        if (u.learning_rate or 0) > LEAST_RATE and (u.grad_norm or 0) > 0 and u.weights_changed is not None
    ]
    if len(asked) < FEWEST or any(u.weights_changed for u in asked):
        return None
    return Trouble("no weight has changed, though the gradient is not 0", asked[0].step)


def weights_are_too_coarse(record: AuditRecord) -> Trouble | None:
    """With weights in bfloat16 or float16, every update changes less than a fifth of them."""
    dtype = str(record.setting("dtype", ""))
    changed = [
        u.weights_changed
        for u in record.updates
        if u.weights_changed is not None and (u.learning_rate or 0) > 0
    ]
    if dtype not in ("bfloat16", "float16") or len(changed) < FEWEST or max(changed) >= 0.2:
        return None
    rate = max(u.learning_rate or 0 for u in record.updates)
    said = (
        f"an update at the learning rate {rate:g} changes {100 * max(changed):.2g} % of the {dtype} weights"
    )
    return Trouble(f"{said}: the others are rounded back", record.updates[0].step)


def gradient_is_zero(record: AuditRecord) -> Trouble | None:
    """The gradient norm is 0 in every update, though advantages are not all 0."""
    norms = [u.grad_norm for u in record.updates if u.grad_norm is not None]
    advantages = [use.row.advantage for use in record.uses if isinstance(use.row.advantage, float)]
    if len(norms) < FEWEST or any(norms) or (advantages and not any(advantages)):
        return None
    return Trouble("the gradient is 0 in every update", record.updates[0].step)


def gradient_is_always_clipped(record: AuditRecord) -> Trouble | None:
    """The gradient norm is more than a hundred times its bound in every update."""
    bound = record.number("max_grad_norm", math.inf)
    norms = [u.grad_norm for u in record.updates if u.grad_norm]
    if len(norms) < FEWEST or bound <= 0 or min(norms) <= 100 * bound:
        return None
    said = f"every gradient is clipped, from a norm of {min(norms):.3g} or more to {bound:g}"
    return Trouble(f"{said}: its size says nothing", record.updates[0].step)


def clipping_cannot_act(record: AuditRecord) -> Trouble | None:
    """A clip bound of 1 or more lets every ratio pass."""
    for known in ("epsilon", "eps_clip"):
        bound, name = record.number(known, 0.0), record.own_name(known)
        if bound >= 1 and str(record.setting("loss_type", "grpo")) not in ("cispo", "sapo", "vespo"):
            return Trouble(f"{name} is {bound:g}: a ratio between 0 and {1 + bound:g} is never clipped")
    return None


def penalties_are_not_trained(record: AuditRecord) -> Trouble | None:
    """Sampling has a repetition penalty, which no trainer applies."""
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        neutral = 1.0 if name == "repetition_penalty" else 0.0
        value = record.number(name, neutral)
        if value != neutral:
            return Trouble(f"tokens are sampled with {name} {value:g}, and log-probs are without it")
    return None


CHECKS = {
    "kl_sign": kl_has_the_wrong_sign,
    "loss_negated": loss_is_negated,
    "wrong_way": step_goes_the_wrong_way,
    "loss_scaled": loss_is_scaled,
    "loss_differs": loss_differs,
    "rate_zero": rate_is_zero,
    "warmup_long": warmup_is_longer_than_the_run,
    "no_motion": weights_do_not_move,
    "too_coarse": weights_are_too_coarse,
    "gradient_zero": gradient_is_zero,
    "clip_idle": clipping_cannot_act,
    "penalty_untrained": penalties_are_not_trained,
    "clipped_always": gradient_is_always_clipped,
    "ratio_wide": ratios_are_wide,
}
