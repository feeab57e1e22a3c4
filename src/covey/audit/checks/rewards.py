"""Checks of rewards: their values, and the weights of several functions."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from covey.audit.checks.check import Fault
from covey.audit.checks.groups import groups_of, totals, weights_of
from covey.audit.checks.rescored import NOISE, rewards_of, sum_of
from covey.audit.checks.tokens import location
from covey.audit.frameworks import words_of
from covey.audit.record import AuditRecord, Sample
from covey.objective.data import rows_of_groups
from covey.system.text import percent

MIN_COMPLETIONS = 8
"""Completions that a check needs before it applies."""
PENALTY = re.compile("penalt|punish", re.IGNORECASE)
"""Matches names of functions that are meant to lower a reward."""
MIN_COPIES = 4
"""Fewest copies of completions whose rewards are compared."""


def copies_are_paid_differently(record: AuditRecord) -> Fault | None:
    """More than a tenth of the completions that repeat another one of the same prompt and rollout get another
    reward than that one. The differences are larger than a judge's noise, a twentieth of the variance of
    rewards.
    """
    rewards = torch.tensor(rewards_of(record), dtype=torch.float64)
    variance = float(rewards.var(correction=0)) if len(rewards) else 0.0
    unlike: list[tuple[int, int]] = []
    copies = 0
    for rollout in record.rollouts:
        first: dict[str, Sample] = {}
        for n, sample in enumerate(rollout.completions):
            if sample.ids is None or not sample.rewards:
                continue
            twin = first.setdefault(f"{sample.prompt} {sample.prompt_ids} {sample.row} {sample.ids}", sample)
            copies += twin is not sample
            apart = sum_of(record, twin.rewards) - sum_of(record, sample.rewards)
            if twin.rewards != sample.rewards and not apart**2 < 2 * NOISE * variance:
                unlike.append((rollout.step, n))
    if copies < MIN_COPIES or len(unlike) <= 0.1 * copies:
        return None
    step, n = unlike[0]
    sentence = f"{len(unlike)} of {copies} copies of a completion are paid differently"
    return Fault(sentence, step, {"completion": n})


def one_reward_drowns_the_others(record: AuditRecord) -> Fault | None:
    """One function makes up more than 99.9 % of the variance within groups, although another one varies too.
    Its range is less than a tenth of the first one's. A penalty of a similar size that few completions incur
    is taken to be intended.
    """
    spread: dict[str, float] = {}
    for rollout in record.rollouts:
        _, components, weights = totals(record, rollout.completions)
        groups = torch.tensor(groups_of(rollout.completions))
        names = dict.fromkeys(name for s in rollout.completions for name in s.rewards)
        for name, values, weight in zip(names, components, weights, strict=True):
            spread[name] = spread.get(name, 0.0) + _squares_within(weight * values, groups)
    varied = {name: value for name, value in spread.items() if value > 0}
    if len(varied) < 2 or max(varied.values()) <= 0.999 * sum(varied.values()):
        return None
    loud = max(varied, key=lambda name: varied[name])
    weight_of = dict(zip(record.functions, weights_of(record, record.functions), strict=True))
    ranges = {name: abs(weight_of[name]) * _range(record, name) for name in varied}
    if any(ranges[name] >= 0.1 * ranges[loud] for name in varied if name != loud):
        return None
    others = ", ".join(name for name in varied if name != loud)
    share = percent(varied[loud] / sum(varied.values()), ".4g")
    return Fault(f"{loud} makes up {share} of the variance of the rewards: {others} has no influence")


def _range(record: AuditRecord, name: str) -> float:
    """Return the largest minus the smallest score of a function."""
    scores = [s.rewards.get(name) for _, _, s in record.samples]
    numbers = [score for score in scores if score is not None and not math.isnan(score)]
    return max(numbers) - min(numbers)


def _squares_within(values: Tensor, groups: Tensor) -> float:
    """Return the sum of squared distances from the mean of each group, without NaN."""
    of_groups = (values[rows] for _, rows in rows_of_groups(groups))
    return sum(float((members - members.nanmean()).square().nansum()) for members in of_groups)


def one_reward_never_pays(record: AuditRecord) -> Fault | None:
    """One of several functions has the weight 0, or gave each of at least 16 completions the same score
    while the sum of all varied. Or its logged mean stayed the same, with a std of 0, for at least eight
    updates.
    """
    if not record.samples:
        return _logged_alike(record)
    if len(record.functions) < 2 or len(set(rewards_of(record))) < 2:
        return None
    for name, weight in zip(record.functions, weights_of(record, record.functions), strict=True):
        scores = [s.rewards[name] for _, _, s in record.samples if s.rewards.get(name) is not None]
        if weight == 0 and len(scores) >= 2 * MIN_COMPLETIONS:
            return Fault(f"{name} has the weight 0: it has no effect")
        if len(scores) >= 2 * MIN_COMPLETIONS and len(set(scores)) == 1:
            return Fault(f"{name} gave all {len(scores)} completions {scores[0]:g}: it has no effect")
    return None


def _logged_alike(record: AuditRecord) -> Fault | None:
    words = words_of(record.header.framework)
    values: dict[str, list[float]] = {}
    for update in record.updates:
        for name, value in update.metrics.items():
            values.setdefault(words.metric(name) or "", []).append(math.nan if value is None else value)
    means = [name for name in values if re.fullmatch("reward/.+/mean", name)]
    for name in means if len(means) > 1 else ():
        stds = values.get(name.removesuffix("mean") + "std", [])
        if len(stds) >= MIN_COMPLETIONS and not any(stds) and len(set(values[name])) == 1:
            function = name.removeprefix("reward/").removesuffix("/mean")
            return Fault(f"{function} gave every completion of {len(stds)} updates {values[name][0]:g}")
    return None


def penalty_pays(record: AuditRecord) -> Fault | None:
    """A function whose name says that it is a penalty adds to the reward: its weight is positive, and of at
    least 16 completions it is positive for some and negative for none.
    """
    weight_of = dict(zip(record.functions, weights_of(record, record.functions), strict=True))
    for name in record.functions:
        scores = [s.rewards.get(name) or 0.0 for _, _, s in record.samples]
        if not PENALTY.search(name) or len(scores) < 2 * MIN_COMPLETIONS or min(scores) * weight_of[name] < 0:
            continue
        if max(scores) * weight_of[name] > 0:
            worst = scores.index(max(scores))
            step, n, _ = record.samples[worst]
            sentence = f"{name} raises the reward, by up to {max(scores):g}, and never lowers it"
            return Fault(sentence, step, {"completion": n})
    return None


def trained_reward_is_another(record: AuditRecord) -> Fault | None:
    """In verl, without a KL in the reward, the reward from which advantages are computed is not the score of
    its function in more than a tenth of the completions. Or more than a tenth of the completions with a
    reward, and at least eight, have no score at any token, while the scores of all others add up to their
    reward.
    """
    lost = _scores_are_lost(record)
    if lost is not None:
        return lost
    if record.header.framework != "verl" or record.setting("algorithm.use_kl_in_reward") is True:
        return None
    sums = [(step, n, s.reward, sum_of(record, s.rewards)) for step, n, s in record.samples if s.rewards]
    complete = [
        (step, n, reward, due) for step, n, reward, due in sums if reward is not None and not math.isnan(due)
    ]
    differing = [row for row in complete if not math.isclose(row[2], row[3], rel_tol=1e-3, abs_tol=1e-4)]
    if len(complete) < MIN_COMPLETIONS or len(differing) <= 0.1 * len(complete):
        return None
    step, n, trained, due = differing[0]
    sentence = f"{len(differing)} of {len(complete)} completions are trained with another reward"
    sentence += " than they were given"
    return Fault(f"{sentence}: {trained:.4g} for {due:.4g}", step, {"completion": n})


def _scores_are_lost(record: AuditRecord) -> Fault | None:
    rewarded = [use for use in record.uses if use.first and use.sample.reward and use.row.token_scores]
    lost = [use for use in rewarded if not any(use.row.token_scores or ())]
    kept = [use for use in rewarded if any(use.row.token_scores or ())]
    for use in kept:
        total = sum(score or 0.0 for score in use.row.token_scores or ())
        if not math.isclose(total, use.sample.reward or 0.0, rel_tol=1e-3, abs_tol=1e-4):
            return None
    if len(lost) < MIN_COMPLETIONS or len(lost) <= 0.1 * len(rewarded):
        return None
    use = lost[0]
    sentence = f"{len(lost)} of {len(rewarded)} rewards were lost on the way to the tokens"
    return Fault(f"{sentence}: {use.sample.reward:.4g} is at no token", use.update.step, location(use))


def rewards_are_constant(record: AuditRecord) -> Fault | None:
    """All completions of the run, at least 16, got the same reward."""
    values = rewards_of(record)
    if len(values) < 2 * MIN_COMPLETIONS or len(set(values)) > 1:
        return None
    return Fault(f"all {len(values)} completions got the reward {values[0]:g}")


def rewards_are_missing(record: AuditRecord) -> Fault | None:
    """A run's only function gave no score to more than a twentieth of the completions, or one of several
    functions never gave any.
    """
    for name in record.functions:
        scores = [s.rewards.get(name) for _, _, s in record.samples if s.rewards]
        lacking = sum(score is None or math.isnan(score) for score in scores)
        # One of several functions may not apply to some completions.
        counts = lacking == len(scores) or len(record.functions) == 1
        if len(scores) >= MIN_COMPLETIONS and lacking > 0.05 * len(scores) and counts:
            return Fault(f"{name} gave {lacking} of {len(scores)} completions no number")
    return None


def weight_is_zero(record: AuditRecord) -> Fault | None:
    """All reward functions have the weight 0."""
    if record.functions and not any(weights_of(record, record.functions)):
        return Fault("every reward function has the weight 0")
    return None


CHECKS = {
    "copies_paid": copies_are_paid_differently,
    "weights_zero": weight_is_zero,
    "rewards_missing": rewards_are_missing,
    "reward_drowned": one_reward_drowns_the_others,
    "reward_idle": one_reward_never_pays,
    "penalty_pays": penalty_pays,
    "reward_differs": trained_reward_is_another,
    "rewards_constant": rewards_are_constant,
}
