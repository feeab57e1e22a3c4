"""Rewards -> advantages: group by group under the algorithm's estimator, then across the batch.

A KL penalty that acts through the reward enters here, before the estimator or, token by token, after it.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from covey.batching import Batch
from covey.errors import CoveyError, DataError
from covey.objective.algorithms import Algorithm
from covey.objective.bound import Bound
from covey.objective.data import BatchData, GroupData, KLData
from covey.types import Group, StepRewards

CENTRED = 1e-3
"""Largest share of the summed sizes of a group's advantages that their sum may be, to be called zero."""


def with_advantages(
    batch: Batch, groups: Sequence[Group], algorithm: Algorithm, *, kl_coef: float | None = None
) -> Batch:
    """Rewards -> (N, L) advantages: group by group, then across the batch.

    The rows of a group are in the order of its completions; those of other groups may lie between them.
    Unscored completions are left out of all statistics and get 0; those that are scored but not
    trained count in their group's and not in the batch's. ``kl_coef`` as for ``policy_loss``.
    """
    penalty = _kl_rewards(batch, algorithm, kl_coef)
    advantages = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for g, group in enumerate(groups):
        rows = torch.nonzero((batch.group == g) & ~batch.rewards.isnan())[:, 0]
        if len(rows):
            _check_steps(group, algorithm)
            view = _group_view(group, batch.select(rows.tolist()), penalty.response[rows])
            own = _credited(algorithm.advantage, view, group)
            own = own[:, None].expand(-1, view.mask.shape[1]) if own.ndim == 1 else own
            advantages[rows, : own.shape[1]] = own
    advantages = (advantages + penalty.token).where(batch.mask, 0.0)
    trained = torch.nonzero(batch.mask.any(-1))[:, 0]
    if algorithm.whiten is not None and len(trained):
        whole = BatchData(
            advantages=advantages[trained],
            mask=batch.mask[trained],
            rewards=batch.rewards[trained],
            group=batch.group[trained],
        )
        advantages[trained] = algorithm.whiten(whole)
    return replace(batch, advantages=advantages.where(batch.mask, 0.0).float())


def _credited(estimator: Bound[GroupData, Tensor], view: GroupData, group: Group) -> Tensor:
    """One group's advantages, (G,) or (G, T). Raises CoveyError naming what a user's estimator got wrong."""
    try:
        found = estimator(view)
        wrong = _misfit(found, view.mask)
    except Exception as error:
        if not estimator.own or isinstance(error, CoveyError):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"raises {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
    if wrong:
        raise CoveyError(
            f"algorithm.advantage {estimator.name} {wrong}; problem {group.problem.id}, rewards "
            f"{_listed(view.rewards)}"
        )
    return found.detach()


def _misfit(found: object, mask: Tensor) -> str:
    """Why this cannot be a group's advantages; empty if it can."""
    if not isinstance(found, Tensor):
        return f"returns {type(found).__name__} {str(found)[:60]}, not a tensor"
    if found.shape not in (mask.shape[:1], mask.shape):
        due = f"(G,) = {tuple(mask.shape[:1])} or (G, T) = {tuple(mask.shape)}"
        return f"returns the shape {tuple(found.shape)} where {due} is due"
    trained = found if found.ndim == 1 else found[mask]
    return "" if bool(trained.isfinite().all()) else f"returns {_listed(trained)}, not finite everywhere"


def _listed(values: Tensor, most: int = 16) -> str:
    shown = [f"{v:g}" for v in values.flatten()[:most].tolist()]
    return f"[{', '.join(shown)}{', ...' if values.numel() > most else ''}]"


def off_centre(batch: Batch, groups: Sequence[Group]) -> tuple[Group, float] | None:
    """A group whose advantages, one a completion, do not sum to zero; and their sum.

    Without a baseline common to the group every completion is reinforced alike.
    """
    if not bool(batch.mask.any()):
        return None
    first = batch.advantages.gather(1, batch.mask.int().argmax(1, keepdim=True))
    if not bool(((batch.advantages == first) | ~batch.mask).all()):
        return None  # by token there is no such rule
    for g, group in enumerate(groups):
        own = first[(batch.group == g) & batch.mask.any(-1), 0].double()
        if len(own) > 1 and float(own.sum().abs()) > CENTRED * float(own.abs().sum()):
            return group, float(own.sum())
    return None


def _check_steps(group: Group, algorithm: Algorithm) -> None:
    if "steps" not in algorithm.needs:
        return
    steps = group.steps or (None,) * len(group.completions)
    for completion, given, known in zip(group.completions, steps, group.scorable, strict=True):
        fits = isinstance(given, StepRewards) and max(given.ends, default=0) < len(completion.tokens)
        if known and not fits:
            raise DataError(
                f"{group.problem.id}: {algorithm.advantage.name} credits the steps of a completion, but its "
                "reward gave none that fit its tokens; return StepRewards(values, ends) from a reward"
            )


def _group_view(group: Group, rows: Batch, penalty: Tensor) -> GroupData:
    """One group's data under the names that advantage functions ask for; scorable ones only."""
    keep = group.scorable
    names = list(group.components)
    components = np.array([group.components[n][keep] for n in names]).reshape(len(names), len(rows))
    return GroupData(
        rewards=torch.from_numpy(group.rewards[keep]) + penalty,
        components=torch.from_numpy(components),
        weights=torch.tensor([group.weights[n] for n in names], dtype=torch.float64),
        lengths=rows.mask.sum(-1).double(),
        mask=rows.mask,
        tokens=pad_sequence([torch.from_numpy(t) for t in rows.tokens], batch_first=True, padding_value=-1),
        steps=[s for s, k in zip(group.steps or (), keep, strict=False) if k],
        greedy_reward=group.greedy_reward,
        old_logprobs=rows.old_logprobs,
        old_collision=rows.old_collision,
    )


class _KLReward(NamedTuple):
    """What the pull to the reference costs."""

    response: Tensor
    """(N,) float64, added to each completion's reward."""
    token: Tensor
    """(N, L) float64 or a scalar 0, added to each token's advantage."""


def _kl_rewards(batch: Batch, algorithm: Algorithm, coef: float | None) -> _KLReward:
    """KL in the reward: added to each completion (N,) or, as return-to-go, to tokens (N, L)."""
    response, token = torch.zeros(len(batch), dtype=torch.float64), torch.zeros(())
    kl = algorithm.kl
    if kl is not None and kl.place == "reward":
        assert batch.ref_logprobs is not None and batch.old_logprobs is not None
        coef = kl.coef if coef is None else coef
        ref_log_ratio = (batch.old_logprobs - batch.ref_logprobs).where(batch.mask, 0.0).double()
        if kl.level == "response":
            response = -coef * kl.estimator(KLData(ref_log_ratio.sum(-1)))
        else:
            cost = -coef * kl.estimator(KLData(ref_log_ratio))
            token = cost.flip(-1).cumsum(-1).flip(-1)
    return _KLReward(response, token)
