"""Checks of advantages, which are computed again from the rewards under the framework's own convention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from covey.audit.checks.check import Fault, MissingField, Predicate
from covey.audit.checks.conventions import algorithm_setting, convention_of, conventions_of
from covey.audit.checks.rollout_scores import MIN_COMPLETIONS, ScoredRollout, expected, fits, scored_rollouts
from covey.audit.record import AuditRecord
from covey.objective.advantages import divided, group_centered, group_zscore, standard_deviation
from covey.objective.algorithms import Algorithm
from covey.objective.data import rows_of_groups


class Comparison(NamedTuple):
    """The advantages of a rollout, and the advantages that the convention gives."""

    rollout: ScoredRollout
    expected: Tensor
    """(N,)."""
    before: Tensor | None
    """The advantages that the convention gives for the rollout before, if it has as many completions."""
    reweighted: Sequence[Tensor]
    """The advantages that the convention gives if the functions have other weights than in the settings."""


Explanation = Callable[[Comparison], bool]
"""Whether a mistake turns the expected advantages into the used ones; its docstring goes into the message."""


def negated(comparison: Comparison) -> bool:
    """The advantages have the opposite sign."""
    return fits(comparison.rollout.used, -comparison.expected)


def without_those_below_0(comparison: Comparison) -> bool:
    """The advantages are the expected ones with the negative ones set to 0: nothing becomes less likely."""
    return fits(comparison.rollout.used, comparison.expected.clamp(min=0))


def of_the_rollout_before(comparison: Comparison) -> bool:
    """The advantages are those of the previous rollout, computed from its rewards."""
    return comparison.before is not None and fits(comparison.rollout.used, comparison.before)


def in_another_order(comparison: Comparison) -> bool:
    """The advantages belong to other completions: they are the expected numbers in another order."""
    return fits(comparison.rollout.used.sort().values, comparison.expected.sort().values)


def with_other_weights(comparison: Comparison) -> bool:
    """The advantages are those of rewards with other weights than in the settings: equal ones, those of the
    settings in reverse order, or that of one function alone.
    """
    return any(fits(comparison.rollout.used, candidate) for candidate in comparison.reweighted)


def others_over_all(comparison: Comparison) -> bool:
    """The advantages are the rewards minus the sum of the other rewards over n instead of n - 1."""
    rollout = comparison.rollout
    return fits(rollout.used, rollout.rewards - rollout.by_group(lambda r: (r.sum() - r) / len(r)))


def one_is_the_baseline(comparison: Comparison) -> bool:
    """The baseline is the reward of one completion, the first or the last of its group, not the mean."""
    rollout = comparison.rollout
    members = [rows for _, rows in rows_of_groups(rollout.group)]
    ends = (torch.stack([rows[at] for rows in members]) for at in (0, -1))
    centered = rollout.by_group(group_centered, rollout.used)
    return fits(centered, comparison.expected) and any(not rollout.used[end].any() for end in ends)


def rewards_where_groups_are_dead(comparison: Comparison) -> bool:
    """The advantages are the expected ones, except in groups of equal rewards, where they are the rewards."""
    rollout, expected = comparison[:2]
    ranges = rollout.by_group(lambda rewards: (rewards.max() - rewards.min()).expand_as(rewards))
    is_dead = ranges == 0
    paid = bool(rollout.rewards[is_dead].any())
    return paid and fits(rollout.used, torch.where(is_dead, rollout.rewards, expected))


def divided_by_the_batchs_std(comparison: Comparison) -> bool:
    """The advantages are the rewards minus their group's mean, divided by the std of the whole batch."""
    return _over_batch(comparison.rollout, comparison.rollout.by_group(group_centered))


def batch_is_the_baseline(comparison: Comparison) -> bool:
    """The advantages compare a completion with the whole batch, or with the completions that have its place
    in other groups, instead of its group.
    """
    rollout = comparison.rollout
    centered = group_centered(rollout.rewards)
    if fits(rollout.used, centered) or _over_batch(rollout, centered):
        return True
    # Rewards that are reshaped to (G, prompts) and not to (prompts, G).
    count = len(set(rollout.group.tolist()))
    strided = torch.arange(len(rollout.rewards)) % count
    centered, zscore = (rollout.by_group(of, group=strided) for of in (group_centered, group_zscore))
    return count > 1 and (fits(rollout.used, centered) or fits(rollout.used, zscore))


