"""Checks of rewards that were computed again: for a completion alone, another row, and other texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from covey.audit.checks.check import Fault
from covey.audit.checks.groups import scored_groups, totals, weights_of
from covey.audit.checks.row_answers import (
    last_number,
    rewards_of_other_texts,
    texts_are_paid_alike_everywhere,
)
from covey.audit.record import AuditRecord, Sample

MIN_COMPLETIONS = 8
"""Completions that a check needs before it applies."""
MIN_NUMBERS = 3
"""Fewest different last numbers of a prompt's completions that show whether its answer matters."""
NOISE = 0.05
"""Fraction of the variance of rewards that a judge may add by chance."""
EQUAL_REWARDS = 1e-5
"""Rewards that are closer than this count as equal."""


def sum_of(record: AuditRecord, scores: Mapping[str, float | None]) -> float:
    """Return the weighted sum of a completion's scores; NaN if one is missing."""
    values = [math.nan if v is None else v for v in scores.values()]
    return sum(w * v for w, v in zip(weights_of(record, list(scores)), values, strict=True))


def rewards_of(record: AuditRecord) -> list[float]:
    """Return the rewards of all completions that have one."""
    rewards = (reward for r in record.rollouts for reward in totals(record, r.completions).rewards.tolist())
    return [reward for reward in rewards if not math.isnan(reward)]


def best_of(record: AuditRecord) -> float:
    """Return the highest reward of a run; NaN without any."""
    return max(rewards_of(record), default=math.nan)


# --- alone ------------------------------------------------------------------------------------------


class RepeatedScore(NamedTuple):
    """A completion that a reward function scored twice."""

    step: int
    completion: int
    """Place in the rollout, from 0."""
    paid: float
    """Reward in the batch."""
    alone: float
    """Reward in a call with this completion alone."""
    length: int
    """Number of its tokens."""

    @property
    def added(self) -> float:
        """The part of the reward that the trainer added to the function's."""
        return round(self.paid - self.alone, 5)


class RescoredFunction(NamedTuple):
    """A reward function with the completions that it scored twice."""

    name: str
    scores: list[RepeatedScore]

    @property
    def moved(self) -> list[RepeatedScore]:
        """The scores that differ between the call alone and the batch."""
        return [score for score in self.scores if abs(score.paid - score.alone) > EQUAL_REWARDS]

    @property
    def is_noise(self) -> bool:
        """Whether the differences are small next to those between completions, as those of a judge are."""
        mean = fmean(score.paid for score in self.scores)
        variance = fmean((score.paid - mean) ** 2 for score in self.scores)
        # The difference of two independent scores has twice the variance of one.
        return fmean((score.paid - score.alone) ** 2 for score in self.scores) < 2 * NOISE * variance


def _scored_twice(record: AuditRecord) -> Iterator[RescoredFunction]:
    """Yield each function that scored enough completions twice."""
    for name in record.functions:
        scores = list[RepeatedScore]()
        for step, n, sample in record.samples:
            paid, alone = sample.rewards.get(name), sample.alone.get(name)
            if paid is not None and alone is not None:
                scores.append(RepeatedScore(step, n, paid, alone, len(sample.ids or ())))
        if len(scores) >= MIN_COMPLETIONS:
            yield RescoredFunction(name, scores)


def rewards_are_in_another_order(record: AuditRecord) -> Fault | None:
    """A function's rewards are the rewards that it gives to single completions, in another order. Or the
    rewards of at least four completions do not fit their texts, which count as correct if they are the row's
    answer or end with it: each reward fits the completion one place or one group away, or each rollout's
    rewards fit in another order.
    """
    for function in _scored_twice(record):
        scores, moved = function.scores, function.moved
        pairs = zip(sorted(s.paid for s in scores), sorted(s.alone for s in scores), strict=True)
        if moved and all(math.isclose(paid, alone, abs_tol=EQUAL_REWARDS) for paid, alone in pairs):
            first = moved[0]
            sentence = (
                f"{function.name} gives {len(moved)} of {len(scores)} completions the rewards of others"
            )
            example = f"({first.paid:g} for {first.alone:g})"
            return Fault(f"{sentence} {example}", first.step, {"completion": first.completion})
    return rewards_of_other_texts(record)


