"""Advantages from rewards: group by group under the algorithm's estimator, then across the batch.

A KL penalty in the reward is applied here. By completion it enters before the estimator. By token it is part
of the token rewards if the estimator reads these, or else a return-to-go that is added after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from covey.learner.batching import Batch, ValueTargets
from covey.objective.algorithms import Algorithm
from covey.objective.axis_function import AxisFunction, UserFunctionError, values_of
from covey.objective.data import BatchData, GroupData, KLData, over_tokens, rows_of_groups
from covey.objective.penalties import bounded_value
from covey.objective.value import value_targets
from covey.types import Group
from covey_verify.errors import CoveyError, DataError
from covey_verify.types import StepRewards

NO_SEGMENTS = StepRewards((), ())
"""Segments of a completion without any: its group was not sampled for the estimator, as in a preview."""
MAX_RELATIVE_SUM = 1e-3
"""A group's advantages sum to zero if |sum A| is at most this fraction of sum |A|."""


def with_advantages(
    batch: Batch,
    groups: Sequence[Group],
    algorithm: Algorithm,
    *,
    kl_coef: float | None = None,
    values: Tensor | None = None,
) -> Batch:
    """Compute (N, L) advantages from rewards: group by group, then across the batch.

    The rows of a group are in the order of its completions; rows of other groups may lie between them.
    Unscored completions are left out of all statistics and get 0; completions that are scored but not
    trained count in their group's statistics and not in the batch's. ``kl_coef`` as for ``policy_loss``;
    ``values`` (N, L): a critic's, if the algorithm has one, whose targets are then computed too.
    """
    penalty = _kl_rewards(batch, algorithm, kl_coef)
    advantages, token_rewards = _by_group(batch, groups, algorithm, penalty, values)
    if "token_rewards" not in algorithm.advantage.needs:
        # Reversed cumulative sum: each token bears the cost of itself and all later ones.
        advantages += penalty.token.flip(-1).cumsum(-1).flip(-1)
    advantages = _whiten_batch(advantages.where(batch.mask, 0.0), batch, algorithm)
    batch = replace(batch, advantages=advantages.where(batch.mask, 0.0).float())
    if algorithm.critic is None:
        return batch
    assert values is not None
    return replace(batch, value_targets=_value_targets(values, token_rewards, batch.mask, algorithm))


