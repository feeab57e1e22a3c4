"""Objectives of a reinforcement step: the policy's loss and a critic's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from covey.learner.batching import MicroBatch
from covey.learner.learner import Requirements
from covey.models.logprobs import TokenScores
from covey.objective.algorithms import Algorithm
from covey.objective.controllers import Coefficients
from covey.objective.diagnostics import TokenStats, token_stats
from covey.objective.loss import own_in_loss, policy_loss
from covey.objective.value import Critic, value_loss


@dataclass(frozen=True)
class PolicyObjective:
    """The algorithm's loss, with the coefficients of the step."""

    algorithm: Algorithm
    temperature: float
    max_tokens: int
    coefficients: Coefficients
    values: ValueObjective | None = None
    """The loss of a critic on the policy's own hidden states."""

    @property
    def requires(self) -> Requirements:
        """Demands on the pass; an exact KL takes the reference's whole distribution."""
        algorithm = self.algorithm
        exact = "full_kl" in algorithm.needs
        return Requirements(
            self.temperature,
            self.max_tokens,
            algorithm.skips_idle,
            algorithm.whole_groups,
            exact,
            own_in_loss(algorithm),
        )

    def __call__(self, micro: MicroBatch, scores: TokenScores) -> tuple[Tensor, TokenStats]:
        """Return a micro-batch's part of the loss, and its token statistics."""
        inputs = micro.loss_inputs(scores)
        coefficients = self.coefficients
        loss = policy_loss(self.algorithm, inputs, kl_coef=coefficients.kl, entropy_coef=coefficients.entropy)
        if self.values is not None:
            # One backward pass serves both losses: they share the trunk.
            loss = replace(loss, total=loss.total + self.values(micro, scores)[0])
        return loss.total, replace(token_stats(self.algorithm, inputs, loss), origin=micro.rows.origin)


class ValueStats(NamedTuple):
    """The statistics of a critic's update."""

    loss: Tensor


@dataclass(frozen=True)
class ValueObjective:
    """A critic's loss: the mean over tokens of the squared distance from value to target."""

    critic: Critic
    max_tokens: int

    @property
    def requires(self) -> Requirements:
        """Demands on the pass: every trained token has a gradient."""
        return Requirements(max_tokens=self.max_tokens)

    def __call__(self, micro: MicroBatch, scores: TokenScores) -> tuple[Tensor, ValueStats]:
        """Return a micro-batch's part of the loss, and its value for the log."""
        value_data = micro.rows.value_targets
        assert scores.values is not None and value_data is not None
        values = micro.packed.unpack(scores.values)
        old, targets, mask = (
            x.to(values.device) for x in (value_data.values, value_data.targets, micro.rows.mask)
        )
        losses = value_loss(values, old, targets, clip_value=self.critic.clip)
        # Divided by the step's tokens, so that micro-batches add up to the mean.
        loss = losses.where(mask, 0.0).sum() / micro.totals.tokens
        return loss, ValueStats(loss.detach().cpu())