def every_length_costs_reward(record: AuditRecord) -> Fault | None:
    """The trainer adds to a function's rewards a penalty for length that reaches nine in ten completions,
    including the shortest quarter.
    """
    for function in _scored_twice(record):
        scores = sorted(function.scores, key=lambda score: score.length)
        fined = [score for score in scores if score.added < 0]
        short = scores[: max(1, len(scores) // 4)]
        reaches_all = len(fined) > 0.9 * len(scores) and all(score.added < 0 for score in short)
        if reaches_all and _is_by_length(scores):
            first = fined[0]
            sentence = f"a penalty for length is added to {function.name}"
            sentence += f" of {len(fined)} of {len(scores)} completions"
            evidence = {"completion": first.completion}
            return Fault(f"{sentence}, from {first.length} tokens on", first.step, evidence)
    return None


def _is_by_length(scores: Sequence[RepeatedScore]) -> bool:
    """Whether the additions to rewards depend on the lengths of completions: the longer, the smaller."""
    by_length: dict[int, set[float]] = {}
    for score in scores:
        by_length.setdefault(score.length, set()).add(score.added)
    added = [min(values) for _, values in sorted(by_length.items())]
    consistent = all(len(values) == 1 for values in by_length.values())
    return consistent and len(added) > 1 and added == sorted(added, reverse=True)


def rewards_depend_on_the_batch(record: AuditRecord) -> Fault | None:
    """More than a tenth of the completions get another reward when they are scored alone. The differences
    are no penalty for length, and larger than a judge's noise, a twentieth of the variance of rewards.
    """
    for function in _scored_twice(record):
        scores, moved = function.scores, function.moved
        if len(moved) <= 0.1 * len(scores) or _is_by_length(scores) or function.is_noise:
            continue
        first = moved[0]
        sentence = f"{function.name} gives {len(moved)} of {len(scores)} completions another reward"
        sentence += " when they are scored alone"
        example = f"({first.paid:g} in its batch, {first.alone:g} alone)"
        return Fault(f"{sentence} {example}", first.step, {"completion": first.completion})
    return None


# --- another row ------------------------------------------------------------------------------------


def other_rows_are_paid_alike(record: AuditRecord) -> Fault | None:
    """The rows have columns besides the prompt, and no completion gets another reward with another problem's
    row, although at least eight get more than the lowest reward. Or at least four texts that are the answer
    of one row and not of another get the same reward for both, some of them the highest, although nine in
    ten of the other texts get the highest reward exactly if they are their row's answer.
    """
    probed = [(step, n, s) for step, n, s in record.samples if s.alone and s.elsewhere and s.row]
    lowest = min((sum_of(record, s.alone) for _, _, s in probed), default=math.nan)
    paid = [(step, n) for step, n, s in probed if sum_of(record, s.alone) > lowest]
    if len(paid) < MIN_COMPLETIONS or any(s.alone != s.elsewhere for _, _, s in probed):
        return texts_are_paid_alike_everywhere(record)
    columns = ", ".join(sorted({name for _, _, s in probed for name in s.row}))
    sentence = "no reward changes when a completion comes with another problem's row"
    step, n = paid[0]
    return Fault(
        f"{sentence}: nothing reads {columns}, or verdicts are cached by the text alone",
        step,
        {"completion": n},
    )


# --- other texts ------------------------------------------------------------------------------------


def empty_text_is_paid_most(record: AuditRecord) -> Fault | None:
    """An empty text earns as much as the best completion of the run: in more than nine of ten rows, if not
    all completions earn as much; or in at least two prompts whose completions, at least eight, all earn as
    much, while most completions of the other prompts do not. Or in at least two prompts every completion
    earns as much as the best, with at least three different last numbers, while in the others, at least two
    and nine in ten with them, at most one last number does.
    """
    return _empty_is_paid(record) or _any_number_is_paid(record)


def _any_number_is_paid(record: AuditRecord) -> Fault | None:
    best = best_of(record)
    paid: dict[str, dict[str, list[bool]]] = {}
    for rollout in record.rollouts:
        rewards = totals(record, rollout.completions).rewards.tolist()
        for sample, reward in zip(rollout.completions, rewards, strict=True):
            number = last_number(sample.text or "")
            if number and not math.isnan(reward):
                paid.setdefault(sample.prompt_text, {}).setdefault(number, []).append(reward >= best)
    judged = {prompt: numbers for prompt, numbers in paid.items() if len(numbers) >= MIN_NUMBERS}
    free = [prompt for prompt, numbers in judged.items() if all(map(all, numbers.values()))]
    strict = [prompt for prompt, numbers in judged.items() if sum(map(any, numbers.values())) <= 1]
    if min(len(free), len(strict)) < 2 or len(free) + len(strict) < 0.9 * len(judged):
        return None
    sentence = (
        f"{len(free)} of {len(judged)} prompts pay every completion, whatever its number, and the others"
    )
    return Fault(f"{sentence} pay one number alone: probably their answers cannot be read")


def _empty_is_paid(record: AuditRecord) -> Fault | None:
    rewards = rewards_of(record)
    best = max(rewards, default=math.nan)
    probed = [(step, n, s) for step, n, s in record.samples if s.empty]
    paid = [(step, n, s) for step, n, s in probed if sum_of(record, s.empty) >= best]
    if len(probed) < MIN_COMPLETIONS or not paid or min(rewards) == best:
        return None
    step, n, sample = paid[0]
    sentence = f"an empty text is paid {sum_of(record, sample.empty):g}, the most that any completion got"
    if len(paid) > 0.9 * len(probed):
        return Fault(sentence, step, {"completion": n})
    free = {s.prompt_text for _, _, s in paid}
    if not _are_free(record, free, [s for _, _, s in probed], best):
        return None
    sentence += f", in {len(free)} of {len({s.prompt_text for _, _, s in probed})} prompts"
    return Fault(f"{sentence}, and so is every completion of them", step, {"completion": n})


def _are_free(record: AuditRecord, prompts: set[str], samples: Sequence[Sample], best: float) -> bool:
    """Whether any text earns the highest reward in some prompts, and most texts do not in the others."""
    paid = [(s.prompt_text in prompts, float(totals(record, [s]).rewards[0]) >= best) for s in samples]
    free_are_best = [is_best for is_free, is_best in paid if is_free]
    others_are_best = [is_best for is_free, is_best in paid if not is_free]
    if (
        len(prompts) < 2
        or len(free_are_best) < MIN_COMPLETIONS
        or not all(free_are_best)
        or sum(others_are_best) > 0.5 * len(others_are_best)
    ):
        return False
    # A reward that reads no completion at all gives the same reward in all groups; that is another fault.
    return any(len(set(group.rewards)) > 1 for group in scored_groups(record))


def lists_are_paid_most(record: AuditRecord) -> Fault | None:
    """A function gives a text that lists the answers of all rows as much as the best completion of the run,
    in more than nine of ten rows. Yet it does read the row, and gives an empty text less.
    """
    for name in record.functions:
        scores = [s.rewards[name] for _, _, s in record.samples if s.rewards.get(name) is not None]
        best = max((score for score in scores if score is not None), default=math.nan)
        probed = [(step, n, s) for step, n, s in record.samples if s.listed.get(name) is not None]
        listed = [(step, n) for step, n, s in probed if _at_least(s.listed, name, best)]
        reads_rows = any(s.elsewhere and s.elsewhere.get(name) != s.alone.get(name) for _, _, s in probed)
        free = sum(_at_least(s.empty, name, best) for _, _, s in probed)
        if (
            len(probed) < MIN_COMPLETIONS
            or len(listed) <= 0.9 * len(probed)
            or not reads_rows
            or free > 0.1 * len(probed)
        ):
            continue
        step, n = listed[0]
        sentence = f"{name} pays {best:g}, the most that any completion got,"
        return Fault(f"{sentence} to a text that lists the answers of all rows", step, {"completion": n})
    return None


def _at_least(scores: Mapping[str, float | None], name: str, bound: float) -> bool:
    score = scores.get(name)
    return score is not None and score >= bound


CHECKS = {
    "rewards_order": rewards_are_in_another_order,
    "length_fined": every_length_costs_reward,
    "rewards_in_batch": rewards_depend_on_the_batch,
    "pays_empty": empty_text_is_paid_most,
    "pays_any_row": other_rows_are_paid_alike,
    "pays_list": lists_are_paid_most,
}
