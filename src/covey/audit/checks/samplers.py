"""Checks of the sampler's log-probs: whether the sampler is the policy that is trained."""

from __future__ import annotations

import math
from statistics import fmean

from covey.audit.checks.check import Fault
from covey.audit.checks.logprobs import (
    DTYPE_VALUES,
    EQUAL_NATS,
    MIN_SURPRISE,
    OTHER_PROGRAM_NATS,
    SAME_PROGRAM_NATS,
    UNEXPLAINED_PART,
    Select,
    apart,
    apart_in_some,
    at_1,
    distance,
    first_by_rollout,
    first_uses,
    following,
    old,
    pairs,
    preceding,
    present,
    recomputed,
    sampler,
    surprise,
    trainer,
    worst,
)
from covey.audit.checks.tokens import MIN_COMPLETIONS, location
from covey.audit.record import AuditRecord, Numbers, Use


def with_gaps(select: Select) -> Select:
    """Return a selection whose values are those of the model's tokens only, with places for a tool's."""

    def spread(use: Use) -> Numbers | None:
        values, inserted = select(use), use.sample.inserted
        if values is None or not any(inserted or ()):
            return None
        written = iter(values)
        return [None if by_tool else next(written, None) for by_tool in inserted or ()]

    return spread


def of_turns(select: Select, later: bool) -> Select:
    """Return a selection of the tokens behind a tool's first answer, or of those before it."""

    def part(use: Use) -> Numbers | None:
        values, inserted = select(use), use.sample.inserted
        if values is None or not any(inserted or ()):
            return None
        first = [bool(by_tool) for by_tool in inserted or ()].index(True)
        return [value if (n > first) == later else None for n, value in enumerate(values)]

    return part


def sampler_is_shifted(record: AuditRecord) -> Fault | None:
    """The sampler's log-probs differ from the trainer's and equal the log-probs of the next tokens, or of
    the previous tokens. Or they have no places for the tokens that a tool wrote.
    """
    gap = "the sampler's log-probs have no places for a tool's tokens, so later ones come early: they differ"
    fault = apart(record, present, sampler, gap, with_gaps(sampler))
    if fault is not None:
        return fault
    for shift, which in ((following, "next token"), (preceding, "previous token")):
        sentence = f"the sampler's log-probs belong to the {which}: they differ"
        fault = apart(record, sampler, present, sentence, shift(present))
        if fault is not None:
            return fault
    return None


def sampler_reports_another_temperature(record: AuditRecord) -> Fault | None:
    """The sampler's log-probs are those at temperature 1, but it sampled at another temperature. If the
    model's own log-probs at temperature 1 are unknown: the trainer's log-probs of the tokens are higher than
    the sampler's, by 4 standard errors, although on average no distribution gives tokens a higher log-prob
    than the one from which they were drawn.
    """
    temperature = record.number("temperature", 1.0)
    has_plain = any(at_1(use) for use in record.uses)
    if temperature == 1 or has_plain:
        words = "the sampler's log-probs are at temperature 1: they differ"
        return apart(record, sampler, recomputed, words, at_1)
    sums = [sum(x - y for _, x, y in pairs(use, sampler, present)) for use in first_uses(record)]
    error = math.sqrt(sum(value**2 for value in sums))
    if len(sums) < MIN_COMPLETIONS**2 or sum(sums) >= -4 * error:
        return None
    words = f"the trainer finds tokens more likely at the sampling temperature {temperature:g}"
    return apart(record, sampler, present, f"{words} than the sampler that drew them: the two differ")


def sampler_is_left_behind(record: AuditRecord) -> Fault | None:
    """Over at least three rollouts, the sampler's log-probs agree with the trainer's in the first one, and
    until a weight has changed, but in none after that: they differ by at least five times as much in each of
    these, and by more than .02 nats per token in the last. If the run corrects for this with importance
    weights, the distance in the second half must also be a quarter larger than in the first: a sampler that
    lags some updates behind by design keeps its distance.
    """
    by_rollout = list(first_by_rollout(record).values())
    # All rollouts before the first change of a weight count as the first one.
    unchanged = [uses for uses in by_rollout if not any(use.changed_before for use in uses)]
    by_rollout = by_rollout[max(len(unchanged) - 1, 0) :]
    distances = [distance(uses, sampler, present) for uses in by_rollout]
    distances = [value for value in distances if not math.isnan(value)]
    if len(distances) < 3 or not (
        distances[0] < UNEXPLAINED_PART * min(distances[1:]) and distances[-1] > SAME_PROGRAM_NATS
    ):
        return None
    half = (len(distances) + 1) // 2
    if _corrects(record) and fmean(distances[half:]) <= 1.25 * fmean(distances[1:half]):
        return None
    last = by_rollout[-1]
    use, token = worst(last, sampler, present)
    growth = f"{distances[0]:.2g} nats per token at first and by {distances[-1]:.2g} at last"
    sentence = f"sampler and trainer differ by {growth}"
    return Fault(
        f"{sentence}: the sampler does not get the new weights", use.update.step, location(use, token)
    )


