"""Checks of losses: each is computed again from the inputs of the loss function, under the run's settings.

A mistake is a variation of the algorithm: the cause is the variation that reproduces all recorded losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from covey.audit.checks.check import Fault, MissingField
from covey.audit.checks.conventions import (
    MEANS,
    algorithm_setting,
    convention_of,
)
from covey.audit.checks.corrections import exchanged_weights, weights_are_inverted
from covey.audit.checks.derivatives import DERIVATIVES
from covey.audit.checks.kl_rewards import kl_is_paid
from covey.audit.checks.loss_cases import differing
from covey.audit.checks.terms import entropy_enters_with_the_wrong_sign, kl_is_subtracted
from covey.audit.checks.variations import (
    LossCase,
    Variation,
    bounds_exchanged,
    clipped_alone,
    clipped_outside,
    corrected_the_wrong_way,
    counting_untrained,
    entropy_added,
    kl_exchanged,
    not_clipped,
    not_corrected,
    of_another_level,
    of_both_levels,
    of_the_product,
    over_padding,
    varied,
)
from covey.audit.record import AuditRecord
from covey.objective.axis_function import bind


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
    """The importance correction is the sampler's probability over the trainer's. Either the recorded weights
    or those in the loss have these values, or the loss gets the two log-probs in the wrong order.
    """
    sentence = "the importance correction is the inverse of the correct one"
    return (
        weights_are_inverted(record)
        or exchanged_weights(record)
        or _fault_of_variation(record, corrected_the_wrong_way, sentence)
    )


def reduction_is_another(record: AuditRecord) -> Fault | MissingField | None:
    """The loss has another reduction than the settings ask for: a mean over tokens, over completions, or
    over all places with the padding or the untrained tokens, or a sum.
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
    untrained = "the mean of the loss counts tokens that are not trained, such as a tool's"
    return _fault_of_variation(record, over_padding, words) or _fault_of_variation(
        record, counting_untrained, untrained
    )


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
    """The recorded derivative of the loss by the log-probs is not that of the settings' loss, up to a factor:
    tokens of the mask have none, tokens off the mask have one, or the KL has none.
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
    it takes the product of the tokens' ratios where they ask for the geometric mean, or multiplies the
    ratios of both levels.
    """
    words = "the ratio is not of the level that the settings ask for (token or completion)"
    product = "the ratio of a completion is the product of its tokens' ratios, not their geometric mean"
    both = "the ratio of a completion is multiplied by that of each token, so a motion counts twice"
    return (
        _fault_of_variation(record, of_another_level, words)
        or _fault_of_variation(record, of_the_product, product)
        or _fault_of_variation(record, of_both_levels, both)
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
