"""Rollouts with their rewards and advantages as tensors, and the advantages that an algorithm gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from covey.audit.checks.groups import groups_of, tensor_of, totals
from covey.audit.checks.logprobs import old, pairs, reference
from covey.audit.record import AuditRecord, Rollout, Row, Sample, Use
from covey.objective.algorithms import Algorithm
from covey.objective.data import BatchData, GroupData, over_tokens, rows_of_groups
from covey.objective.penalties import KL

MIN_COMPLETIONS = 4
"""Fewest completions from which a common factor can be read."""
RECORDED_DATA = frozenset({"rewards", "components", "weights", "lengths", "mask"})
"""The data of a group that a record holds."""
TRLS_EPS = 1e-4
"""The constant that TRL adds to the std of a group."""


@dataclass(frozen=True)
class ScoredRollout:
    """The N completions of a rollout that have a reward."""

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
    kl: Tensor
    """(N,) float64: the sum of the log-ratios to the reference, 0 where it is unknown."""
    used: Tensor
    """(N,) the advantages that the trainer used; NaN for a completion that is not trained."""
    update: Tensor
    """(N,) int64: the step of the first update that trains a completion, -1 without one."""
    one_per_completion: bool
    """Whether no completion has tokens with different advantages, and one has several tokens."""

    def trained(self) -> ScoredRollout:
        """Return only the completions that have an advantage."""
        rows = torch.nonzero(~self.used.isnan())[:, 0]
        return replace(
            self,
            places=[self.places[n] for n in rows.tolist()],
            rewards=self.rewards[rows],
            components=self.components[:, rows],
            group=self.group[rows],
            lengths=self.lengths[rows],
            kl=self.kl[rows],
            used=self.used[rows],
            update=self.update[rows],
        )

    def by_group(
        self, estimate: Callable[[Tensor], Tensor], values: Tensor | None = None, group: Tensor | None = None
    ) -> Tensor:
        """Return an estimate, (N,), from each group's ``values``, (N,); by default from its rewards."""
        values = self.rewards if values is None else values
        result = torch.zeros_like(values)
        for _, rows in rows_of_groups(self.group if group is None else group):
            result[rows] = estimate(values[rows])
        return result


@lru_cache(maxsize=8)
def scored_rollouts(record: AuditRecord) -> tuple[ScoredRollout, ...]:
    """Return the rollouts of a record with rewards and advantages, one value per completion."""
    rollouts = (_scored_rollout(record, rollout) for rollout in record.rollouts)
    return tuple(rollout for rollout in rollouts if rollout is not None)


class UsedValues(NamedTuple):
    """The values of each completion of a rollout that updates used, or else those of the rollout."""

    advantages: list[float | None]
    """None for a completion whose tokens have different ones."""
    lengths: list[int]
    kl: list[float]
    """Log-ratio to the reference, summed over the tokens."""
    updates: list[int]
    """Step of the first update; -1 without one."""


def _used_values(samples: Sequence[Sample], uses: Sequence[Use]) -> UsedValues:
    advantages = [s.advantage for s in samples]
    lengths = [len(s.ids or ()) for s in samples]
    kl = [0.0] * len(samples)
    updates = [-1] * len(samples)
    # The first use of a completion counts. Going backwards lets it overwrite the later ones.
    first_uses = {use.row.completion: use for use in reversed(uses)}
    for index, use in first_uses.items():
        advantages[index] = common_advantage(use.row)
        lengths[index] = sum(use.row.mask or ()) or len(use.sample.ids or ())
        kl[index] = sum(x - y for _, x, y in pairs(use, old, reference))
        updates[index] = use.update.step
    return UsedValues(advantages, lengths, kl, updates)


