"""Checks of how updates use a rollout's completions: which of them they train, with whose advantages."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from itertools import takewhile

from covey.audit.checks.advantages import explained_by
from covey.audit.checks.check import Fault, MissingField
from covey.audit.checks.groups import ScoredGroup, groups_of, scored_groups
from covey.audit.checks.rollout_scores import common_advantage
from covey.audit.checks.tokens import location
from covey.audit.record import AuditRecord, Rollout, Use
from covey.system.text import percent

MIN_ROLLOUTS = 3
"""Fewest last rollouts that are cut short."""
MIN_GROUPS = 4
"""Fewest groups, or completions, that show a rule and not chance."""
MAX_CHANCE = 1e-4
"""Largest probability that lengths are so ordered by chance."""
DIGITS = 5
"""Decimals by which an advantage is recognized."""
MIN_MASKED = 8
"""Fewest masked completions that show a rule."""
MIN_BELOW = 16
"""Fewest completions with a negative advantage of which some should be trained."""


def negatives_are_dropped(record: AuditRecord) -> Fault | MissingField | None:
    """The advantages are the expected ones with the negative ones set to 0, so no completion becomes less
    likely. Or all completions with a positive advantage are trained, and none of at least 16 with a negative
    one.
    """
    trained = {(use.row.rollout, use.row.completion) for use in record.uses if any(use.row.mask or (True,))}
    used = {rollout for rollout, _ in trained}
    completions = [
        (rollout, index, sample.advantage or 0.0)
        for rollout in record.rollouts
        for index, sample in enumerate(rollout.completions)
        if rollout.number in used
    ]
    below = [(rollout, index) for rollout, index, advantage in completions if advantage < 0]
    above = {(rollout.number, index) for rollout, index, advantage in completions if advantage > 0}
    left_out = all((rollout.number, index) not in trained for rollout, index in below)
    if len(below) >= MIN_BELOW and left_out and above and above <= trained:
        rollout, index = below[0]
        sentence = f"all {len(below)} completions with a negative advantage are left out of the updates"
        return Fault(f"{sentence}: nothing becomes less likely", rollout.step, {"completion": index})
    return explained_by("negatives_dropped")(record)


def _advantages_of(rollout: Rollout) -> set[float]:
    """Return the advantages of a rollout's completions, rounded so that they can be compared."""
    return {round(s.advantage, DIGITS) for s in rollout.completions if s.advantage is not None}


def advantages_of_updates_differ(record: AuditRecord) -> Fault | None:
    """An update uses other advantages than the completions got in their rollout, but the same numbers."""
    for rollout in record.rollouts:
        rollout_values = _advantages_of(rollout)
        # For each use of a completion, the advantage in its update and in its rollout.
        used = [
            (use, common_advantage(use.row), use.sample.advantage)
            for use in record.uses
            if use.row.rollout == rollout.number
        ]
        pairs = [(use, a, due) for use, a, due in used if a is not None and due is not None]
        moved = [(use, a, due) for use, a, due in pairs if abs(a - due) > 1e-4]
        if moved and all(round(a, DIGITS) in rollout_values for _, a, _ in pairs):
            use, value, due = moved[0]
            sentence = f"completions are trained with the advantages of others: {value:.4g} for {due:.4g}"
            return Fault(sentence, use.update.step, {"completion": use.row.completion})
    return None


def rollouts_are_cut_short(record: AuditRecord) -> Fault | None:
    """The first rollout is trained completely. Of each later one, for at least three rollouts, at most half
    is trained, and most of their groups only in part. The very last rollout and those without any update do
    not count, since a record may end before they are trained.
    """
    trained = {(use.row.rollout, use.row.completion) for use in record.uses}
    fractions = [
        sum((rollout.number, n) in trained for n in range(len(rollout.completions)))
        / len(rollout.completions)
        for rollout in record.rollouts[:-1]
    ]
    cut = list(takewhile(lambda fraction: 0 < fraction <= 0.5, reversed(fractions)))
    if len(cut) < MIN_ROLLOUTS or len(cut) == len(fractions) or fractions[0] < 1:
        return None
    rollouts = record.rollouts[len(fractions) - len(cut) : -1]
    # A filter leaves out whole groups.
    in_part = [0 < sum(members) < len(members) for members in _trained_by_group(rollouts, trained)]
    if 2 * sum(in_part) <= len(in_part):
        return None
    sentence = (
        f"the first rollout is trained whole, but of the last {len(cut)} at most {percent(max(cut), '.3g')}"
    )
    return Fault(f"{sentence}: updates stop too early", rollouts[0].step)


