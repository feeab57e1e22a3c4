"""Checks of log-probs: those of the sampler, the trainer, the policy before the updates, the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from statistics import fmean

from covey.audit.checks.check import Fault
from covey.audit.checks.conventions import is_rloo
from covey.audit.checks.tokens import MIN_COMPLETIONS, location
from covey.audit.record import AuditRecord, LossCall, Numbers, Use

SAME_PROGRAM_NATS = 0.02
"""Most nats per token between two passes of the same trainer."""
OTHER_PROGRAM_NATS = 0.05
"""Most nats per token between two programs; bfloat16 alone reached .024 in a model of 135M parameters."""
UNEXPLAINED_PART = 0.2
"""Largest part of a difference that an explanation may leave."""
MIN_CALLS = 4
"""Fewest calls of a loss after a weight has moved that show a ratio which stays 1."""
MIN_WIDE_RATIOS = 4
"""Ratios above 2 that a check needs before it applies."""
Select = Callable[[Use], Numbers | None]


trainer: Select = attrgetter("row.logprobs")
"""The trainer's log-probs."""
old: Select = attrgetter("row.old_logprobs")
"""The log-probs that the ratio divides by."""
sampler: Select = attrgetter("sample.sampler_logprobs")
"""The sampler's log-probs."""
recomputed: Select = attrgetter("sample.model_logprobs")
"""The log-probs that the writer computed again at the sampling temperature."""
after: Select = attrgetter("row.after_logprobs")
"""The log-probs that the writer computed again after the update."""
at_1: Select = attrgetter("sample.model_logprobs_at_1")
"""The log-probs that the writer computed again at temperature 1."""
reference: Select = attrgetter("row.ref_logprobs")
"""The reference's log-probs."""


WHOSE = {old: "the old", trainer: "the trainer's", reference: "the reference's", sampler: "the sampler's"}
EQUAL_NATS = 1e-3
"""Most nats per token between two passes in float32."""
MIN_SURPRISE = 0.3
"""Fewest nats per token of a completion in which a difference would show."""
DTYPE_BITS = {"bfloat16": 8, "float16": 11}
"""Significant bits of a dtype."""
DTYPE_VALUES = 64
"""Fewest different log-probs from which a dtype is inferred."""
DTYPE_COMPLETIONS = 256
"""Completions whose log-probs are searched for a dtype."""
NEAR_ZERO = 1e-3
"""Log-probs closer to 0 are skipped: they often have few bits by chance."""


def before(use: Use) -> Numbers | None:
    """Return the log-probs before the update: those computed again, or else the trainer's."""
    return recomputed(use) or trainer(use)


def at_sampling(use: Use) -> Numbers | None:
    """Return the log-probs of the weights that sampled: those computed again, or else the sampler's."""
    return recomputed(use) or sampler(use)


def present(use: Use) -> Numbers | None:
    """Return the trainer's log-probs, or else the old ones; a first update has both from the same weights."""
    return trainer(use) or old(use)


def following(select: Select) -> Select:
    """Return a selection of the next token's log-probs, as if they were written one place early."""

    def shifted(use: Use) -> Numbers | None:
        values = select(use)
        return None if values is None else [*values[1:], None]

    return shifted


def preceding(select: Select) -> Select:
    """Return a selection of the previous token's log-probs, as if they were written one place late."""

    def shifted(use: Use) -> Numbers | None:
        values = select(use)
        return None if values is None else [None, *values[:-1]]

    return shifted


def pairs(use: Use, a: Select, b: Select) -> Iterator[tuple[int, float, float]]:
    """Yield (token, value of a, value of b) for each trained and sampled token where both are finite."""
    first, second = a(use), b(use)
    if first is None or second is None:
        return
    mask = use.row.mask or [True] * len(first)
    inserted = use.sample.inserted or [False] * len(mask)
    for token, (x, y, on, off) in enumerate(zip(first, second, mask, inserted, strict=False)):
        if on and not off and x is not None and y is not None and math.isfinite(x) and math.isfinite(y):
            yield token, x, y


