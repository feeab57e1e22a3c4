"""The parts of policy and critic in an update: which of them learn in a step, by which objective."""

from __future__ import annotations

from typing import NamedTuple

from covey.learner.learner import Objective
from covey.learner.objectives import PolicyObjective, ValueObjective, ValueStats
from covey.objective.diagnostics import TokenStats
from covey.training.run import AnyLearner, Run


class LearnerPart(NamedTuple):
    """The part of one learner in each update of a step."""

    learner: AnyLearner
    objective: Objective[TokenStats | ValueStats]

    @property
    def trains_policy(self) -> bool:
        """Whether its gradient is the policy's, which a head of values may share."""
        return isinstance(self.objective, PolicyObjective)


def policy_is_frozen(run: Run, step: int) -> bool:
    """Whether only the critic learns in this step (``critic.warmup``)."""
    critic = run.resolved.algorithm.critic
    return critic is not None and step < critic.warmup


def set_value_pull(run: Run, policy_frozen: bool) -> None:
    """Set how far a value head's gradient reaches the policy's trunk: not at all if the policy is frozen."""
    critic = run.resolved.algorithm.critic
    head = run.learner.network.value
    if critic is not None and head is not None:
        head.pull = 0.0 if policy_frozen else critic.pull


def learner_parts(run: Run, policy_frozen: bool) -> list[LearnerPart]:
    """Return the learners that take part in a step: the policy, unless it is frozen, and a critic."""
    algorithm = run.resolved.algorithm
    rollout = run.resolved.config.rollout
    has_head = run.learner.network.value is not None
    values = None if algorithm.critic is None else ValueObjective(algorithm.critic, rollout.max_tokens)
    parts = []
    if not policy_frozen:
        shared = values if has_head else None
        policy = PolicyObjective.of(algorithm, rollout, run.state.coefficients, shared)
        parts.append(LearnerPart(run.learner, policy))
    # A head on the policy learns with it in one pass, unless the policy is frozen.
    if values is not None and (policy_frozen or not has_head):
        parts.append(LearnerPart(run.critic or run.learner, values))
    return parts