def _by_group(
    batch: Batch, groups: Sequence[Group], algorithm: Algorithm, penalty: _KLReward, values: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the advantages that the estimator gives within each group, and token rewards: (N, L) each."""
    advantages = torch.zeros(batch.mask.shape, dtype=torch.float64)
    token_rewards = torch.zeros_like(advantages)
    for number, rows in rows_of_groups(batch.group, among=~batch.rewards.isnan()):
        if not batch.mask[rows].any():  # nothing of it can be trained: all are empty
            continue
        group = groups[number]
        _check_steps(group)
        group_penalty = _KLReward(penalty.completion[rows], penalty.token[rows])
        group_values = None if values is None else values[rows]
        data = _group_view(group, batch.select(rows.tolist()), group_penalty, group_values)
        estimated = over_tokens(_estimate_group(algorithm.advantage, data, group), data.mask.shape[1])
        # The group is padded to its own longest completion, which may be shorter than L.
        length = estimated.shape[1]
        advantages[rows, :length] = estimated.to(advantages)
        token_rewards[rows, :length] = data.token_rewards
    return advantages, token_rewards


def _whiten_batch(advantages: Tensor, batch: Batch, algorithm: Algorithm) -> Tensor:
    """Apply the algorithm's ``whiten`` to the completions with a trained token. (N, L) -> (N, L)."""
    # Completions without a trained token are no part of the batch's statistics.
    trained = torch.nonzero(batch.mask.any(-1))[:, 0]
    if algorithm.whiten is not None and len(trained):
        data = BatchData(
            advantages=advantages[trained],
            mask=batch.mask[trained],
            rewards=batch.rewards[trained],
            group=batch.group[trained],
        )
        advantages[trained] = values_of("whiten", algorithm.whiten, data, data.mask.shape, (len(trained), 1))
    return advantages


def _value_targets(values: Tensor, token_rewards: Tensor, mask: Tensor, algorithm: Algorithm) -> ValueTargets:
    """Return the critic's targets, with its own lambda and the discount of the advantages."""
    assert algorithm.critic is not None
    gamma = algorithm.discount
    targets = value_targets(token_rewards, values.double(), mask, gamma=gamma, lam=algorithm.critic.lam)
    returns = value_targets(token_rewards, values.double(), mask, gamma=gamma, lam=1.0)
    return ValueTargets(values, targets.float(), returns.float())


def _estimate_group(estimator: AxisFunction[GroupData, Tensor], view: GroupData, group: Group) -> Tensor:
    """Return one group's advantages, (G,) or (G, T). Raises CoveyError for a faulty estimator of a user."""
    subject = f"problem {group.problem.id}, rewards {_format_values(view.rewards)}"
    try:
        advantages = estimator(view)
    except UserFunctionError as error:
        raise CoveyError(f"algorithm.advantage {error}; {subject}") from error
    fault = _misfit(advantages, view.mask)
    if fault:
        raise CoveyError(f"algorithm.advantage {estimator.name} {fault}; {subject}")
    return advantages.detach()


def _misfit(value: object, mask: Tensor) -> str:
    """Return why ``value`` cannot be a group's advantages; empty if it can."""
    if not isinstance(value, Tensor):
        return f"returns {type(value).__name__} {str(value)[:60]}, not a tensor"
    if value.shape not in (mask.shape[:1], mask.shape):
        expected = f"(G,) = {tuple(mask.shape[:1])} or (G, T) = {tuple(mask.shape)}"
        return f"returns the shape {tuple(value.shape)} where {expected} is expected"
    trained = value if value.ndim == 1 else value[mask]
    return (
        "" if bool(trained.isfinite().all()) else f"returns {_format_values(trained)}, not finite everywhere"
    )


def _format_values(values: Tensor, limit: int = 16) -> str:
    texts = [f"{v:g}" for v in values.flatten()[:limit].tolist()]
    if values.numel() > limit:
        texts.append("...")
    return f"[{', '.join(texts)}]"


def off_centre(batch: Batch, groups: Sequence[Group]) -> tuple[Group, float] | None:
    """Return a group whose advantages, one per completion, do not sum to zero, and their sum.

    Without a baseline common to the group every completion is reinforced alike.
    """
    if not bool(batch.mask.any()):
        return None
    # (N, 1): each completion's advantage at its first trained token.
    first = batch.advantages.gather(1, batch.mask.int().argmax(1, keepdim=True))
    if not bool(((batch.advantages == first) | ~batch.mask).all()):
        return None  # advantages by token need not sum to zero
    for g, group in enumerate(groups):
        advantages = first[(batch.group == g) & batch.mask.any(-1), 0].double()
        if len(advantages) > 1 and float(advantages.sum().abs()) > MAX_RELATIVE_SUM * float(
            advantages.abs().sum()
        ):
            return group, float(advantages.sum())
    return None


def _check_steps(group: Group) -> None:
    """Raise DataError for a step that ends where its completion has no token, if steps are credited."""
    for name, component in group.components.items() if group.credit == "step" else ():
        # A function that gives no steps has none of any completion.
        for completion, steps in zip(group.completions, component.steps, strict=False):
            stray_ends = [end for end in steps.ends if not 0 <= end < len(completion.tokens)]
            if stray_ends:
                raise DataError(
                    f"{group.problem.id}: reward {name} gave a step that ends at token {stray_ends[0]} of a "
                    f"completion of {len(completion.tokens)}; the ends in StepRewards(values, ends) count "
                    "tokens from 0. A function that asks for token_ends learns where each token's text ends"
                )


def _group_view(group: Group, rows: Batch, penalty: _KLReward, values: Tensor | None) -> GroupData:
    """Return one group's data for advantage functions, scorable completions only."""
    scorable = group.scorable
    # ``rows``, ``penalty`` and ``values`` hold the scorable completions already; the group's arrays hold all.
    rewards = torch.from_numpy(group.rewards[scorable]) + penalty.completion
    baselines = group.baselines
    old = rows.old_distribution
    parts = list(group.components.values())
    means = baselines.running_mean
    components = np.array([part.values[scorable] for part in parts]).reshape(len(parts), len(rows))
    return GroupData(
        rewards=rewards,
        components=torch.from_numpy(components),
        weights=torch.tensor([part.weight for part in parts], dtype=torch.float64),
        mask=rows.mask,
        tokens=pad_sequence([torch.from_numpy(t) for t in rows.tokens], batch_first=True, padding_value=-1),
        steps=[list(compress(part.steps, scorable)) for part in parts],
        greedy_reward=baselines.greedy_reward,
        old_logprobs=rows.old_logprobs,
        old_collision=None if old is None else old.collision,
        token_rewards=_token_rewards(group, rewards, rows.mask, penalty.token),
        values=None if values is None else values[:, : rows.mask.shape[1]].double(),
        running_mean=torch.zeros_like(rewards) if means is None else torch.from_numpy(means[scorable]),
        segments=list(compress(baselines.segments or repeat(NO_SEGMENTS), scorable)),
    )


def _token_rewards(group: Group, rewards: Tensor, mask: Tensor, cost: Tensor) -> Tensor:
    """Return the reward of each token: step rewards where steps end, the rest at the last. (G, T) float64.

    A KL penalty by token is charged at each token.
    """
    # Every step reward moves from ``remainder`` to the step's end; each row keeps its total.
    token_rewards = cost[:, : mask.shape[1]].clone()
    remainder = rewards.clone()
    for component in group.components.values() if group.credit in ("step", "token") else ():
        # No steps at all for a function that gives none.
        for row, steps in enumerate(compress(component.steps, group.scorable)):
            for value, end in zip(steps.values, steps.ends, strict=True):
                step_reward = component.weight * value
                token_rewards[row, _trained_at(mask[row], end)] += step_reward
                remainder[row] -= step_reward
    for row, value in enumerate(remainder):
        token_rewards[row, _trained_at(mask[row], mask.shape[1])] += value
    return token_rewards * mask


def _trained_at(mask: Tensor, end: int) -> int:
    """Return the last trained token up to a place, else the first one: inserted tokens get no reward."""
    trained = torch.nonzero(mask)[:, 0]
    earlier = trained[trained <= end]
    if len(earlier):
        return int(earlier[-1])
    return int(trained[0]) if len(trained) else 0


class _KLReward(NamedTuple):
    """The costs of a KL penalty in the reward."""

    completion: Tensor
    """(N,) float64, added to each completion's reward."""
    token: Tensor
    """(N, L) float64, on each token: part of its reward, or of the return-to-go added to its advantage."""


def _kl_rewards(batch: Batch, algorithm: Algorithm, coef: float | None) -> _KLReward:
    """Compute the costs of a KL in the reward, by completion (N,) or by token (N, L)."""
    by_completion = torch.zeros(len(batch), dtype=torch.float64)
    by_token = torch.zeros(batch.mask.shape, dtype=torch.float64)
    kl = algorithm.kl
    # Costs are negative rewards and carry no gradient: the log-probs were computed before the update.
    if kl is not None and kl.place == "reward":
        assert batch.ref_logprobs is not None and batch.old_logprobs is not None
        coef = kl.coef if coef is None else coef
        ref_log_ratio = (batch.old_logprobs - batch.ref_logprobs).where(batch.mask, 0.0).double()
        if kl.level == "completion":
            ref_log_ratio = ref_log_ratio.sum(-1)
        values = values_of("kl.estimator", kl.estimator, KLData(ref_log_ratio), ref_log_ratio.shape)
        costs = -coef * bounded_value(values, kl.bound)
        if kl.level == "completion":
            by_completion = costs
        else:
            by_token = costs
    return _KLReward(by_completion, by_token)
