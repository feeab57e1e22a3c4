"""Checks of advantages: they are computed again from the rewards, under the framework's own convention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from covey.audit.check import Predicate, Trouble
from covey.audit.conventions import convention_of
from covey.audit.record import AuditRecord, Numbers, Rollout, Sample, Use
from covey.objective.advantages import (
    divided,
    group_centered,
    group_zscore,
    standard_deviation,
)
from covey.objective.data import BatchData, GroupData

FEWEST = 4
"""Completions of which a factor is told."""
KNOWN = frozenset({"rewards", "components", "weights", "lengths", "mask"})
"""Data of a group that a record has."""


@dataclass(frozen=True)
class Scored:
    """The completions of a rollout that have a reward. N of them."""

    step: int
    places: list[int]
    rewards: Tensor
    """(N,) float64: the weighted sum."""
    components: Tensor
    """(K, N) float64, NaN where a function gave none."""
    weights: Tensor
    group: Tensor
    """(N,) int64."""
    lengths: Tensor
    used: Tensor
    """(N,) the advantages that the trainer used; NaN for a completion that is not trained."""
    one_per_completion: bool
    """Whether no completion has tokens with different advantages, and one has several tokens."""

    def trained(self) -> Scored:
        """Return the completions with an advantage alone."""
        at = torch.nonzero(~self.used.isnan())[:, 0]
        places = [self.places[n] for n in at.tolist()]
        values = (self.rewards[at], self.components[:, at], self.weights, self.group[at], self.lengths[at])
        return Scored(self.step, places, *values, self.used[at], self.one_per_completion)

    def by_group(self, estimate: Callable[[Tensor], Tensor], values: Tensor | None = None) -> Tensor:
        """Return an estimate of each group's ``values``, (N,), by default of its rewards. (N,)."""
        values = self.rewards if values is None else values
        result = torch.zeros_like(values)
        for g in self.group.unique():
            result[self.group == g] = estimate(values[self.group == g])
        return result


def weights_of(record: AuditRecord, names: Sequence[str]) -> list[float]:
    """Return the weight of each reward function."""
    given = record.setting("reward_weights")
    if isinstance(given, dict):
        return [float(given.get(name, 1.0)) for name in names]
    if isinstance(given, list) and len(given) == len(names):
        return [float(weight) for weight in given]
    return [1.0] * len(names)