def distance(uses: Sequence[Use], a: Select, b: Select) -> float:
    """Return the mean distance over all tokens, in nats; NaN without tokens."""
    return fmean([abs(x - y) for use in uses for _, x, y in pairs(use, a, b)] or [math.nan])


def first_uses(record: AuditRecord) -> list[Use]:
    """Return the completions of each rollout's first update, whose weights are those that sampled them."""
    return [use for use in record.uses if use.first]


def worst(uses: Sequence[Use], a: Select, b: Select) -> tuple[Use, int]:
    """Return the completion and the token at which two log-probs are farthest apart."""
    every = [(abs(x - y), n, token) for n, use in enumerate(uses) for token, x, y in pairs(use, a, b)]
    _, n, token = max(every)
    return uses[n], token


def apart(
    record: AuditRecord,
    a: Select,
    b: Select,
    words: str,
    explained_by: Select | None = None,
    limit: float = SAME_PROGRAM_NATS,
) -> Fault | None:
    """Return a fault if a and b differ on the first update by more than ``limit`` nats per token. If
    ``explained_by`` is given, it has to agree with a.
    """
    uses = first_uses(record)
    nats = distance(uses, a, b)
    # A NaN, of a record without comparable tokens, is no fault.
    is_fault = nats > limit and (
        explained_by is None or distance(uses, a, explained_by) < UNEXPLAINED_PART * nats
    )
    if not is_fault:
        return None
    use, token = worst(uses, a, b)
    return Fault(
        f"{words} by {nats:.2g} nats per token",
        use.update.step,
        {**location(use, token), "nats": round(nats, 6)},
    )


def apart_in_some(record: AuditRecord, a: Select, b: Select, words: str) -> Fault | None:
    """Return a fault if two log-probs agree in a quarter of a rollout's completions and differ by more than
    .05 nats per token in a tenth, at least four in all: low precision would affect all of them.
    """
    different = list[Use]()
    compared = 0
    for uses in first_by_rollout(record).values():
        # Completions that are nearly certain agree whatever the precision, so they are skipped.
        off = [(use, distance([use], a, b)) for use in uses if surprise(use, b) > MIN_SURPRISE]
        apart = [use for use, nats in off if nats > OTHER_PROGRAM_NATS]
        alike = sum(nats < EQUAL_NATS for _, nats in off)
        if alike >= 0.25 * len(off) and len(apart) >= 0.1 * len(off):
            different += apart
            compared += len(off)
    if len(different) < MIN_COMPLETIONS:
        return None
    use, token = worst(different, a, b)
    nats = distance(different, a, b)
    sentence = f"{words}, by {nats:.2g} nats per token, in {len(different)} of {compared}"
    return Fault(
        f"{sentence} completions, while others of the same rollouts agree",
        use.update.step,
        location(use, token),
    )


def first_by_rollout(record: AuditRecord) -> dict[int, list[Use]]:
    """Return the completions of each rollout's first update."""
    by_rollout: dict[int, list[Use]] = {}
    for use in first_uses(record):
        by_rollout.setdefault(use.row.rollout, []).append(use)
    return by_rollout


def surprise(use: Use, select: Select) -> float:
    """Return the mean of a completion's negative log-probs, in nats; 0 without any."""
    return fmean([-x for _, x, _ in pairs(use, select, select)] or [0.0])


def numbers_are_not_finite(record: AuditRecord) -> Fault | None:
    """A log-prob of a trained token, a loss or a gradient norm is NaN or infinite."""
    for use in record.uses:
        for token, (value, on) in enumerate(zip(trainer(use) or (), use.row.mask or (), strict=False)):
            if on and value is not None and not math.isfinite(value):
                return Fault(f"a log-prob is {value}", use.update.step, location(use, token))
    for update in record.updates:
        for name, value in (("loss", update.loss), ("gradient norm", update.grad_norm)):
            if value is not None and not math.isfinite(value):
                return Fault(f"the {name} is {value}", update.step)
    return None


def logprobs_are_shifted(record: AuditRecord) -> Fault | None:
    """The trainer's log-probs differ from the model's own and equal the log-probs of the next tokens."""
    return apart(
        record,
        trainer,
        recomputed,
        "the trainer's log-probs belong to the next token: they differ",
        following(recomputed),
    )


