"""`covey check`, whether a step goes the right way: towards what was paid, and away from the rest."""

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

AGAINST = 0.02
"""Share of the tokens that a loss may pull against their advantage: a penalty on a few of them does."""
RATES = (1e-5, 1e-4, 1e-3)
"""Learning rates of the small steps: the first that moves more than rounding does."""
UNMOVED = 1e-6
"""Nats a token that a log-prob may change by without a step."""


def told_apart(groups: Sequence[Group]) -> list[Group]:
    """Groups whose completions are paid 1 and 0 in turns, where what they were paid tells none apart."""
    return [_in_turns(group) for group in groups]


def _in_turns(group: Group) -> Group:
    paid = (np.arange(len(group.completions)) % 2 == 0).astype(np.float64)
    components = dict.fromkeys(group.components, paid)
    weights = sum(group.weights.get(name, 1.0) for name in components) if components else 1.0
    return replace(group, rewards=weights * paid, components=components, steps={}, segments=())


def against(learner: Learner[Policy], objective: PolicyObjective, batch: Batch) -> float:
    """Share of the tokens with an advantage that the loss pulls to the other side."""
    learner.clear()
    stats = learner.forward_backward(batch, objective)
    learner.clear()
    pairs = [(s.coefficient * s.advantage)[s.mask & (s.advantage != 0)] for s in stats]
    signs = torch.cat([*pairs, torch.zeros(0)])
    return float((signs < 0).float().mean()) if len(signs) else 0.0


def above_mean(batch: Batch) -> Tensor:
    """(N,) what a completion was paid, less the mean of its group, or of the batch where groups are of
    one.
    """
    trained = batch.mask.any(-1) & ~batch.rewards.isnan()
    alone = len(batch.group[trained].unique()) == int(trained.sum())
    found = torch.zeros(len(batch), dtype=torch.float64)
    for group in batch.group.unique():
        own = trained & ((batch.group == group) | alone)
        if own.any():
            found[own] = batch.rewards[own] - batch.rewards[own].mean()
    return found


def small_step(
    learner: Learner[Policy], objective: PolicyObjective, batch: Batch
) -> tuple[float, float] | None:
    """What one small step changes the log-probs of completions by: those paid more, less those paid less.

    -> that, in nats a token, weighted by what each was paid above its group's mean; and the learning rate.
    None where the step moves nothing. The weights are as before afterwards, bit by bit.
    """
    weights = [*learner.optimizer.masters, *learner.policy.model.parameters()]
    saved = [w.detach().clone() for w in weights]
    paid = above_mean(batch)
    scale = float((paid.abs() * batch.mask.sum(-1)).sum())
    before = _sums(learner, objective, batch)
    try:
        for rate in RATES if scale else ():
            learner.clear()
            learner.forward_backward(batch, objective)
            learner.step(lr=rate)
            change = float((paid * (_sums(learner, objective, batch) - before)).sum()) / scale
            if abs(change) > UNMOVED:
                return change, rate
        return None
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, saved, strict=True):
                weight.copy_(old)
        learner.policy.settle()


def _sums(learner: Learner[Policy], objective: PolicyObjective, batch: Batch) -> Tensor:
    """(N,) log-prob of the trained tokens of each completion."""
    logprobs = learner.score(batch, objective.temperature).logprobs
    return logprobs.where(batch.mask, 0.0).double().sum(-1)