def totals(record: AuditRecord, samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards (N,), components (K, N) and weights (K,); NaN for a completion without any score."""
    names = list(dict.fromkeys(name for s in samples for name in s.rewards))
    components = torch.full((len(names), len(samples)), math.nan, dtype=torch.float64)
    for k, name in enumerate(names):
        components[k] = _tensor([s.rewards.get(name) for s in samples])
    weights = _tensor(weights_of(record, names))
    given = _tensor([s.reward for s in samples])
    if not given.isnan().all():
        # Where rewards are recorded, a completion without one was left out, whatever single functions said.
        return given, components, weights
    sums = (components.nan_to_num(0.0) * weights[:, None]).sum(0)
    return sums.where(~components.isnan().all(0), math.nan), components, weights


def _tensor(values: Sequence[float | None]) -> Tensor:
    """Return (N,) float64, NaN for None."""
    return torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)


def groups_of(samples: list[Sample]) -> list[int]:
    """Return the number of each completion's group: the recorded one, else that of its prompt."""
    prompts = [s.prompt_text for s in samples]
    numbers = {prompt: n for n, prompt in enumerate(dict.fromkeys(prompts))}
    return [numbers[p] if s.group is None else s.group for s, p in zip(samples, prompts, strict=True)]


@lru_cache(maxsize=8)
def scored(record: AuditRecord) -> tuple[Scored, ...]:
    """Return the rollouts of a record with rewards and advantages, one value per completion."""
    return tuple(found for r in record.rollouts for found in _scored(record, r))


def _scored(record: AuditRecord, rollout: Rollout) -> Iterator[Scored]:
    samples = rollout.completions
    used = [s.advantage for s in samples]
    lengths = [len(s.ids or ()) for s in samples]
    even = True
    # What an update used counts, the first time: later uses are written first and replaced.
    for use in reversed(record.uses):
        if use.row.rollout == rollout.number and use.row.advantage is not None:
            place = use.row.completion
            used[place] = _one(use.row.advantage, use.row.mask)
            even = even and used[place] is not None
            lengths[place] = sum(use.row.mask or ()) or len(use.sample.ids or ())
    rewards, components, weights = totals(record, samples)
    at = torch.nonzero(~rewards.isnan())[:, 0]
    found = _tensor(used)[at]
    if int((~found.isnan()).sum()) < 2:
        return
    group = torch.tensor(groups_of(samples))
    length = torch.tensor(lengths).clamp(min=1)
    even = even and max(lengths) > 1
    values = (rewards[at], components[:, at], weights, group[at], length[at], found, even)
    yield Scored(rollout.step, at.tolist(), *values)


def _one(advantage: float | Numbers | None, mask: list[bool] | None) -> float | None:
    """Return the advantage of a completion whose tokens all have the same; None if they differ or it is
    unknown.
    """
    if not isinstance(advantage, list):
        return advantage
    on = [a for a, m in zip(advantage, mask or [True] * len(advantage), strict=False) if m and a is not None]
    return on[0] if on and max(on) - min(on) <= 1e-6 * max(1.0, abs(on[0])) else None


def expected(record: AuditRecord, rollout: Scored) -> Tensor | None:
    """Return the advantages that the framework's convention gives, of those that are trained; None if it is
    not known. Completions that are scored and not trained count in the statistics of their groups.
    """
    algorithm = convention_of(record)
    if algorithm is None or not set(algorithm.advantage.needs) <= KNOWN:
        return None
    kl = algorithm.kl
    # A KL of tokens would make the advantages of a completion's tokens differ.
    if kl is not None and kl.place == "reward" and not (kl.level == "token" and rollout.one_per_completion):
        return None
    width = int(rollout.lengths.max())
    mask = torch.arange(width) < rollout.lengths[:, None]
    result = torch.zeros(mask.shape, dtype=torch.float64)
    for g in rollout.group.unique():
        rows = torch.nonzero(rollout.group == g)[:, 0]
        components = rollout.components[:, rows]
        data = GroupData.scored(rollout.rewards[rows], components, rollout.weights, mask[rows])
        own = algorithm.advantage(data)
        result[rows] = own[:, None].expand(-1, width) if own.ndim == 1 else own
    known = ~rollout.used.isnan()
    result = result[known]
    if algorithm.whiten is not None:
        whole = BatchData(result, mask[known], rollout.rewards[known], rollout.group[known])
        result = algorithm.whiten(whole)
    return result[:, 0]


def fits(used: Tensor, candidate: Tensor) -> bool:
    """Whether two vectors agree, in float32's precision and whatever eps is used."""
    return bool((used - candidate).abs().max() <= 2e-3 * max(1e-3, float(candidate.abs().max())))


# --- explanations ---------------------------------------------------------------------------------


class Compared(NamedTuple):
    """The advantages of a rollout, with those that the convention gives."""

    rollout: Scored
    expected: Tensor
    """(N,)."""


Explanation = Callable[[Compared], bool]
"""Whether advantages are what a mistake makes of those expected; its docstring is said of them."""


def negated(compared: Compared) -> bool:
    """The advantages have the other sign."""
    return fits(compared.rollout.used, -compared.expected)


def in_another_order(compared: Compared) -> bool:
    """The advantages are those of other completions: the same numbers in another order."""
    return fits(compared.rollout.used.sort().values, compared.expected.sort().values)


def divided_by_the_batchs_std(compared: Compared) -> bool:
    """The advantages are the rewards less their group's mean, over the std of the whole batch."""
    return _over_batch(compared.rollout, compared.rollout.by_group(group_centered))


def batch_is_the_baseline(compared: Compared) -> bool:
    """The advantages compare a completion with the whole batch, not with its group."""
    centered = group_centered(compared.rollout.rewards)
    return fits(compared.rollout.used, centered) or _over_batch(compared.rollout, centered)


def _over_batch(rollout: Scored, centered: Tensor) -> bool:
    stds = [standard_deviation(rollout.rewards, ddof) for ddof in (0, 1)]
    return any(fits(rollout.used, divided(centered, std + 1e-6)) for std in stds)


def normalized_again(compared: Compared) -> bool:
    """The advantages are the expected ones, normalized once more over the batch or their group."""
    rollout, expected = compared
    again = [divided(group_centered(expected), standard_deviation(expected, d) + 1e-6) for d in (0, 1)]
    again.append(rollout.by_group(group_zscore, expected))
    return any(fits(rollout.used, candidate) for candidate in again)


def without_a_baseline(compared: Compared) -> bool:
    """The advantages are the rewards themselves."""
    return fits(compared.rollout.used, compared.rollout.rewards)


def without_the_std(compared: Compared) -> bool:
    """The advantages are the rewards less their group's mean, undivided."""
    return fits(compared.rollout.used, compared.rollout.by_group(group_centered))


def with_a_std(compared: Compared) -> bool:
    """The advantages are divided by their group's std."""
    rollout = compared.rollout
    return any(fits(rollout.used, rollout.by_group(partial(group_zscore, ddof=d))) for d in (0, 1))


def scaled(compared: Compared) -> bool:
    """The advantages are the expected ones times a number, or plus a number, or both."""
    used = compared.rollout.used
    away = compared.expected - compared.expected.mean()
    factor = float(((used - used.mean()) * away).sum() / away.square().sum().clamp(min=1e-12))
    several = len(used) > FEWEST  # a line goes through any two
    return several and factor > 0 and fits(used, used.mean() + factor * away)


def anything(_compared: Compared) -> bool:
    """The advantages are not those of the settings, and no known mistake explains them."""
    return True


EXPLANATIONS: dict[str, Explanation] = {
    "advantages_negated": negated,
    "std_over_batch": divided_by_the_batchs_std,
    "std_missing": without_the_std,
    "std_added": with_a_std,
    "advantages_normalized_twice": normalized_again,
    "batch_baseline": batch_is_the_baseline,
    "baseline_missing": without_a_baseline,
    "advantages_order": in_another_order,
    "advantages_scaled": scaled,
    "advantages_differ": anything,
}
"""The first that fits is said."""


@lru_cache(maxsize=8)
def explanation(record: AuditRecord) -> tuple[str, Trouble] | None:
    """Return what is wrong with the advantages of most rollouts that differ; None if none does."""
    causes: dict[str, list[Trouble]] = {}
    for every in scored(record):
        due = expected(record, every)
        rollout = every.trained()
        if due is None or fits(rollout.used, due):
            continue
        compared = Compared(rollout, due)
        name = next(name for name, applies in EXPLANATIONS.items() if applies(compared))
        causes.setdefault(name, []).append(_trouble(compared, EXPLANATIONS[name]))
    if not causes:
        return None
    name = max(causes, key=lambda cause: len(causes[cause]))
    return name, causes[name][0]


def _trouble(compared: Compared, cause: Explanation) -> Trouble:
    """Return the finding: the explanation in words, and the completion that is furthest off."""
    rollout, expected = compared
    worst = int((rollout.used - expected).abs().argmax())
    words = (cause.__doc__ or "").removesuffix(".")
    words = words[:1].lower() + words[1:]  # the explanation follows other words
    numbers = f"{float(rollout.used[worst]):.4g} where {float(expected[worst]):.4g} is expected"
    evidence = {"group": int(rollout.group[worst]), "completion": rollout.places[worst]}
    return Trouble(f"{words}: {numbers}", rollout.step, evidence)


def explained_by(name: str) -> Predicate:
    """Return the check that speaks if this is the explanation of a record's advantages."""

    def check(record: AuditRecord) -> Trouble | None:
        found = explanation(record)
        return found[1] if found is not None and found[0] == name else None

    check.__doc__ = EXPLANATIONS[name].__doc__
    return check


def group_mixes_prompts(record: AuditRecord) -> Trouble | None:
    """A group in which the trainer compares completions has more than one prompt."""
    for rollout in record.rollouts:
        prompts: dict[int, set[str]] = {}
        for place, sample in enumerate(rollout.completions):
            if sample.group is None:
                continue
            known = prompts.setdefault(sample.group, set())
            known.add(sample.prompt_text)
            if len(known) > 1:
                said = "a group has completions of several prompts, which are compared with each other"
                return Trouble(said, rollout.step, {"group": sample.group, "completion": place})
    return None


def groups_have_one_completion(record: AuditRecord) -> Trouble | None:
    """Every group of a rollout has one completion, though prompts occur several times in it."""
    for rollout in record.rollouts:
        numbers = [s.group for s in rollout.completions]
        prompts = {s.prompt_text for s in rollout.completions}
        if None not in numbers and len(set(numbers)) == len(numbers) > len(prompts):
            said = f"{len(numbers)} completions of {len(prompts)} prompts are groups of one"
            return Trouble(
                f"{said}, compared with nothing", rollout.step, {"group": numbers[0] or 0, "completion": 0}
            )
    return None


def advantages_of_updates_differ(record: AuditRecord) -> Trouble | None:
    """An update uses an advantage that is not the one that the completion got from its rollout, and the
    numbers of the update are among those of the rollout.
    """
    for rollout in record.rollouts:
        own = {round(s.advantage, 5) for s in rollout.completions if s.advantage is not None}
        # Each use of a completion: the advantage of its update, and that of its rollout.
        given = [
            (use, _one(use.row.advantage, use.row.mask), use.sample.advantage)
            for use in record.uses
            if use.row.rollout == rollout.number
        ]
        pairs = [(use, a, due) for use, a, due in given if a is not None and due is not None]
        moved = [(use, a, due) for use, a, due in pairs if abs(a - due) > 1e-4]
        if moved and all(round(a, 5) in own for _, a, _ in pairs):
            use, value, due = moved[0]
            said = f"completions are trained with the advantages of others: {value:.4g} for {due:.4g}"
            return Trouble(said, use.update.step, {"completion": use.row.completion})
    return None


def rows_are_reordered_alone(record: AuditRecord) -> Trouble | None:
    """The ids of an update are those of other completions of the rollout, whose advantages stayed behind."""
    for rollout in record.rollouts:
        sampled = {tuple(s.ids): n for n, s in enumerate(rollout.completions) if s.ids}
        own = [use for use in record.uses if use.row.rollout == rollout.number]
        ids = [(use, _trained_ids(use)) for use in own if use.row.ids and any(use.row.mask or ())]
        moved = [
            (use, sampled.get(trained)) for use, trained in ids if tuple(use.sample.ids or ()) != trained
        ]
        if len(moved) > 1 and all(n is not None for _, n in moved):
            use, n = moved[0]
            said = "completions are trained with the advantages of others"
            evidence = {"completion": n or 0}
            return Trouble(f"{said}: {n} with that of {use.row.completion}", use.update.step, evidence)
    return None


def _trained_ids(use: Use) -> tuple[int, ...]:
    """Return the ids of an update's row as far as its mask reaches."""
    mask, ids = use.row.mask or [], use.row.ids or []
    return tuple(ids[: max(n + 1 for n, on in enumerate(mask) if on)])


CHECKS: dict[str, Predicate] = {
    "reordered_alone": rows_are_reordered_alone,
    "group_mixed": group_mixes_prompts,
    "group_of_one": groups_have_one_completion,
    "advantages_moved": advantages_of_updates_differ,
    **{name: explained_by(name) for name in EXPLANATIONS},
}
