"""Checks of losses: each is computed again from what the loss function was given, under the run's settings.

An update of TRL is one case, and so is each recorded call of verl's and OpenRLHF's loss functions. A mistake
is a variation of the algorithm: the one under which all losses are as they were found is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mode
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from covey.audit.check import Trouble
from covey.audit.conventions import MEANS, convention_of, correction_of, loss_of_calls, same_loss
from covey.audit.exchanges import exchanged_with_the_sampler
from covey.audit.groups import groups_of
from covey.audit.logprobs import old as old_logprobs
from covey.audit.logprobs import pairs, sampler
from covey.audit.record import AuditRecord, LossCall, LossRow, Numbers, Update, Use
from covey.audit.terms import kl_is_subtracted
from covey.audit.tokens import location
from covey.objective import surrogates
from covey.objective.algorithms import Algorithm
from covey.objective.bound import Bound, bind
from covey.objective.data import LossInputs
from covey.objective.loss import Loss, policy_loss
from covey.objective.reductions import Totals, token_mean

CLIPPED = ("vanilla", "ppo")
"""Loss functions of verl and OpenRLHF with PPO's clip."""
APART = 0.01
"""Nats by which trainer and sampler have to differ at a token, so that the direction of a weight shows."""
FEWEST = 16
"""Importance weights that an update must have."""
SMALLEST = 1e-30
"""A weight below counts as this, so that its logarithm is a number."""


@dataclass(frozen=True)
class LossCase:
    """A loss that a run computed, with what it was computed from."""

    step: int
    words: str
    """Which loss it is, in words."""
    recorded: float
    """The value that the run has computed."""
    algorithm: Algorithm
    inputs: LossInputs
    mismatch: Tensor | None = None
    """(N, T) log-ratio of trainer and sampler; None where the loss has no correction for that."""
    weigh: Callable[[Tensor], Tensor] = torch.exp
    """Mismatch -> the weight of each token's loss."""
    precision: float = 5e-3
    """Relative difference that rounding may make; a fiftieth of it, absolute."""

    def is_that_of(self, candidate: LossCase) -> bool:
        """Whether covey's formula gives the recorded loss in another case."""
        return _alike(self.recorded, float(candidate.value().total), self.precision)

    def value(self) -> Loss:
        """Return the loss by covey's own formula."""
        loss = policy_loss(self.algorithm, self.inputs)
        if self.mismatch is None:
            return loss
        weight = loss.weight[:, None] * self.inputs.mask * self.weigh(self.mismatch)
        total = (loss.tokens.value * weight).sum()
        return replace(loss, total=total, policy=total)


@lru_cache(maxsize=8)
def differing(record: AuditRecord) -> tuple[tuple[LossCase, Loss], ...]:
    """Return the losses that are not covey's, with covey's."""
    cases = [(case, case.value()) for case in (*_of_updates(record), *_of_calls(record))]
    return tuple(
        (case, due) for case, due in cases if not _alike(case.recorded, float(due.total), case.precision)
    )


def _of_updates(record: AuditRecord) -> Iterator[LossCase]:
    """Yield the losses of whole updates, where covey has the framework's loss to the last term."""
    algorithm = convention_of(record) if same_loss(record) else None
    for update in record.updates if algorithm is not None else ():
        uses = record.uses_of(update)
        if update.loss is not None and algorithm is not None and _is_whole(record, algorithm, update, uses):
            references = None if algorithm.kl is None else [use.row.ref_logprobs or [] for use in uses]
            totals = {
                "prompts": len(set(groups_of([use.sample for use in uses]))),
                "max_tokens": int(record.number("max_completion_length", 0)),
            }
            inputs = _inputs(_rows_of(uses), totals, references)
            yield LossCase(update.step, "", update.loss, algorithm, inputs)


def _is_whole(record: AuditRecord, algorithm: Algorithm, update: Update, uses: Sequence[Use]) -> bool:
    """Whether a record has all that an update's loss is made of."""
    rows = [use.row for use in uses]
    complete = all(r.mask and r.logprobs and isinstance(r.advantage, float) for r in rows)
    if not rows or not complete or len(rows) < len(update.rows):
        return False
    if algorithm.kl is not None and any(r.ref_logprobs is None for r in rows):
        return False
    # A mean over tokens is TRL's mean over a whole rollout, so the update must be all of one.
    numbers = {r.rollout for r in rows}
    is_one_rollout = len(numbers) == 1 and len(rows) == _sampled(record, numbers)
    return is_one_rollout or algorithm.reduce.function is not token_mean


