"""Checks of losses: each is computed again from the inputs of the loss function, under the run's settings.

An update of TRL is one case, and so is each recorded call of verl's and OpenRLHF's loss functions. A mistake
is a variation of the algorithm: the cause is the variation that reproduces all recorded losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from covey.audit.check import Fault, MissingField
from covey.audit.conventions import (
    MEANS,
    algorithm_setting,
    convention_of,
    correction_of,
    entropy_coefficient,
    is_rloo,
    loss_of_calls,
    losses_of,
)
from covey.audit.corrections import exchanged_weights, weights_are_inverted
from covey.audit.derivatives import DERIVATIVES
from covey.audit.frameworks import FRAMEWORKS
from covey.audit.groups import groups_of
from covey.audit.kl_rewards import kl_is_paid
from covey.audit.record import AuditRecord, LossCall, LossRow, Numbers, Row, Update, Use
from covey.audit.terms import entropy_enters_with_the_wrong_sign, kl_is_subtracted
from covey.audit.variations import (
    LossCase,
    Variation,
    bounds_exchanged,
    clipped_alone,
    clipped_outside,
    corrected_the_wrong_way,
    entropy_added,
    kl_exchanged,
    not_clipped,
    not_corrected,
    of_another_level,
    of_the_product,
    over_padding,
    varied,
)
from covey.objective.algorithms import Algorithm
from covey.objective.axis_function import bind
from covey.objective.data import LossInputs
from covey.objective.reductions import Totals, token_mean

CLIPPED = ("vanilla", "ppo")
"""Loss functions of verl and OpenRLHF with PPO's clip."""
MIN_ADVANTAGE = 1e-3
"""An advantage below is the rounding of rewards that are equal."""
MIN_WEIGHT = 1e-30
"""Smaller weights count as this one, so that their logarithm is finite."""


@lru_cache(maxsize=8)
def differing(record: AuditRecord) -> tuple[tuple[LossCase, ...], ...]:
    """Return, for each algorithm that the run may have, the losses that differ from covey's; () if one of the
    algorithms explains all losses.
    """
    of_calls = tuple(_of_calls(record))
    alternatives = []
    for algorithm in losses_of(record) or (None,):
        cases = (*(() if algorithm is None else _of_updates(record, algorithm)), *of_calls)
        off = tuple(case for case in cases if not case.is_that_of(case))
        if not off:
            return ()
        alternatives.append(off)
    return tuple(alternatives)


def _of_updates(record: AuditRecord, algorithm: Algorithm) -> Iterator[LossCase]:
    """Yield the losses of whole updates, as an algorithm computes them."""
    coef = entropy_coefficient(record)
    for update in record.updates:
        uses = record.uses_of(update)
        if update.loss is not None and _is_complete(algorithm, update, uses):
            references = None if algorithm.kl is None else [use.row.ref_logprobs or [] for use in uses]
            totals = {
                "prompts": len(set(groups_of([use.sample for use in uses]))),
                "max_tokens": int(record.number("max_completion_length", 0)),
            }
            inputs = _inputs(_rows_of(uses), totals, references)
            bonus = coef * (update.metrics.get("entropy") or 0.0)
            # HF's trainer divides the loss of RLOO, which TRL leaves as a mean over the micro-batch.
            micro_batches = record.number("gradient_accumulation_steps", 1) if is_rloo(record) else 1
            recorded = update.loss / micro_batches if _is_whole(record, algorithm, uses) else math.nan
            case = LossCase(update.step, "", recorded, algorithm, inputs, bonus=bonus)
            is_part = len(uses) < _sampled(record, {use.row.rollout for use in uses})
            is_scaled = is_part or math.isnan(recorded) or not _keeps_scale(record)
            gradients = _gradients_of(uses, inputs)
            case = replace(case, gradients=gradients, is_part=is_part, is_scaled=is_scaled)
            # Each of several rollouts has a divisor of its own, so that not even the direction follows.
            if math.isnan(recorded) and (case.gradients is None or len({u.row.rollout for u in uses}) > 1):
                continue
            yield case if record.header.framework in FRAMEWORKS else _corrected(case, [u.row for u in uses])


