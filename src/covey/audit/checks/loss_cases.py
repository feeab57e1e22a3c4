"""The losses of a run as cases: what a loss function got and returned, by the settings' algorithm.

An update of TRL is one case, and so is each recorded call of verl's and OpenRLHF's loss functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from covey.audit.checks.conventions import (
    correction_of,
    entropy_coefficient,
    is_rloo,
    loss_of_calls,
    losses_of,
)
from covey.audit.checks.groups import groups_of
from covey.audit.checks.terms import KL_COEFFICIENT
from covey.audit.checks.variations import (
    LossCase,
)
from covey.audit.frameworks import FRAMEWORKS
from covey.audit.record import AuditRecord, LossCall, LossRow, Numbers, Row, Update, Use
from covey.objective.algorithms import Algorithm
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
        algorithm = _with_coefficient(algorithm, update)
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


def _with_coefficient(algorithm: Algorithm, update: Update) -> Algorithm:
    """Return an algorithm with the KL's coefficient that was logged with an update, if one was."""
    coef = update.metrics.get(KL_COEFFICIENT)
    if algorithm.kl is None or coef is None:
        return algorithm
    return algorithm.variant("", kl=replace(algorithm.kl, coef=coef))


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