def _of_calls(record: AuditRecord) -> Iterator[LossCase]:
    """Yield the recorded calls of a loss function whose settings are known."""
    algorithm = loss_of_calls(record)
    weigh = correction_of(record)
    for call in record.calls:
        totals = _totals_of(call)
        if algorithm is None or totals is None or call.name not in CLIPPED:
            continue
        inputs = _inputs(call.rows, totals)
        case = LossCase(
            0, f" (call {call.step} of {call.name})", call.loss, algorithm, inputs, precision=1e-3
        )
        weights = [row.corrections for row in call.rows if row.corrections is not None]
        sampler = [row.sampler_logprobs for row in call.rows if row.sampler_logprobs is not None]
        if len(weights) == len(call.rows):
            logs = [[math.log(max(w or 0.0, SMALLEST)) for w in row] for row in weights]
            case = replace(case, mismatch=_padded(logs, inputs.mask))
        elif weigh is not None and len(sampler) == len(call.rows):
            mismatch = inputs.old_logprobs - _padded(sampler, inputs.mask)
            case = replace(case, mismatch=mismatch, weigh=weigh)
        yield case


def _totals_of(call: LossCall) -> dict[str, int] | None:
    """Return the totals that a loss function divides by, where the caller says; None if one is not whole."""
    totals = {"tokens": call.tokens, "completions": call.completions}
    recorded = {name: total for name, total in totals.items() if total is not None}
    rounded = {name: round(total) for name, total in recorded.items()}
    return rounded if all(abs(rounded[name] - total) <= 1e-3 for name, total in recorded.items()) else None


def _rows_of(uses: Sequence[Use]) -> list[LossRow]:
    """Return the completions of an update as its loss gets them. At first, old log-probs are the present."""
    return [
        LossRow(
            mask=row.mask or [],
            logprobs=row.logprobs or [],
            old_logprobs=row.old_logprobs or row.logprobs or [],
            advantage=[row.advantage if isinstance(row.advantage, float) else None] * len(row.mask or ()),
        )
        for row in (use.row for use in uses)
    ]


def _inputs(
    rows: Sequence[LossRow], totals: Mapping[str, int], references: Sequence[Numbers] | None = None
) -> LossInputs:
    """Return what a loss is made of. ``totals``: numbers that replace the counts of these rows."""
    mask = _padded([[float(on) for on in row.mask] for row in rows]).bool()
    counts = {
        "tokens": int(mask.sum()),
        "completions": int(mask.any(-1).sum()),
        "prompts": 1,
        "max_tokens": mask.shape[1],
        "rows": len(rows),
    }
    return LossInputs(
        logprobs=_padded([row.logprobs for row in rows], mask),
        mask=mask,
        advantages=_padded([row.advantage for row in rows], mask),
        old_logprobs=_padded([row.old_logprobs for row in rows], mask),
        totals=Totals(**{**counts, **totals}),
        group_tokens=mask.sum(-1),
        ref_logprobs=None if references is None else _padded(references, mask),
    )


def _sampled(record: AuditRecord, numbers: set[int]) -> int:
    return sum(len(r.completions) for r in record.rollouts if r.number in numbers)


def _padded(rows: Sequence[Numbers] | Sequence[Sequence[float]], mask: Tensor | None = None) -> Tensor:
    """Return rows of numbers as (N, T) float64, 0 behind their ends and where unknown."""
    values = [torch.tensor([0.0 if v is None else v for v in row], dtype=torch.float64) for row in rows]
    padded = pad_sequence(values, batch_first=True)
    if mask is None:
        return padded
    result = torch.zeros(mask.shape, dtype=torch.float64)
    width = min(mask.shape[1], padded.shape[1])
    result[:, :width] = padded[:, :width]
    return result


def _alike(recorded: float, due: float, precision: float) -> bool:
    return abs(recorded - due) <= precision * (0.02 + abs(due))


def _explained(record: AuditRecord, words: str, explains: Callable[[LossCase, Loss], bool]) -> Trouble | None:
    off = differing(record)
    if not off or not all(explains(case, due) for case, due in off):
        return None
    case, due = max(off, key=lambda o: abs(o[0].recorded - float(o[1].total)))
    numbers = f"{case.recorded:.4g} where {float(due.total):.4g} is expected"
    return Trouble(f"{words}: {numbers}{case.words}", case.step)


