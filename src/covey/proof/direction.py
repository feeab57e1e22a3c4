"""`covey check`: test that a step makes rewarded completions more likely, and the others less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from covey.learner.batching import Batch
from covey.learner.learner import Learner
from covey.learner.objectives import PolicyObjective
from covey.models.policy import Policy
from covey.types import Group

MAX_AGAINST = 0.02
"""Largest fraction of tokens that a loss may pull against their advantage, for example by a penalty."""
RATES = (1e-5, 1e-4, 1e-3)
"""Learning rates to try, until a step moves log-probs by more than rounding."""
MIN_CHANGE = 1e-6
"""Smallest change of a log-prob, in nats per token, that is no rounding error."""


def with_alternating_rewards(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with rewards 1, 0, 1, 0, ... in place of rewards that are all equal."""
    return [_alternate(group) for group in groups]


def _alternate(group: Group) -> Group:
    paid = (np.arange(len(group.completions)) % 2 == 0).astype(np.float64)
    components = {name: replace(c, values=paid, steps=()) for name, c in group.components.items()}
    weights = sum(c.weight for c in components.values()) if components else 1.0
    baselines = replace(group.baselines, segments=())
    return replace(group, rewards=weights * paid, components=components, baselines=baselines)


def fraction_against(learner: Learner[Policy], objective: PolicyObjective, batch: Batch) -> float:
    """Return the fraction of tokens with an advantage that the loss pulls in the opposite direction."""
    learner.clear()
    stats = learner.forward_backward(batch, objective)
    learner.clear()
    pairs = [(s.coefficient * s.advantage)[s.mask & (s.advantage != 0)] for s in stats]
    signs = torch.cat([*pairs, torch.zeros(0)])
    return float((signs < 0).float().mean()) if len(signs) else 0.0


def above_mean(batch: Batch) -> Tensor:
    """Return (N,) rewards minus the mean of the group, or of the batch if each group has one completion."""
    trained = batch.mask.any(-1) & ~batch.rewards.isnan()
    alone = len(batch.group[trained].unique()) == int(trained.sum())
    gains = torch.zeros(len(batch), dtype=torch.float64)
    for group in batch.group.unique():
        compared = trained & ((batch.group == group) | alone)
        if compared.any():
            gains[compared] = batch.rewards[compared] - batch.rewards[compared].mean()
    return gains


def small_step(
    learner: Learner[Policy], objective: PolicyObjective, batch: Batch
) -> tuple[float, float] | None:
    """Return how a small step changes log-probs, weighted by reward above the mean, and its learning rate.

    The change is in nats per token. None if no rate changes anything. All weights are restored exactly.
    """
    # Masters are the float32 originals of bfloat16 weights; both are restored at the end.
    weights = [*learner.optimizer.masters, *learner.network.model.parameters()]
    saved = [w.detach().clone() for w in weights]
    paid = above_mean(batch)
    scale = float((paid.abs() * batch.mask.sum(-1)).sum())
    if not scale:
        return None
    before = _answer_logprobs(learner, objective, batch)
    try:
        for rate in RATES:
            learner.clear()
            learner.forward_backward(batch, objective)
            learner.step(lr=rate)
            change = float((paid * (_answer_logprobs(learner, objective, batch) - before)).sum()) / scale
            if abs(change) > MIN_CHANGE:
                return change, rate
        return None
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, saved, strict=True):
                weight.copy_(old)
        learner.network.update_unsharded()


def _answer_logprobs(learner: Learner[Policy], objective: PolicyObjective, batch: Batch) -> Tensor:
    """Return (N,) summed log-probs of the trained tokens of each completion."""
    logprobs = learner.token_outputs(batch, objective.temperature).logprobs
    return logprobs.where(batch.mask, 0.0).double().sum(-1)