def _is_complete(algorithm: Algorithm, update: Update, uses: Sequence[Use]) -> bool:
    """Whether a record holds all that an update's loss is computed from, up to its divisor."""
    rows = [use.row for use in uses]
    complete = all(r.mask and r.logprobs and isinstance(r.advantage, float) for r in rows)
    if not rows or not complete or len(rows) < len(update.rows):
        return False
    return algorithm.kl is None or all(r.ref_logprobs is not None for r in rows)


def _is_whole(record: AuditRecord, algorithm: Algorithm, uses: Sequence[Use]) -> bool:
    """Whether an update's loss follows from its rows; otherwise only the direction of its gradient does."""
    if record.number("entropy_coef", 0.0) != entropy_coefficient(record):
        return False
    # The other processes have tokens and completions, too.
    if record.number("processes", 1.0) > 1:
        return False
    # TRL takes a mean over the tokens of a whole rollout, so the update must contain all of it.
    numbers = {use.row.rollout for use in uses}
    is_one_rollout = len(numbers) == 1 and len(uses) == _sampled(record, numbers)
    is_own = record.header.framework not in FRAMEWORKS
    return is_one_rollout or is_own or algorithm.reduce.function is not token_mean


def _keeps_scale(record: AuditRecord) -> bool:
    """Whether derivatives have the scale of the loss; TRL's writer reads them in the backward pass."""
    # A scaler of float16 and DeepSpeed multiply the loss before that.
    others = record.setting("fp16") or record.setting("deepspeed")
    return record.header.framework == "trl" and not others


def _corrected(case: LossCase, rows: Sequence[Row] | Sequence[LossRow]) -> LossCase:
    """Return a case with the importance weights of its completions, if all have them."""
    weights = [row.corrections for row in rows if row.corrections is not None]
    if len(weights) < len(rows):
        return case
    logs = [[math.log(max(w or 0.0, MIN_WEIGHT)) for w in row] for row in weights]
    return replace(case, mismatch=_padded(logs, case.inputs.mask))


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
        case = _corrected(case, call.rows)
        sampler = [row.sampler_logprobs for row in call.rows if row.sampler_logprobs is not None]
        if case.mismatch is None and weigh is not None and len(sampler) == len(call.rows):
            mismatch = inputs.old_logprobs - _padded(sampler, inputs.mask)
            case = replace(case, mismatch=mismatch, weigh=weigh)
        yield case


def _totals_of(call: LossCall) -> dict[str, int] | None:
    """Return the totals by which a loss divides, if its caller gives any; None if one is no whole number."""
    totals = {"tokens": call.tokens, "completions": call.completions}
    recorded = {name: total for name, total in totals.items() if total is not None}
    rounded = {name: round(total) for name, total in recorded.items()}
    return rounded if all(abs(rounded[name] - total) <= 1e-3 for name, total in recorded.items()) else None


def _rows_of(uses: Sequence[Use]) -> list[LossRow]:
    """Return the completions of an update as its loss gets them. Missing old log-probs equal the present."""
    return [
        LossRow(
            mask=_with_places(row.mask or [], row.gradients or ()),
            logprobs=row.logprobs or [],
            old_logprobs=row.old_logprobs or row.logprobs or [],
            advantage=[row.advantage if isinstance(row.advantage, float) else None] * len(row.mask or ()),
        )
        for row in (use.row for use in uses)
    ]


def _with_places(mask: list[bool], gradients: Numbers | tuple[()]) -> list[bool]:
    """Return a mask with the places behind it that have a gradient."""
    return [*mask, *[False] * (len(gradients) - len(mask))]


def _gradients_of(uses: Sequence[Use], inputs: LossInputs) -> Tensor | None:
    """Return the recorded derivative of an update's loss; None without one, or where it is rounding alone."""
    gradients = [use.row.gradients for use in uses if use.row.gradients is not None]
    if len(gradients) < len(uses) or float(inputs.advantages.abs().max()) < MIN_ADVANTAGE:
        return None
    return _padded(gradients, inputs.mask)


def _inputs(
    rows: Sequence[LossRow], totals: Mapping[str, int], references: Sequence[Numbers] | None = None
) -> LossInputs:
    """Return the inputs of a loss. ``totals``: numbers that replace the counts of these rows."""
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
    """Return rows of numbers as (N, T) float64, with 0 after their ends and for unknown values."""
    values = [torch.tensor([0.0 if v is None else v for v in row], dtype=torch.float64) for row in rows]
    padded = pad_sequence(values, batch_first=True)
    if mask is None:
        return padded
    result = torch.zeros(mask.shape, dtype=torch.float64)
    width = min(mask.shape[1], padded.shape[1])
    result[:, :width] = padded[:, :width]
    return result