def temperature_is_missing(record: AuditRecord) -> Fault | None:
    """The trainer's log-probs are those at temperature 1, but completions were sampled at another
    temperature.
    """
    temperature = record.number("temperature", 1.0)
    words = (
        f"tokens were sampled at temperature {temperature:g}, the trainer's log-probs are at 1: they differ"
    )
    return apart(record, trainer, recomputed, words, at_1)


def trainer_differs_from_the_model(record: AuditRecord) -> Fault | None:
    """The trainer's log-probs differ from those of a plain forward pass by more than .05 nats per token: on
    average, or in more than a tenth of a rollout's completions while a quarter of them agree to within .001.
    Not asked if that forward pass is the sampler's, and the two differ only after a weight has changed.
    """
    if _samples_with_other_weights(record):
        return None
    sentence = _with_dropout(record, "the trainer's log-probs differ from its own model's")
    everywhere = apart(record, trainer, recomputed, sentence, limit=OTHER_PROGRAM_NATS)
    return everywhere or apart_in_some(record, trainer, recomputed, sentence)


def _samples_with_other_weights(record: AuditRecord) -> bool:
    """Whether the plain forward pass is of the sampler's weights, which lag behind the trainer's."""
    uses = first_uses(record)
    unchanged = [use for use in uses if not use.changed_before]
    is_the_samplers = distance(uses, sampler, recomputed) < EQUAL_NATS
    return is_the_samplers and distance(unchanged, trainer, recomputed) < SAME_PROGRAM_NATS


def old_logprobs_are_stale(record: AuditRecord) -> Fault | None:
    """In the first update on a rollout, when no weight has changed since sampling, the old log-probs differ
    from the trainer's by more than .02 nats per token and are not the sampler's.
    """
    if distance(first_uses(record), old, sampler) == 0:  # the sampler's own: verl's bypass_mode
        return None
    words = "no update came between, but old and present log-probs differ"
    return apart(record, old, trainer, _with_dropout(record, words))


def _with_dropout(record: AuditRecord, words: str) -> str:
    """Return words with the dropout of the model, which draws another mask for each forward pass."""
    rates = [(name, rate) for name, rate in record.header.settings.items() if name.startswith("model.")]
    named = [f"{name.removeprefix('model.')}={rate:g}" for name, rate in rates if isinstance(rate, float)]
    if not named:
        return words
    return f"the model has {', '.join(named)}: dropout is on in training, and {words}"


def ratio_is_always_1(record: AuditRecord) -> Fault | None:
    """In updates on a rollout after the weights have changed, the old log-probs are missing or equal the
    present ones bit for bit. Or they are equal in all calls of the loss, before and after the weights have
    changed, although the settings split a rollout into several updates. Or, where a completion is trained
    for the first time after a change, without importance weights, they are a hundred times nearer to the
    present ones than to those of the weights that sampled, which differ by more than .001 nats per token,
    and five times less before it.
    """
    moved = [use for use in record.uses if use.moved and trainer(use)]
    # TRL uses the present log-probs if its batch has no old ones.
    absent = record.header.framework == "trl"
    judged = [use for use in moved if absent or old(use) is not None]
    stuck = [use for use in judged if old(use) is None or all(x == y for _, x, y in pairs(use, trainer, old))]
    sentence = "the ratio is 1 in every update on a rollout, though the policy has moved: clipping cannot act"
    if len(stuck) >= MIN_COMPLETIONS and len(stuck) == len(judged):
        return Fault(sentence, stuck[0].update.step, location(stuck[0]))
    calls = [call for call in record.calls if call.moved]
    several = updates_of_a_rollout(record) > 1 and len(calls) >= MIN_CALLS
    if several and all(map(_is_on_policy, record.calls)):
        return Fault(sentence)
    return _old_logprobs_are_late(record)