def _over_batch(rollout: ScoredRollout, centered: Tensor) -> bool:
    stds = [standard_deviation(rollout.rewards, ddof) for ddof in (0, 1)]
    return any(fits(rollout.used, divided(centered, std + 1e-6)) for std in stds)


def normalized_again(comparison: Comparison) -> bool:
    """The advantages are the expected ones, normalized a second time over batch, group or update."""
    rollout, expected = comparison[:2]
    candidates = [divided(group_centered(expected), standard_deviation(expected, d) + 1e-6) for d in (0, 1)]
    zscores = [partial(group_zscore, ddof=d) for d in (0, 1)]
    candidates += [
        rollout.by_group(of, expected, group) for of in zscores for group in (None, rollout.update)
    ]
    return any(fits(rollout.used, candidate) for candidate in candidates)


def without_a_baseline(comparison: Comparison) -> bool:
    """The advantages are the rewards themselves."""
    return fits(comparison.rollout.used, comparison.rollout.rewards)


def without_the_std(comparison: Comparison) -> bool:
    """The advantages are the rewards minus their group's mean, not divided by the std."""
    return fits(comparison.rollout.used, comparison.rollout.by_group(group_centered))


def with_a_std(comparison: Comparison) -> bool:
    """The advantages are divided by their group's std."""
    rollout = comparison.rollout
    return any(fits(rollout.used, rollout.by_group(partial(group_zscore, ddof=d))) for d in (0, 1))


def without_an_epsilon(comparison: Comparison) -> bool:
    """The advantages are divided by a std to which nothing is added, so rounding counts as a difference of
    rewards.
    """
    rollout = comparison.rollout
    rewards = rollout.rewards.float()  # trainers compute in float32, so what differs then is rounding
    zscores = [partial(group_zscore, ddof=d, eps=0.0) for d in (0, 1)]
    return any(fits(rollout.used, rollout.by_group(zscore, rewards)) for zscore in zscores)


def by_length(comparison: Comparison) -> bool:
    """The advantages are the expected ones multiplied or divided by the lengths of the completions."""
    rollout, expected = comparison[:2]
    weighted = [expected * rollout.lengths, expected / rollout.lengths]
    factors = [float((rollout.used * c).sum() / c.square().sum().clamp(min=1e-12)) for c in weighted]
    differ = len(set(rollout.lengths[expected != 0].tolist())) > 1
    return differ and any(f > 0 and fits(rollout.used, f * c) for f, c in zip(factors, weighted, strict=True))


def scaled(comparison: Comparison) -> bool:
    """The advantages are the expected ones multiplied by a number, shifted by a number, or both."""
    used = comparison.rollout.used
    deviations = comparison.expected - comparison.expected.mean()
    factor = float(((used - used.mean()) * deviations).sum() / deviations.square().sum().clamp(min=1e-12))
    enough = len(used) > MIN_COMPLETIONS  # a line through two points would always fit
    return enough and factor > 0 and fits(used, used.mean() + factor * deviations)


def anything(_compared: Comparison) -> bool:
    """The advantages do not follow from the settings, and no known mistake explains them."""
    return True


EXPLANATIONS: dict[str, Explanation] = {
    "advantages_negated": negated,
    "advantages_late": of_the_rollout_before,
    "negatives_dropped": without_those_below_0,
    "weights_ignored": with_other_weights,
    "baseline_over_all": others_over_all,
    "baseline_of_one": one_is_the_baseline,
    "dead_groups_paid": rewards_where_groups_are_dead,
    "std_over_batch": divided_by_the_batchs_std,
    "std_missing": without_the_std,
    "std_added": with_a_std,
    "epsilon_missing": without_an_epsilon,
    "advantages_normalized_twice": normalized_again,
    "batch_baseline": batch_is_the_baseline,
    "baseline_missing": without_a_baseline,
    "advantages_order": in_another_order,
    "advantages_by_length": by_length,
    "advantages_scaled": scaled,
    "advantages_differ": anything,
}
"""The explanation that fits the most rollouts is reported, the first of several."""
UNCONDITIONAL = (
    "advantages_negated",
    "advantages_late",
    "negatives_dropped",
    "baseline_over_all",
    "advantages_order",
)
"""Mistakes that are mistakes under any convention; only these are reported if the settings name none."""