# --- variations of the algorithm ------------------------------------------------------------------

Variation = Callable[[LossCase], LossCase | None]
"""A case as a mistake would make it; None where it would make no difference."""


def bounds_exchanged(case: LossCase) -> LossCase | None:
    """Return the case with the lower clip bound as the upper one, and the reverse."""
    settings = dict(case.algorithm.surrogate.settings)
    low, high = settings.get("clip_low"), settings.get("clip_high")
    if low is None or low == high:
        return None
    return _with(case, surrogate=Bound(surrogates.clip, {**settings, "clip_low": high, "clip_high": low}))


def not_clipped(case: LossCase) -> LossCase | None:
    """Return the case without a clip."""
    clipped = case.algorithm.surrogate.function is surrogates.clip
    return _with(case, surrogate=bind(surrogates.unclipped)) if clipped else None


def not_corrected(case: LossCase) -> LossCase | None:
    """Return the case without its importance correction."""
    return None if case.mismatch is None else replace(case, mismatch=None)


def corrected_the_wrong_way(case: LossCase) -> LossCase | None:
    """Return the case with the sampler over the trainer in its correction."""
    return None if case.mismatch is None else replace(case, mismatch=-case.mismatch)


def _with(case: LossCase, **axes: object) -> LossCase:
    return replace(case, algorithm=case.algorithm.variant(case.algorithm.paper, **axes))


def explained_by(variation: Variation, words: str, condition: str) -> Callable[[AuditRecord], Trouble | None]:
    """Return the check that speaks if a variation explains all losses that differ."""

    def fits(case: LossCase, _due: Loss) -> bool:
        varied = variation(case)
        return varied is not None and case.is_that_of(varied)

    def check(record: AuditRecord) -> Trouble | None:
        return _explained(record, words, fits)

    check.__doc__ = condition
    return check


def correction_is_inverted(record: AuditRecord) -> Trouble | None:
    """The importance correction is the sampler's probability over the trainer's: recorded weights are, or the
    loss has such weights, or gets the two log-probs in the other order.
    """
    clear = [correction for use in record.uses for correction in _corrected(use)]
    wrong = [correction for correction in clear if correction.inverted]
    if len(wrong) >= 4 and len(wrong) > 0.5 * len(clear):
        use, token, weight, due = wrong[0][:4]
        sentence = f"importance weights are sampler over trainer: {weight:.4g}"
        return Trouble(f"{sentence} where {due:.4g} is expected", use.update.step, location(use, token))
    exchanged = exchanged_with_the_sampler(record)
    if exchanged is not None:
        sentence = "the loss gets the sampler's log-probs as the old ones, and the old ones as the sampler's"
        return Trouble(f"{sentence} (call {exchanged.step} of {exchanged.name})")
    sentence = "the importance correction is the inverse of the right one"
    return explained_by(corrected_the_wrong_way, sentence, "")(record)


class Correction(NamedTuple):
    """The importance weight of a token at which trainer and sampler clearly differ."""

    use: Use
    token: int
    weight: float
    due: float
    """Trainer over sampler, of the token, or of the completion where the weight is of that."""
    inverted: bool
    """Whether the weight is sampler over trainer."""


def _corrected(use: Use) -> Iterator[Correction]:
    weights = use.row.corrections or ()
    apart = [(token, old - sampled) for token, old, sampled in pairs(use, old_logprobs, sampler)]
    # A weight of a whole completion is the product of its tokens' ratios.
    completion_log = sum(expected_log for _, expected_log in apart)
    for token, log_ratio in apart:
        weight = weights[token] if token < len(weights) else None
        if weight is None or weight <= 0 or abs(log_ratio) < APART:
            continue
        log = math.log(weight)
        expected_log = (
            log_ratio
            if abs(abs(log) - abs(log_ratio)) < abs(abs(log) - abs(completion_log))
            else completion_log
        )
        yield Correction(
            use, token, weight, math.exp(expected_log), math.isclose(log, -expected_log, rel_tol=0.05)
        )