def _old_logprobs_are_late(record: AuditRecord) -> Fault | None:
    """Return a fault if old log-probs are those of the first update on a completion, not of its sampling."""
    begun = {(use.row.rollout, use.row.completion): use for use in reversed(record.uses)}
    # With importance weights the ratio may begin at 1 in the update: they correct for all before it.
    late = [use for use in begun.values() if use.moved and not _is_corrected(use)]
    unlike, noise = (distance(uses, old, at_sampling) for uses in (late, first_uses(record)))
    is_late = distance(late, old, trainer) < 0.01 * unlike and unlike > EQUAL_NATS
    if len(late) < MIN_COMPLETIONS or not is_late or not noise < UNEXPLAINED_PART * unlike:
        return None
    use, token = worst(late, old, at_sampling)
    sentence = "old log-probs are computed when a completion is first trained, after the weights have moved"
    return Fault(
        f"{sentence} since its sampling, by {unlike:.2g} nats per token",
        use.update.step,
        location(use, token),
    )


def _is_corrected(use: Use) -> bool:
    return any(weight not in (None, 1.0) for weight in use.row.corrections or ())


def _is_on_policy(call: LossCall) -> bool:
    """Whether the old log-probs of a loss are the present ones, bit for bit."""
    return all(row.logprobs == row.old_logprobs for row in call.rows)


def updates_of_a_rollout(record: AuditRecord) -> float:
    """Return the number of updates on each rollout that the settings ask for; 1 if they do not say."""
    size = record.number("update_prompts", 0.0)
    size = size or record.number("update_completions", 0.0) / record.number("num_generations", 1.0)
    prompts = record.number("rollout_prompts", size)
    return record.number("num_iterations", 1.0) * (prompts / size if size else 1.0)


def ratios_are_wide(record: AuditRecord) -> Fault | None:
    """In updates in which ratios have moved, more than a hundredth of them are above 2, by 3.5 standard
    errors over completions. Ratios of whole completions are not judged, since their tokens may differ more.
    """
    level = record.setting("importance_sampling_level")
    if level in ("sequence", "sequence_token") or is_rloo(record):
        return None
    ratios = [(use, [x - y for _, x, y in pairs(use, trainer, old)]) for use in record.uses if not use.first]
    wide = [(use, sum(ratio > math.log(2) for ratio in logs), len(logs)) for use, logs in ratios]
    count, size = sum(w for _, w, _ in wide), sum(n for _, _, n in wide)
    if count < MIN_WIDE_RATIOS:
        return None
    fraction = count / size
    error = math.sqrt(sum((w - fraction * n) ** 2 for _, w, n in wide)) / size
    if fraction - 3.5 * error <= 0.01:
        return None
    step = max(wide, key=lambda counts: counts[1])[0].update.step
    return Fault(f"{count} of {size} ratios are above 2", step)


def logprobs_are_rounded(record: AuditRecord) -> Fault | None:
    """All log-probs of one kind, at least 64 different numbers, are values of bfloat16 or float16."""
    for select, whose in WHOSE.items():
        values = {x for use in record.uses[:DTYPE_COMPLETIONS] for _, x, _ in pairs(use, select, select)}
        values = {value for value in values if abs(value) > NEAR_ZERO}
        for dtype, bits in DTYPE_BITS.items():
            if len(values) >= DTYPE_VALUES and all(_has_bits(value, bits) for value in values):
                use = next(use for use in record.uses if select(use))
                sentence = f"{whose} log-probs are rounded to {dtype}, which has {bits} bits"
                return Fault(sentence, use.update.step, location(use))
    return None


def _has_bits(value: float, bits: int) -> bool:
    """Whether a number has at most this many significant bits."""
    digits = math.frexp(value)[0] * 2**bits
    return abs(digits - round(digits)) <= 1e-6 * 2**bits


CHECKS = {
    "not_finite": numbers_are_not_finite,
    "logprobs_shifted": logprobs_are_shifted,
    "temperature_missing": temperature_is_missing,
    "old_stale": old_logprobs_are_stale,
    "logprobs_differ": trainer_differs_from_the_model,
    "ratio_stuck": ratio_is_always_1,
    "logprobs_rounded": logprobs_are_rounded,
}