def _fault_if_explained(
    record: AuditRecord, words: str, explains: Callable[[LossCase], bool]
) -> Fault | None:
    for off in differing(record):
        if all(map(explains, off)):
            case = max(off, key=lambda case: abs(case.recorded - case.due))
            numbers = f"{case.recorded:.4g} where {case.due:.4g} is expected"
            if case.agrees(case.recorded, case.due):
                numbers = "its derivative by the log-probs is not the expected one"
            return Fault(f"{words}: {numbers}{case.words}", case.step)
    return None


def _missing_loss_setting(record: AuditRecord) -> MissingField | None:
    """Return the missing setting if nothing says which loss the run has, so that none can be called wrong."""
    setting = None if convention_of(record) is not None or record.calls else algorithm_setting(record)
    return None if setting is None else MissingField(setting)


# --- checks --------------------------------------------------------------------------------------


def _fault_of_variation(record: AuditRecord, variation: Variation, words: str) -> Fault | None:
    """Return a fault if a variation explains all losses that differ."""

    def fits(case: LossCase) -> bool:
        other = variation(case)
        return other is not None and case.is_that_of(other)

    return _fault_if_explained(record, words, fits)


def explained_by(variation: Variation, words: str, condition: str) -> Callable[[AuditRecord], Fault | None]:
    """Return the check that reports a fault if a variation explains all losses that differ."""

    def check(record: AuditRecord) -> Fault | None:
        return _fault_of_variation(record, variation, words)

    check.__doc__ = condition
    return check


def correction_is_inverted(record: AuditRecord) -> Fault | MissingField | None:
    """The importance correction is the sampler's probability over the trainer's: the recorded weights are,
    or the loss has such weights, or it gets the two log-probs in the other order.
    """
    sentence = "the importance correction is the inverse of the correct one"
    return (
        weights_are_inverted(record)
        or exchanged_weights(record)
        or _fault_of_variation(record, corrected_the_wrong_way, sentence)
    )


def reduction_is_another(record: AuditRecord) -> Fault | MissingField | None:
    """The loss has another reduction than the settings ask for: a mean over tokens, over completions, or
    over all places with the padding, or a sum.
    """
    lacking = _missing_loss_setting(record)
    if lacking is not None:
        return lacking
    for mean in MEANS.values():

        def fits(case: LossCase, mean: Callable[..., Tensor] = mean) -> bool:
            asked_for = case.algorithm.reduce.function
            return asked_for is not mean and case.is_that_of(varied(case, reduce=bind(mean)))

        off = [case for cases in differing(record) for case in cases]
        asked_for = {case.algorithm.reduce.function.__name__ for case in off}
        sentence = f"the loss is a {mean.__name__} and not a {' or '.join(asked_for)}"
        fault = _fault_if_explained(record, sentence.replace("_", " "), fits)
        if fault is not None:
            return fault
    words = "the mean of the loss is over all places, including the padding"
    return _fault_of_variation(record, over_padding, words)


def loss_is_negated(record: AuditRecord) -> Fault | None:
    """The loss has the opposite sign of the one computed from its own numbers."""

    def negated(case: LossCase) -> bool:
        shows = case.gradients is not None or abs(case.recorded) > 1e-3
        return shows and case.agrees(-case.recorded, case.due) and case.is_along(case, by=-1.0)

    return _fault_if_explained(record, "the loss has the wrong sign", negated)


def kl_has_the_wrong_sign(record: AuditRecord) -> Fault | None:
    """The coefficient of the KL, or its factor in the loss, is negative; or the loss is the expected one
    with the KL subtracted; or the KL is added to the rewards of tokens or completions.
    """
    name = "beta" if record.setting("beta") is not None else "kl_coef"
    coef = record.number(name, 0.0)
    if coef < 0:
        return Fault(f"{record.own_name(name)} is {coef:g}: the policy is paid for leaving its reference")

    in_the_loss = kl_is_subtracted(record)
    in_the_reward = kl_is_paid(record)
    if in_the_loss is not None or in_the_reward is not None:
        return in_the_loss or in_the_reward
    if record.setting("algorithm.use_kl_in_reward") is True:
        return None

    def subtracted(case: LossCase) -> bool:
        kl = float(case.value().kl)
        is_known = not math.isnan(case.recorded)
        return is_known and kl > 1e-4 and case.agrees(case.recorded, case.due - 2 * coef * kl)

    return _fault_if_explained(record, "the KL is subtracted from the loss", subtracted)


