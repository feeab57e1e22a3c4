"""Objectives of a reinforcement step: the policy's loss and a critic's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from covey.config.sampling import Rollout
from covey.learner.batching import MicroBatch
from covey.learner.learner import Requirements
from covey.models.logprobs import TokenOutputs
from covey.objective.algorithms import Algorithm
from covey.objective.controllers import Coefficients
from covey.objective.diagnostics import TokenStats, token_stats
from covey.objective.loss import policy_loss, user_functions_in_loss
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

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        rollout: Rollout,
        coefficients: Coefficients,
        values: ValueObjective | None = None,
    ) -> PolicyObjective:
        """Return the objective for completions that were sampled by these settings."""
        return cls(algorithm, rollout.temperature, rollout.max_tokens, coefficients, values)

    @property
    def requires(self) -> Requirements:
        """Demands on the pass; an exact KL takes the reference's whole distribution."""
        algorithm = self.algorithm
        return Requirements(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            skips_idle=algorithm.skips_idle,
            whole_groups=algorithm.whole_groups,
            reference="full_kl" in algorithm.needs,
            user_functions=user_functions_in_loss(algorithm),
        )

    def __call__(self, micro: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, TokenStats]:
        """Return a micro-batch's part of the loss, and its token statistics."""
        inputs = micro.loss_inputs(outputs)
        coefficients = self.coefficients
        loss = policy_loss(self.algorithm, inputs, kl_coef=coefficients.kl, entropy_coef=coefficients.entropy)
        if self.values is not None:
            # One backward pass serves both losses: they share the trunk.
            loss = replace(loss, total=loss.total + self.values(micro, outputs)[0])
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

    def __call__(self, micro: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, ValueStats]:
        """Return a micro-batch's part of the loss, and its value for the log."""
        value_data = micro.rows.value_targets
        assert outputs.values is not None and value_data is not None
        values = micro.packed.unpack(outputs.values)
        old, targets, mask = (
            x.to(values.device) for x in (value_data.values, value_data.targets, micro.rows.mask)
        )
        losses = value_loss(values, old, targets, clip_value=self.critic.clip)
        # Divided by the step's tokens, so that micro-batches add up to the mean.
        loss = losses.where(mask, 0.0).sum() / micro.totals.tokens
        return loss, ValueStats(loss.detach().cpu())
