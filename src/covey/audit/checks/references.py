"""Checks of the reference, which is the policy before the first update and must not change."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from covey.audit.checks.check import Fault
from covey.audit.checks.logprobs import (
    EQUAL_NATS,
    MIN_SURPRISE,
    SAME_PROGRAM_NATS,
    UNEXPLAINED_PART,
    distance,
    first_uses,
    pairs,
    present,
    reference,
    surprise,
    trainer,
    worst,
)
from covey.audit.checks.tokens import MIN_COMPLETIONS, location
from covey.audit.frameworks import words_of
from covey.audit.record import AuditRecord, Sample, Use

KL = "kl/token_k3"
"""covey's name of the KL that trainers log."""
LARGE_KL = 0.5
"""A KL that is too large to be noise of the log-probs, even as a sum over a completion."""
MEDIA = re.compile("image|img|vision|video|audio", re.IGNORECASE)
"""Names of tokens that take the place of media."""
MIN_TOKENS = 16
"""Fewest tokens with equal contexts among siblings that show how exactly a reference repeats itself."""


def reference_is_another(record: AuditRecord) -> Fault | None:
    """Before the first update of a run, the reference's log-probs differ from the policy's by more than .02
    nats per token; or the KL that is logged with the first update is above .5.
    """
    words = words_of(record.header.framework)
    for update in record.updates[:1] if "ref_logprobs" not in record.fields else ():
        kl = max((v or 0.0 for name, v in update.metrics.items() if words.metric(name) == KL), default=0.0)
        if update.step == 0 and kl > LARGE_KL:
            return Fault(f"the KL is {kl:.3g} in the first update: the reference is another model", 0)
    uses = [use for use in first_uses(record) if use.update.step == 0]
    off = distance(uses, reference, present)
    if not off > SAME_PROGRAM_NATS:
        return None
    use, token = worst(uses, reference, present)
    sentence = f"training begins {off:.2g} nats per token away from its reference: that is another model"
    temperature = record.number("temperature", 1.0)
    if temperature != 1:
        sentence += f", or its log-probs are not at temperature {temperature:g}"
    return Fault(sentence, 0, location(use, token))


def reference_moves(record: AuditRecord) -> Fault | None:
    """After updates that changed the weights, the reference's log-probs equal the trainer's bit for bit. Or
    they come to within a thousandth of a nat per token in an update, and were a hundred times as far away
    before. Or, for at least four tokens that follow the same row, prompt and tokens, they differ between
    rollouts by more than .02 nats per token, and five times less within a rollout for at least 16 tokens.
    Prompts with images are not compared. With sync_ref_model the reference may move, but not equal the
    trainer.
    """
    uses = [use for use in record.uses if use.changed_before and reference(use)]
    same = [use for use in uses if all(x == y for _, x, y in pairs(use, trainer, reference))]
    if len(uses) >= MIN_COMPLETIONS and len(same) == len(uses):
        sentence = "the reference equals the policy after updates: the KL is 0"
        return Fault(sentence, same[0].update.step, location(same[0]))
    if record.setting("sync_ref_model") is True:
        return None
    return _reference_is_replaced(record) or _reference_drifts(record)


def _reference_is_replaced(record: AuditRecord) -> Fault | None:
    farthest = 0.0
    for update in record.updates:
        uses = [use for use in record.uses_of(update) if use.changed_before and reference(use)]
        if len(uses) < MIN_COMPLETIONS or fmean(surprise(use, trainer) for use in uses) < MIN_SURPRISE:
            continue
        off = distance(uses, trainer, reference)
        if off < EQUAL_NATS and off < 0.01 * farthest:
            sentence = (
                f"the reference equals the policy, although it was {farthest:.2g} nats per token away from it"
            )
            sentence += ": it was replaced in the middle of the run"
            return Fault(sentence, update.step, location(uses[0]))
        farthest = max(farthest, off)
    return None


class _Logprob(NamedTuple):
    """A log-prob of the reference, and its place in the record."""

    nats: float
    use: Use
    token: int


Repetitions = Sequence[Sequence[_Logprob]]
"""The log-probs that the reference gave to one token in the same context, by rollout."""


def _has_media(record: AuditRecord, sample: Sample) -> bool:
    """Whether a prompt has images or sounds: different ones may have the same tokens."""
    if isinstance(sample.prompt, list) and any(isinstance(m.get("content"), list) for m in sample.prompt):
        return True
    names = record.header.tokens.names
    return any(MEDIA.search(names.get(str(token), "")) for token in sample.prompt_ids or ())


def _reference_drifts(record: AuditRecord) -> Fault | None:
    """Return a fault if the reference gives a token different log-probs in the same context."""
    repetitions = _repetitions(record)
    # Within a rollout the reference certainly stays the same, so siblings show its numerical noise.
    within = [abs(row[0].nats - other.nats) for rows in repetitions for row in rows for other in row[1:]]
    between = [(abs(rows[0][0].nats - row[0].nats), row[0]) for rows in repetitions for row in rows[1:]]
    if len(between) < MIN_COMPLETIONS or len(within) < MIN_TOKENS:
        return None
    off = fmean(nats for nats, _ in between)
    if off <= SAME_PROGRAM_NATS or fmean(within) >= UNEXPLAINED_PART * off:
        return None
    _, farthest = max(between, key=lambda pair: pair[0])
    sentence = f"the log-probs of the reference change between rollouts, by {off:.2g} nats per token,"
    sentence += f" for {len(between)} tokens in equal contexts"
    return Fault(f"{sentence}: it moves", farthest.use.update.step, location(farthest.use, farthest.token))


def _repetitions(record: AuditRecord) -> list[Repetitions]:
    by_context: dict[tuple[object, ...], dict[int, list[_Logprob]]] = defaultdict(lambda: defaultdict(list))
    for use in first_uses(record):
        prompt = use.sample.prompt_ids
        ids = use.row.ids or use.sample.ids
        if not prompt or not ids or _has_media(record, use.sample):
            continue
        for token, nats, _ in pairs(use, reference, reference):
            context = (str(use.sample.row), *prompt, -1, *ids[: token + 1])
            by_context[context][use.row.rollout].append(_Logprob(nats, use, token))
    return [list(by_rollout.values()) for by_rollout in by_context.values()]


CHECKS = {
    "reference_differs": reference_is_another,
    "reference_moves": reference_moves,
}