@lru_cache(maxsize=8)
def explanation(record: AuditRecord) -> tuple[str, Fault] | None:
    """Return the mistake in the advantages of most rollouts that differ; None if none differs.

    If several conventions are possible, one that explains all rollouts is taken. Otherwise a mistake is
    reported only if it is one under any convention and explains all rollouts that differ.
    """
    is_named = convention_of(record) is not None
    causes = [_causes(record, algorithm) for algorithm in conventions_of(record)]
    if not all(causes):
        return None
    for rollouts in causes:
        # Chance may let a mistake explain a rollout, so the one that explains most of them is the cause.
        counts = {name: sum(name in faults for faults in rollouts) for name in EXPLANATIONS}
        name = max(counts, key=lambda name: counts[name])
        if is_named or (counts[name] == len(rollouts) and name in UNCONDITIONAL):
            return name, next(faults[name] for faults in rollouts if name in faults)
    return None


def _causes(record: AuditRecord, algorithm: Algorithm) -> list[dict[str, Fault]]:
    """Return all that may be wrong with each rollout that an algorithm's advantages do not explain."""
    causes = []
    before: Tensor | None = None
    for rollout in scored_rollouts(record):
        expected_advantages = expected(record, rollout, algorithm)
        trained = rollout.trained()
        if expected_advantages is not None and not fits(trained.used, expected_advantages):
            comparison = Comparison(
                trained,
                expected_advantages,
                before if before is not None and len(before) == len(expected_advantages) else None,
                list(_reweighted(record, rollout, algorithm)),
            )
            names = [name for name, applies in EXPLANATIONS.items() if applies(comparison)]
            # That no mistake is known is an explanation where none is.
            names = names[:-1] or names
            causes.append({name: _fault(comparison, EXPLANATIONS[name]) for name in names})
        before = expected_advantages
    return causes


def _reweighted(record: AuditRecord, rollout: ScoredRollout, algorithm: Algorithm) -> Iterator[Tensor]:
    """Yield the advantages that an algorithm gives if the reward functions have other weights."""
    count = len(rollout.weights)
    candidates = [torch.ones(count), rollout.weights.flip(0), *torch.eye(count)] if count > 1 else []
    for weights in (candidate.double() for candidate in candidates):
        rewards = (rollout.components.nan_to_num(0.0) * weights[:, None]).sum(0)
        due = expected(record, replace(rollout, rewards=rewards, weights=weights), algorithm)
        if due is not None and not torch.equal(weights, rollout.weights):
            yield due


def _fault(comparison: Comparison, cause: Explanation) -> Fault:
    """Return the explanation in words, with the completion whose advantage is furthest off."""
    rollout, expected = comparison[:2]
    worst = int((rollout.used - expected).abs().argmax())
    words = " ".join((cause.__doc__ or "").split()).removesuffix(".")
    words = words[:1].lower() + words[1:]  # it follows "step 3: "
    numbers = f"{float(rollout.used[worst]):.4g} where {float(expected[worst]):.4g} is expected"
    evidence = {"group": int(rollout.group[worst]), "completion": rollout.places[worst]}
    return Fault(f"{words}: {numbers}", rollout.step, evidence)


def explained_by(name: str) -> Predicate:
    """Return the check that reports a fault if this explanation fits a record's advantages."""

    def check(record: AuditRecord) -> Fault | MissingField | None:
        explained = explanation(record)
        if explained is None:
            lacking = None if name in UNCONDITIONAL else algorithm_setting(record)
            return None if lacking is None else MissingField(lacking)
        cause, fault = explained
        return fault if cause == name else None

    check.__doc__ = EXPLANATIONS[name].__doc__
    return check


CHECKS: dict[str, Predicate] = {name: explained_by(name) for name in EXPLANATIONS}