def sampler_reads_another_history(record: AuditRecord) -> Fault | None:
    """Until a weight has changed, sampler and trainer agree up to a tool's first answer. Behind it they
    differ by more than .05 nats per token and at least five times as much as before, although the tokens
    before it are uncertain enough to show a difference.
    """
    uses = [use for use in first_uses(record) if not use.changed_before]
    before_it, behind = (distance(uses, of_turns(sampler, later), present) for later in (False, True))
    if not (behind > OTHER_PROGRAM_NATS and before_it < UNEXPLAINED_PART * behind):
        return None
    if fmean(surprise(use, of_turns(present, later=False)) for use in uses) < MIN_SURPRISE:
        return None
    use, token = worst(uses, of_turns(sampler, later=True), present)
    sentence = f"sampler and trainer agree up to a tool's answer and differ behind it, by {behind:.2g} nats"
    return Fault(f"{sentence} per token: they read another history", use.update.step, location(use, token))


def sampler_differs(record: AuditRecord) -> Fault | None:
    """Sampler and trainer differ by more than .05 nats per token, or by more than .2 if the run corrects for
    that with importance weights. Or, without such weights, they differ by more than .05 in more than a tenth
    of a rollout's completions, while a quarter of them agree to within .001.
    """
    limit = 0.2 if _corrects(record) else OTHER_PROGRAM_NATS
    first = [use for use in first_uses(record) if use.row.rollout == record.rollouts[0].number]
    agreed = distance(first, sampler, present) <= OTHER_PROGRAM_NATS
    since = "though not in the first rollout" if agreed else "from the first rollout on"
    words = "sampler and trainer differ"
    if _draws_from_a_part(record):
        words = (
            "the sampler draws only from the likelier tokens (top_p, top_k, min_p): it and the trainer differ"
        )
    everywhere = apart(record, sampler, present, f"{words}, {since},", limit=limit)
    if everywhere is not None or _corrects(record):
        return everywhere
    return apart_in_some(record, sampler, present, "sampler and trainer differ")


def _corrects(record: AuditRecord) -> bool:
    """Whether the loss corrects for the sampler's log-probs: by weights, or by using them as the old ones."""
    # TRL corrects only for vLLM; other frameworks have no such setting.
    asked_for = record.setting("vllm_importance_sampling_correction") and record.setting("use_vllm", True)
    weighs = any(w not in (None, 0, 1) for use in record.uses for w in use.row.corrections or ())
    return bool(asked_for) or weighs or _lags_in_the_ratio(record)


def _lags_in_the_ratio(record: AuditRecord) -> bool:
    """Whether the old log-probs are the sampler's, and agreed with the trainer's in the first rollout. Any
    later difference is then a lag, for which the ratio corrects.
    """
    first = [use for use in first_uses(record) if use.row.rollout == record.rollouts[0].number]
    return distance(first_uses(record), old, sampler) == 0 and distance(first, sampler, trainer) < EQUAL_NATS


def _draws_from_a_part(record: AuditRecord) -> bool:
    """Whether the sampler's log-probs exceed the trainer's, as if some tokens shared all the probability."""
    apart = [x - y for use in first_uses(record) for _, x, y in pairs(use, sampler, present)]
    return len(apart) >= DTYPE_VALUES and min(apart) > -0.1 * fmean(apart)


CHECKS = {
    "sampler_shifted": sampler_is_shifted,
    "sampler_temperature": sampler_reports_another_temperature,
    "history_differs": sampler_reads_another_history,
    "sampler_behind": sampler_is_left_behind,
    "sampler_differs": sampler_differs,
}