def kl_of_the_loss_is_exchanged(record: AuditRecord) -> Fault | None:
    """The KL of the loss has its arguments exchanged."""
    words = "the KL in the loss is that of the reference to the policy"
    return _fault_of_variation(record, kl_exchanged, words)


def loss_is_scaled(record: AuditRecord) -> Fault | None:
    """The loss is the expected one multiplied or divided by the number of accumulated micro-batches."""
    count = record.number("gradient_accumulation_steps", 1)

    def scaled(case: LossCase) -> bool:
        # An update on a part of a rollout may divide by the tokens of the whole rollout.
        is_known = not case.is_part and not math.isnan(case.recorded)
        factors = (count, 1 / count) if count > 1 and is_known else ()
        return any(case.agrees(case.recorded / by, case.due) and case.is_along(case, by) for by in factors)

    sentence = f"the loss is scaled by gradient_accumulation_steps={count:g}"
    return _fault_if_explained(record, sentence, scaled)


def loss_differs(record: AuditRecord) -> Fault | MissingField | None:
    """The loss differs from covey's loss for the same log-probs, masks and advantages."""
    sentence = "the loss is not the one that the settings ask for"
    return _missing_loss_setting(record) or _fault_if_explained(
        record, sentence, lambda case: not case.is_part
    )


def gradient_differs(record: AuditRecord) -> Fault | MissingField | None:
    """The derivative of the loss by the log-probs, as the record has it, is not that of the settings' loss,
    times a number: tokens of the mask have none, others have one, or the KL has none.
    """
    off = [case for cases in differing(record) for case in cases if not case.is_along(case)]
    for words, explains in DERIVATIVES:
        if off and all(map(explains, off)):
            return _missing_loss_setting(record) or Fault(words, off[0].step)
    return None


def entropy_has_the_wrong_sign(record: AuditRecord) -> Fault | None:
    """The entropy is added to the loss instead of subtracted, although its coefficient is positive."""
    words = "the entropy is added to the loss, which drives it down"
    return entropy_enters_with_the_wrong_sign(record) or _fault_of_variation(record, entropy_added, words)


def ratio_is_of_another_level(record: AuditRecord) -> Fault | None:
    """The loss takes the ratio of each token where the settings ask for the completion's, or the reverse; or
    it takes the product of the tokens' ratios where they ask for the geometric mean.
    """
    words = "the ratio is not of the level that the settings ask for (token or completion)"
    product = "the ratio of a completion is the product of its tokens' ratios, not their geometric mean"
    return _fault_of_variation(record, of_another_level, words) or _fault_of_variation(
        record, of_the_product, product
    )


def clip_is_missing(record: AuditRecord) -> Fault | None:
    """The loss is not clipped although the settings ask for it; or the clip takes the larger of PPO's two
    objectives, or the clipped one alone.
    """
    larger = "the clip takes the larger objective: it limits a ratio only if that moved against its advantage"
    alone = "the loss has only the clipped objective: no gradient leads back from beyond a bound"
    return (
        _fault_of_variation(record, not_clipped, "no ratio is clipped")
        or _fault_of_variation(record, clipped_outside, larger)
        or _fault_of_variation(record, clipped_alone, alone)
    )


CHECKS = {
    "entropy_sign": entropy_has_the_wrong_sign,
    "ratio_level": ratio_is_of_another_level,
    "kl_sign": kl_has_the_wrong_sign,
    "loss_negated": loss_is_negated,
    "loss_scaled": loss_is_scaled,
    "clip_swapped": explained_by(
        bounds_exchanged,
        "the clip bounds are exchanged, the lower one is the upper one",
        "The loss has the clip bounds exchanged: the lower bound is the upper one.",
    ),
    "clip_missing": clip_is_missing,
    "correction_missing": explained_by(
        not_corrected,
        "the importance correction is left out of the loss",
        "The loss lacks the importance correction that the settings ask for.",
    ),
    "correction_inverted": correction_is_inverted,
    "reduction_differs": reduction_is_another,
    "gradient_differs": gradient_differs,
    "loss_differs": loss_differs,
}