def _scored_rollout(record: AuditRecord, rollout: Rollout) -> ScoredRollout | None:
    samples = rollout.completions
    uses = [u for u in record.uses if u.row.rollout == rollout.number and u.row.advantage is not None]
    values = _used_values(samples, uses)
    has_common = all(common_advantage(use.row) is not None for use in uses)
    untrained = {use.row.completion for use in uses if use.row.mask and not any(use.row.mask)}
    rewards, components, weights = totals(record, samples)
    counts = ~rewards.isnan()
    counts[_padding(samples, untrained)] = False
    rows = torch.nonzero(counts)[:, 0]
    group = torch.tensor(groups_of(samples))[rows]
    used = _without_rounding(tensor_of(values.advantages)[rows], rewards[rows], group)
    if int((~used.isnan()).sum()) < 2:
        return None
    return ScoredRollout(
        step=rollout.step,
        places=rows.tolist(),
        rewards=rewards[rows],
        components=components[:, rows],
        weights=weights,
        group=group,
        lengths=torch.tensor(values.lengths).clamp(min=1)[rows],
        kl=tensor_of(values.kl)[rows],
        used=used,
        update=torch.tensor(values.updates)[rows],
        one_per_completion=has_common and max(values.lengths) > 1,
    )


def _without_rounding(used: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """Return advantages that are 0 in groups of equal rewards, where those are the rounding of a mean.

    The mean of eight float32 numbers of .1 is not .1, and TRL divides the difference by a std of 0 plus 1e-4.
    """
    rounding = rewards.abs() * 2**-22 / TRLS_EPS
    dead = torch.zeros_like(used, dtype=torch.bool)
    for _, rows in rows_of_groups(group):
        dead[rows] = rewards[rows].max() == rewards[rows].min()
    return torch.where(dead & (used.abs() <= rounding), torch.zeros_like(used), used)


def _padding(samples: Sequence[Sample], untrained: AbstractSet[int]) -> list[int]:
    """Return the places of untrained copies of trained completions, which only make a batch longer."""
    keys = [(number, tuple(s.ids or ())) for s, number in zip(samples, groups_of(samples), strict=True)]
    trained = {key for index, key in enumerate(keys) if index not in untrained}
    return [index for index in sorted(untrained) if keys[index] in trained]


def common_advantage(row: Row) -> float | None:
    """Return the advantage that all tokens of a completion share; None if they differ or it is unknown."""
    if not isinstance(row.advantage, list):
        return row.advantage
    mask = row.mask or [True] * len(row.advantage)
    trained = [a for a, is_trained in zip(row.advantage, mask, strict=False) if is_trained and a is not None]
    if not trained:
        return None
    tolerance = 1e-6 * max(1.0, abs(trained[0]))
    return trained[0] if max(trained) - min(trained) <= tolerance else None


def expected(record: AuditRecord, rollout: ScoredRollout, algorithm: Algorithm) -> Tensor | None:
    """Return the advantages that an algorithm gives to trained completions; None if the record lacks what it
    needs. Completions that are scored but not trained count in the statistics of their groups.
    """
    if not set(algorithm.advantage.needs) <= RECORDED_DATA:
        return None
    rewards = _with_kl(record, rollout, algorithm.kl)
    if rewards is None:
        return None
    width = int(rollout.lengths.max())
    mask = torch.arange(width) < rollout.lengths[:, None]
    result = torch.zeros(mask.shape, dtype=torch.float64)
    for _, rows in rows_of_groups(rollout.group):
        data = GroupData.scored(rewards[rows], rollout.components[:, rows], rollout.weights, mask[rows])
        result[rows] = over_tokens(algorithm.advantage(data), width)
    trained = ~rollout.used.isnan()
    result = result[trained]
    if algorithm.whiten is not None:
        batch = BatchData(result, mask[trained], rewards[trained], rollout.group[trained])
        result = algorithm.whiten(batch)
    return result[:, 0]


def _with_kl(record: AuditRecord, rollout: ScoredRollout, kl: KL | None) -> Tensor | None:
    """Return the rewards from which advantages are computed; None if they contain an unknown KL."""
    if kl is None or kl.place != "reward":
        return rollout.rewards
    if kl.level == "token":
        # A KL of each token would give the tokens of a completion different advantages. Here all are equal,
        # so none was charged.
        return rollout.rewards if rollout.one_per_completion else None
    # TRL's rewards come from its functions alone. Other frameworks may have subtracted the KL from theirs.
    if record.header.framework != "trl" or not record.fields >= {"old_logprobs", "ref_logprobs"}:
        return None
    return rollout.rewards - kl.coef * rollout.kl


def fits(used: Tensor, candidate: Tensor) -> bool:
    """Whether two vectors agree to float32's precision, whatever eps was used."""
    return bool((used - candidate).abs().max() <= 2e-3 * max(1e-3, float(candidate.abs().max())))
