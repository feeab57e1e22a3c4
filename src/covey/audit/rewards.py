"""Checks of rewards and data: what is paid, for what, and which rows a run learns from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from covey.audit.advantages import groups_of, totals, weights_of
from covey.audit.check import Trouble
from covey.audit.record import AuditRecord, Rollout, Sample
from covey.system.text import percent

FEWEST = 8
"""Completions or rows that a check needs before it speaks."""
ANSWERS = ("answer", "solution", "target", "label", "ground_truth", "gold", "expected", "reference_answer")
"""Columns that are usually a row's answer."""


class RepeatedScore(NamedTuple):
    """A completion that a reward function scored twice."""

    step: int
    completion: int
    """Place in the rollout, from 0."""
    paid: float
    """Reward in the batch."""
    alone: float
    """Reward in a call for this completion alone."""
    length: int
    """Number of its tokens."""

    @property
    def added(self) -> float:
        """The part that the trainer has added to the function's reward."""
        return round(self.paid - self.alone, 5)


def _scored_twice(record: AuditRecord) -> Iterator[tuple[str, list[RepeatedScore], list[RepeatedScore]]]:
    """Yield each function with the completions that it scored twice, and those of them paid otherwise."""
    for name in record.functions:
        asked = list[RepeatedScore]()
        for step, n, sample in record.samples:
            paid, alone = sample.rewards.get(name), sample.alone.get(name)
            if paid is not None and alone is not None:
                asked.append(RepeatedScore(step, n, paid, alone, len(sample.ids or ())))
        if len(asked) >= FEWEST:
            yield name, asked, [a for a in asked if abs(a.paid - a.alone) > 1e-5]


def rewards_are_in_another_order(record: AuditRecord) -> Trouble | None:
    """A function's rewards are those that it gives completions one by one, in another order."""
    for name, asked, moved in _scored_twice(record):
        pairs = zip(sorted(a.paid for a in asked), sorted(a.alone for a in asked), strict=True)
        if moved and all(math.isclose(a, b, abs_tol=1e-5) for a, b in pairs):
            step, n, paid, alone, _ = moved[0]
            said = f"{name} pays {len(moved)} of {len(asked)} completions what others have earned"
            return Trouble(f"{said} ({paid:g} for {alone:g})", step, {"completion": n})
    return None


def _is_by_length(asked: list[RepeatedScore]) -> bool:
    """Whether what was added to rewards follows from the lengths of completions: the longer, the less."""
    by_length: dict[int, set[float]] = {}
    for one in asked:
        by_length.setdefault(one.length, set()).add(one.added)
    added = [min(values) for _, values in sorted(by_length.items())]
    alike = all(len(values) == 1 for values in by_length.values())
    return alike and len(added) > 1 and added == sorted(added, reverse=True)