def corrections_are_constant(record: AuditRecord) -> Trouble | None:
    """More than nine in ten importance weights of an update are one number other than 1: probably all were
    cut at a bound, and not what the log-probs of trainer and sampler give.
    """
    for update in record.updates:
        weights = [w for use in record.uses_of(update) for w in _weights(use)]
        usual = mode(weights) if weights else 1.0
        count = weights.count(usual)
        capped = not math.isclose(usual, 1.0, rel_tol=1e-3)
        if capped and count >= FEWEST and count > 0.9 * len(weights):
            sentence = f"{count} of {len(weights)} importance weights are {usual:.4g}"
            return Trouble(f"{sentence}: a bound cuts what it should let pass", update.step)
    return None


def _weights(use: Use) -> list[float]:
    """Return the importance weights of trained tokens that are not those due, nor 0, of a token left out."""
    due = {token: math.exp(old - sampled) for token, old, sampled in pairs(use, old_logprobs, sampler)}
    trained = zip(use.row.corrections or (), use.row.mask or (), strict=False)
    weights = {token: weight for token, (weight, on) in enumerate(trained) if on and weight}
    return [w for token, w in weights.items() if not math.isclose(w, due.get(token, 0.0), rel_tol=0.01)]


def reduction_is_another(record: AuditRecord) -> Trouble | None:
    """The loss has another mean: over tokens, over completions, or a sum."""
    for mean in MEANS.values():

        def fits(case: LossCase, _due: Loss, mean: Callable[..., Tensor] = mean) -> bool:
            asked_for = case.algorithm.reduce.function
            varied = _with(case, reduce=bind(mean))
            return asked_for is not mean and case.is_that_of(varied)

        asked_for = {case.algorithm.reduce.function.__name__ for case, _ in differing(record)}
        sentence = f"the loss is a {mean.__name__} and not a {' or '.join(asked_for)}"
        trouble = _explained(record, sentence.replace("_", " "), fits)
        if trouble is not None:
            return trouble
    return None


def loss_is_negated(record: AuditRecord) -> Trouble | None:
    """The loss has the other sign than the one computed from its own numbers."""

    def negated(case: LossCase, due: Loss) -> bool:
        return _alike(-case.recorded, float(due.total), case.precision) and abs(case.recorded) > 1e-3

    return _explained(record, "the loss has the wrong sign", negated)


def kl_has_the_wrong_sign(record: AuditRecord) -> Trouble | None:
    """The coefficient of the KL is negative, or its factor in the loss; or the loss is the expected one
    with the KL subtracted.
    """
    name = "beta" if record.setting("beta") is not None else "kl_coef"
    coef = record.number(name, 0.0)
    if coef < 0:
        return Trouble(f"{record.own_name(name)} is {coef:g}: the policy is paid for leaving its reference")

    in_the_loss = kl_is_subtracted(record)
    if in_the_loss is not None:
        return in_the_loss
    if record.setting("algorithm.use_kl_in_reward") is True:
        return _kl_is_paid(record)

    def subtracted(case: LossCase, due: Loss) -> bool:
        return float(due.kl) > 1e-4 and _alike(
            case.recorded, float(due.total) - 2 * coef * float(due.kl), case.precision
        )

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

    def scaled(case: LossCase, due: Loss) -> bool:
        sides = (case.recorded / count, case.recorded * count)
        return count > 1 and any(_alike(side, float(due.total), case.precision) for side in sides)

    sentence = f"the loss is scaled by gradient_accumulation_steps={count:g}"
    return _explained(record, sentence, scaled)


def loss_differs(record: AuditRecord) -> Trouble | None:
    """The loss differs from covey's loss of the same log-probs, masks and advantages."""
    return _explained(record, "the loss is not the one of its settings", lambda _case, _due: True)


CHECKS = {
    "kl_sign": kl_has_the_wrong_sign,
    "loss_negated": loss_is_negated,
    "loss_scaled": loss_is_scaled,
    "clip_swapped": explained_by(
        bounds_exchanged,
        "the clip bounds are exchanged, the lower one is the upper one",
        "The loss has the clip bounds exchanged: the lower bound is the upper one.",
    ),
    "clip_missing": explained_by(
        not_clipped, "no ratio is clipped", "The loss is that without a clip, where the settings have one."
    ),
    "correction_missing": explained_by(
        not_corrected,
        "the importance correction is left out of the loss",
        "The loss is that without the importance correction of the settings.",
    ),
    "correction_inverted": correction_is_inverted,
    "correction_constant": corrections_are_constant,
    "reduction_differs": reduction_is_another,
    "loss_differs": loss_differs,
}