def _trained_by_group(rollouts: Sequence[Rollout], trained: Container[tuple[int, int]]) -> list[list[bool]]:
    """Return for each group of some rollouts which of its completions are trained."""
    by_group: dict[tuple[int, int], list[bool]] = {}
    for rollout in rollouts:
        for n, group in enumerate(groups_of(rollout.completions)):
            by_group.setdefault((rollout.number, group), []).append((rollout.number, n) in trained)
    return list(by_group.values())


def _lengths_by_use(group: ScoredGroup, trained: Container[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the lengths of a group's completions that are trained, and of those that are left out."""
    kept: list[int] = []
    left_out: list[int] = []
    for number, sample in zip(group.places, group.samples, strict=True):
        lengths = kept if (group.rollout.number, number) in trained else left_out
        lengths.append(len(sample.ids or ()))
    return kept, left_out


def _chance_of_the_shortest(kept: Sequence[int], left_out: Sequence[int]) -> float:
    """Return the probability that a random choice of as many completions is no longer than ``kept``."""
    lengths = [*kept, *left_out]
    longest = max(kept)
    # Such a choice has all completions that are shorter, and some of those with the same length.
    shorter = sum(length < longest for length in lengths)
    ways = math.comb(lengths.count(longest), len(kept) - shorter)
    return ways / math.comb(len(lengths), len(kept))


def longer_completions_are_left_out(record: AuditRecord) -> Fault | None:
    """In at least nine in ten of the groups that are trained in part (four or more), no completion that is
    left out is shorter than the longest that is trained, though all of them ended before the limit. By chance
    this happens less than once in ten thousand. The last rollout does not count, because its update may still
    run.
    """
    limit = record.number("max_completion_length", math.inf)
    trained = {(use.row.rollout, use.row.completion) for use in record.uses if any(use.row.mask or (True,))}
    last = record.rollouts[-1].number if record.rollouts else None
    partly = 0
    shown = list[ScoredGroup]()
    chance = 1.0
    for group in scored_groups(record):
        kept, left_out = _lengths_by_use(group, trained)
        if not kept or not left_out or max(left_out) >= limit or group.rollout.number == last:
            continue
        partly += 1
        if max(kept) <= min(left_out):
            shown.append(group)
            chance *= _chance_of_the_shortest(kept, left_out)
    if len(shown) < MIN_GROUPS or len(shown) < 0.9 * partly or chance > MAX_CHANCE:
        return None
    sentence = f"in {len(shown)} of {partly} groups only the shortest completions are trained"
    return Fault(f"{sentence}: answers become short", shown[0].rollout.step, {"group": shown[0].number})


def good_completions_are_masked(record: AuditRecord) -> Fault | None:
    """Completions end before the limit with a mask of 0 in an update, at least eight, and all of them have a
    positive advantage.
    """
    limit = record.number("max_completion_length", math.inf)
    masked = {
        (use.row.rollout, use.row.completion): use
        for use in record.uses
        if use.row.mask and not any(use.row.mask) and len(use.sample.ids or ()) < limit
    }
    advantages = [common_advantage(use.row.model_copy(update={"mask": None})) for use in masked.values()]
    if len(masked) < MIN_MASKED or any(advantage is None or advantage <= 0 for advantage in advantages):
        return None
    first = next(iter(masked.values()))
    sentence = f"all {len(masked)} completions that a mask leaves out have a positive advantage"
    return Fault(f"{sentence}: what is good is not learned", first.update.step, location(first))


def filter_is_inverted(record: AuditRecord) -> Fault | None:
    """In all trained groups, at least four, the rewards are equal, while at least four groups with different
    rewards are left out of the rollouts up to the last trained one.
    """
    trained = {(use.row.rollout, use.row.completion) for use in record.uses}
    last = max((rollout for rollout, _ in trained), default=-1)
    groups = [
        group
        for group in scored_groups(record)
        if group.rollout.number <= last and not any(map(math.isnan, group.rewards))
    ]
    kept = [g for g in groups if any((g.rollout.number, place) in trained for place in g.places)]
    left_out = [group for group in groups if _differs(group) and group not in kept]
    if any(map(_differs, kept)) or min(len(kept), len(left_out)) < MIN_GROUPS:
        return None
    sentence = f"all {len(kept)} groups that are trained have equal rewards"
    return Fault(
        f"{sentence}, and {len(left_out)} whose rewards differ are left out: the filter is inverted",
        kept[0].rollout.step,
        {"group": kept[0].number},
    )


def _differs(group: ScoredGroup) -> bool:
    return max(group.rewards) > min(group.rewards)


def advantages_change_within_completions(record: AuditRecord) -> Fault | None:
    """In more than a quarter of the completions, and at least four, the advantage changes from token to
    token, and each value is the advantage of some completion of the rollout. Runs with rewards of tokens are
    not judged.
    """
    if {"values", "token_rewards"} & record.fields:
        return None
    of_rollouts = {rollout.number: _advantages_of(rollout) for rollout in record.rollouts}
    mixed = list[Use]()
    for use in record.uses:
        if isinstance(use.row.advantage, list):
            trained = zip(use.row.advantage, use.row.mask or (), strict=False)
            values = {round(a, DIGITS) for a, on in trained if on and a is not None}
            if len(values) > 1 and values <= of_rollouts[use.row.rollout]:
                mixed.append(use)
    if len(mixed) < MIN_GROUPS or len(mixed) <= 0.25 * len(record.uses):
        return None
    sentence = (
        f"within {len(mixed)} of {len(record.uses)} completions the advantage changes from token to token"
    )
    return Fault(
        f"{sentence}: some tokens have the advantage of another completion",
        mixed[0].update.step,
        location(mixed[0]),
    )


def rows_are_reordered_alone(record: AuditRecord) -> Fault | None:
    """The token ids of an update belong to other completions of the rollout, while the advantages stayed in
    place.
    """
    for rollout in record.rollouts:
        sampled = {tuple(s.ids): n for n, s in enumerate(rollout.completions) if s.ids}
        uses = [use for use in record.uses if use.row.rollout == rollout.number]
        ids = [(use, _trained_ids(use)) for use in uses if use.row.ids and any(use.row.mask or ())]
        moved = [
            (use, sampled.get(trained)) for use, trained in ids if tuple(use.sample.ids or ()) != trained
        ]
        if len(moved) > 1 and all(n is not None for _, n in moved):
            use, n = moved[0]
            sentence = "completions are trained with the advantages of others"
            evidence = {"completion": n or 0}
            return Fault(f"{sentence}: {n} with {use.row.completion}'s", use.update.step, evidence)
    return None


def _trained_ids(use: Use) -> tuple[int, ...]:
    """Return the ids of an update's row as far as its mask reaches."""
    mask, ids = use.row.mask or [], use.row.ids or []
    return tuple(ids[: max(n + 1 for n, is_trained in enumerate(mask) if is_trained)])


CHECKS = {
    "longer_left_out": longer_completions_are_left_out,
    "good_masked": good_completions_are_masked,
    "rollouts_cut": rollouts_are_cut_short,
    "filter_inverted": filter_is_inverted,
    "advantages_slide": advantages_change_within_completions,
    "reordered_alone": rows_are_reordered_alone,
    "advantages_moved": advantages_of_updates_differ,
    "negatives_dropped": negatives_are_dropped,
}