def every_length_costs_reward(record: AuditRecord) -> Trouble | None:
    """A penalty for length, which the trainer adds to a function's rewards, reaches nine in ten completions,
    the shortest quarter of them included.
    """
    for name, asked, _ in _scored_twice(record):
        asked.sort(key=lambda one: one.length)
        fined = [one for one in asked if one.added < 0]
        short = asked[: max(1, len(asked) // 4)]
        if _is_by_length(asked) and len(fined) > 0.9 * len(asked) and all(one.added < 0 for one in short):
            step, n = fined[0][:2]
            said = f"a penalty for length is added to {name} of {len(fined)} of {len(asked)} completions"
            return Trouble(f"{said}, from {fined[0].length} tokens on", step, {"completion": n})
    return None


def rewards_depend_on_the_batch(record: AuditRecord) -> Trouble | None:
    """More than a tenth of the completions get another reward when they are scored alone, and it is no
    penalty for their lengths.
    """
    for name, asked, moved in _scored_twice(record):
        if len(moved) > 0.1 * len(asked) and not _is_by_length(asked):
            step, n, paid, alone, _ = moved[0]
            said = (
                f"{name} pays {len(moved)} of {len(asked)} completions otherwise when they are scored alone"
            )
            return Trouble(f"{said} ({paid:g} in its batch, {alone:g} alone)", step, {"completion": n})
    return None


def copies_are_paid_differently(record: AuditRecord) -> Trouble | None:
    """More than a tenth of the completions that have a copy of the same prompt in the same rollout are paid
    otherwise than that.
    """
    unlike: list[tuple[int, int]] = []
    copies = 0
    for rollout in record.rollouts:
        first: dict[str, Sample] = {}
        for n, sample in enumerate(rollout.completions):
            if sample.ids is None or not sample.rewards:
                continue
            twin = first.setdefault(f"{sample.prompt} {sample.prompt_ids} {sample.row} {sample.ids}", sample)
            copies += twin is not sample
            if twin.rewards != sample.rewards:
                unlike.append((rollout.step, n))
    if copies < FEWEST or len(unlike) <= 0.1 * copies:
        return None
    return Trouble(
        f"{len(unlike)} of {copies} copies of a completion are paid differently",
        unlike[0][0],
        {"completion": unlike[0][1]},
    )


def _sum(record: AuditRecord, scores: dict[str, float | None]) -> float:
    """Return the weighted sum of a completion's scores; NaN if one is missing."""
    values = [math.nan if v is None else v for v in scores.values()]
    return sum(w * v for w, v in zip(weights_of(record, list(scores)), values, strict=True))


def _rewards(record: AuditRecord) -> list[float]:
    """Return the rewards of all completions that have one."""
    sums = (total for r in record.rollouts for total in totals(record, r.completions)[0].tolist())
    return [s for s in sums if not math.isnan(s)]


def empty_text_is_paid_most(record: AuditRecord) -> Trouble | None:
    """An empty text gets as much as the best completion of the run: in more than nine rows of ten, and not
    all completions get that; or in two prompts and more, all of whose completions, at least eight, get that
    too, while most completions of the others do not.
    """
    known = _rewards(record)
    best = max(known, default=math.nan)
    empty = [(step, n, s) for step, n, s in record.samples if s.empty]
    paid = [e for e in empty if _sum(record, e[2].empty) >= best]
    if len(empty) < FEWEST or not paid or min(known) == best:
        return None
    step, n, sample = paid[0]
    said = f"an empty text is paid {_sum(record, sample.empty):g}, the most that any completion got"
    if len(paid) > 0.9 * len(empty):
        return Trouble(said, step, {"completion": n})
    free = {s.prompt_text for _, _, s in paid}
    theirs = [_total(record, s) >= best for _, _, s in empty if s.prompt_text in free]
    others = [_total(record, s) >= best for _, _, s in empty if s.prompt_text not in free]
    if len(free) < 2 or len(theirs) < FEWEST or not all(theirs) or sum(others) > 0.5 * len(others):
        return None
    # A reward that never reads the completion pays an empty text the same in every prompt.
    if all(len(set(rewards)) == 1 for _, _, _, rewards in _groups(record)):
        return None
    said += f", in {len(free)} of {len({s.prompt_text for _, _, s in empty})} prompts"
    return Trouble(f"{said}, and so is every completion of them", step, {"completion": n})


def _total(record: AuditRecord, sample: Sample) -> float:
    """Return the reward of a completion."""
    return float(totals(record, [sample])[0][0])


def rows_lack_their_answer(record: AuditRecord) -> Trouble | None:
    """Some rows have an answer, and others have an empty one. The answer is a column of that name, or one of
    which an empty value pays every completion the most, an empty text too, and no other value does.
    """
    best = max(_rewards(record), default=math.nan)
    for column in dict.fromkeys(name for _, _, s in record.samples for name in s.row):
        known = [(step, n, s) for step, n, s in record.samples if column in s.row]
        empty = [(step, n, s) for step, n, s in known if _is_blank(s.row[column])]
        if not empty or len(empty) == len(known):
            continue
        free = [s for _, _, s in known if s.empty and _sum(record, s.empty) >= best]
        asked = [s for _, _, s in empty if s.empty]
        decides = bool(asked) and len(free) == len(asked) and all(_is_blank(s.row[column]) for s in free)
        if column in ANSWERS or decides:
            step, n, _ = empty[0]
            said = f"{column} is empty in the rows of {len(empty)} of {len(known)} completions"
            return Trouble(said, step, {"completion": n})
    return None


def siblings_have_different_answers(record: AuditRecord) -> Trouble | None:
    """Completions of one prompt in one group have rows with different answers."""
    for rollout in record.rollouts:
        known: dict[tuple[int, str], dict[str, object]] = {}
        for (n, sample), group in zip(
            enumerate(rollout.completions), groups_of(rollout.completions), strict=True
        ):
            answers = {name: sample.row[name] for name in ANSWERS if name in sample.row}
            first = known.setdefault((group, sample.prompt_text), answers)
            other = next((name for name in answers if first.get(name) != answers[name]), None)
            if other is not None:
                said = f"completions of one prompt are judged by different values of {other}"
                shown = f"{first.get(other)!s:.30} and {answers[other]!s:.30}"
                return Trouble(f"{said}: {shown}", rollout.step, {"group": group, "completion": n})
    return None


def _is_blank(value: object) -> bool:
    return value is None or not str(value).strip()


def one_reward_drowns_the_others(record: AuditRecord) -> Trouble | None:
    """One function makes more than 99.9 % of the variance within groups, though another one varies too."""
    spread: dict[str, float] = {}
    for rollout in record.rollouts:
        _, components, weights = totals(record, rollout.completions)
        groups = torch.tensor(groups_of(rollout.completions))
        names = list(dict.fromkeys(name for s in rollout.completions for name in s.rewards))
        for name, values, weight in zip(names, components, weights, strict=True):
            parts = [values[groups == g] for g in groups.unique()]
            within = sum(float((weight * (p - p.nanmean())).square().nansum()) for p in parts)
            spread[name] = spread.get(name, 0.0) + within
    varied = {name: value for name, value in spread.items() if value > 0}
    if len(varied) < 2 or max(varied.values()) <= 0.999 * sum(varied.values()):
        return None
    loud = max(varied, key=lambda name: varied[name])
    others = ", ".join(name for name in varied if name != loud)
    share = percent(varied[loud] / sum(varied.values()), ".4g")
    return Trouble(f"{loud} makes {share} of the variance of the rewards: {others} counts for nothing")


def other_rows_are_paid_alike(record: AuditRecord) -> Trouble | None:
    """The rows have columns besides the prompt, and no completion is paid otherwise with another problem's
    row, though at least eight are paid more than the least.
    """
    pairs = [(step, n, s) for step, n, s in record.samples if s.alone and s.elsewhere and s.row]
    least = min((_sum(record, s.alone) for _, _, s in pairs), default=math.nan)
    paid = [(step, n) for step, n, s in pairs if _sum(record, s.alone) > least]
    if len(paid) < FEWEST or any(s.alone != s.elsewhere for _, _, s in pairs):
        return None
    columns = ", ".join(sorted({name for _, _, s in pairs for name in s.row}))
    said = f"no reward changes if a completion is shown with another problem's row: nothing reads {columns}"
    return Trouble(said, paid[0][0], {"completion": paid[0][1]})


def trained_reward_is_another(record: AuditRecord) -> Trouble | None:
    """In verl, without a KL in the reward, the reward that advantages are made of is not the score of its
    function, in more than a tenth of the completions.
    """
    if record.header.framework != "verl" or record.setting("algorithm.use_kl_in_reward") is True:
        return None
    known = [(step, n, s.reward, _sum(record, s.rewards)) for step, n, s in record.samples if s.rewards]
    both = [(step, n, r, due) for step, n, r, due in known if r is not None and not math.isnan(due)]
    other = [row for row in both if not math.isclose(row[2], row[3], rel_tol=1e-3, abs_tol=1e-4)]
    if len(both) < FEWEST or len(other) <= 0.1 * len(both):
        return None
    step, n, trained, due = other[0]
    said = f"{len(other)} of {len(both)} completions are trained with another reward than they were given"
    return Trouble(f"{said}: {trained:.4g} for {due:.4g}", step, {"completion": n})


def rewards_are_constant(record: AuditRecord) -> Trouble | None:
    """Every completion of the run, of at least 16, got the same reward."""
    values = _rewards(record)
    if len(values) < 2 * FEWEST or len(set(values)) > 1:
        return None
    return Trouble(f"all {len(values)} completions got the reward {values[0]:g}")


def rewards_are_missing(record: AuditRecord) -> Trouble | None:
    """More than a twentieth of a function's scores are missing, of completions that others have scored."""
    for name in record.functions:
        scores = [s.rewards.get(name) for _, _, s in record.samples if s.rewards]
        lacking = sum(score is None or math.isnan(score) for score in scores)
        # One of several functions may have nothing to say of some completions.
        counts = lacking == len(scores) or len(record.functions) == 1
        if len(scores) >= FEWEST and lacking > 0.05 * len(scores) and counts:
            return Trouble(f"{name} gave {lacking} of {len(scores)} completions no number")
    return None


def weight_is_zero(record: AuditRecord) -> Trouble | None:
    """All reward functions have the weight 0."""
    if record.functions and not any(weights_of(record, record.functions)):
        return Trouble("every reward function has the weight 0")
    return None


def _groups(record: AuditRecord) -> Iterator[tuple[Rollout, int, list[Sample], list[float]]]:
    """Yield the groups of at least two completions: rollout, number, completions, their rewards."""
    for rollout in record.rollouts:
        rewards = totals(record, rollout.completions)[0].tolist()
        numbers = groups_of(rollout.completions)
        for number in dict.fromkeys(numbers):
            rows = [n for n, g in enumerate(numbers) if g == number]
            if len(rows) > 1:
                yield rollout, number, [rollout.completions[n] for n in rows], [rewards[n] for n in rows]


def siblings_are_copies(record: AuditRecord) -> Trouble | None:
    """In more than three quarters of the groups, of at least 4, all completions are the same tokens."""
    groups = [
        (r.step, g, [str(s.ids) for s in samples]) for r, g, samples, _ in _groups(record) if samples[0].ids
    ]
    copies = [(step, g) for step, g, ids in groups if len(set(ids)) == 1]
    if len(groups) < 4 or len(copies) <= 0.75 * len(groups):
        return None
    return Trouble(
        f"in {len(copies)} of {len(groups)} groups all completions are one text",
        copies[0][0],
        {"group": copies[0][1]},
    )


def groups_are_dead(record: AuditRecord) -> Trouble | None:
    """In more than nine of ten groups, of at least 8, all completions got the same reward; or TRL's metric
    says so of every step, of at least 8.
    """
    logged = [update.metrics.get("frac_reward_zero_std") for update in record.updates]
    shares = [share for share in logged if share is not None]
    if not record.rollouts and len(shares) >= FEWEST and min(shares) > 0.9:
        return Trouble(f"in every step {percent(min(shares))} of the groups or more have equal rewards")
    groups = [(r.step, g, rewards) for r, g, _, rewards in _groups(record)]
    dead = [(step, g) for step, g, rewards in groups if len(set(rewards)) == 1]
    if len(groups) < FEWEST or len(dead) <= 0.9 * len(groups):
        return None
    said = f"in {len(dead)} of {len(groups)} groups all rewards are equal"
    if len(dead) == len(groups) and len({rewards[0] for _, _, rewards in groups}) > 1:
        said += " and differ between groups: they do not depend on the completion"
    step, group = dead[0]
    return Trouble(said, step, {"group": group})


def rows_are_duplicated(record: AuditRecord) -> Trouble | None:
    """More than a tenth of the rows have the prompt of another row."""
    rows, distinct = record.header.data.rows, record.header.data.distinct
    if rows and distinct and rows - distinct > 0.1 * rows:
        return Trouble(f"{rows - distinct} of {rows} rows have the prompt of another row")
    return None


def evaluated_on_training_rows(record: AuditRecord) -> Trouble | None:
    """More than a tenth of the evaluation's prompts are training prompts."""
    known, rows = record.header.data.eval_in_train, record.header.data.eval_rows
    if not known or not rows or known <= 0.1 * rows:
        return None
    return Trouble(f"{known} of {rows} prompts of the evaluation are trained on")


def answer_is_in_the_prompt(record: AuditRecord) -> Trouble | None:
    """A column that is named like an answer is in more than nine of ten prompts, and another row's answer in
    fewer than half as many.
    """
    rows = list({str(s.prompt): s for _, _, s in record.samples if s.prompt is not None and s.row}.values())
    for column in ANSWERS if len(rows) >= FEWEST else ():
        answers = [str(s.row.get(column, "")).strip() for s in rows]
        told = _told(rows, answers)
        chance = _told(rows, [_next_other(answers, n) for n in range(len(rows))])
        if told > 0.9 * len(rows) and chance < 0.5 * told:
            return Trouble(f"the {column} is in {told} of {len(rows)} prompts")
    return None


def _next_other(answers: list[str], n: int) -> str:
    """Return the answer of the next row that has another one, for what chance comes to; '' without one."""
    following = [*answers[n:], *answers[:n]]
    return next((answer for answer in following if answer and answer != answers[n]), "")


def _told(rows: list[Sample], answers: list[str]) -> int:
    """Return how many prompts contain the answer as a word of its own."""
    pairs = [(str(sample.prompt), answer) for sample, answer in zip(rows, answers, strict=True) if answer]
    return sum(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None for text, answer in pairs)


def one_prompt_is_sampled_twice(record: AuditRecord) -> Trouble | None:
    """A rollout has the same prompt and row in more than one group, in more than a tenth of its groups."""
    for rollout in record.rollouts:
        first = dict[int, str]()
        for sample, group in zip(rollout.completions, groups_of(rollout.completions), strict=True):
            first.setdefault(group, f"{sample.prompt} {sample.prompt_ids}")
        again = len(first) - len(set(first.values()))
        rows = record.header.data.rows or 0
        if len(first) >= 4 and again > 0.1 * len(first) and rows > len(first):
            return Trouble(
                f"{again} of {len(first)} groups of a rollout have the prompt of another one", rollout.step
            )
    return None


CHECKS = {
    "rewards_order": rewards_are_in_another_order,
    "length_fined": every_length_costs_reward,
    "rewards_in_batch": rewards_depend_on_the_batch,
    "copies_paid": copies_are_paid_differently,
    "weights_zero": weight_is_zero,
    "rewards_missing": rewards_are_missing,
    "reward_drowned": one_reward_drowns_the_others,
    "reward_differs": trained_reward_is_another,
    "answers_differ": siblings_have_different_answers,
    "answer_empty": rows_lack_their_answer,
    "pays_empty": empty_text_is_paid_most,
    "rewards_constant": rewards_are_constant,
    "pays_any_row": other_rows_are_paid_alike,
    "copies": siblings_are_copies,
    "dead_groups": groups_are_dead,
    "rows_duplicated": rows_are_duplicated,
    "prompt_twice": one_prompt_is_sampled_twice,
    "eval_is_train": evaluated_on_training_rows,
    "answer_told": answer_is_in_the_prompt,
}
