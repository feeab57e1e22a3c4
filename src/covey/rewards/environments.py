"""The reward that a completion's environment gives itself (`rollout.tools.environment`)."""

from __future__ import annotations

from covey.rewards.contract import Reward
from covey.types import Completion, Problem
from covey_verify.errors import RewardError
from covey_verify.sandbox.wire import Attributes
from covey_verify.types import Score

ENDED_BADLY = "the environment hung or died, or its get_reward raised"
LOST = Score(0.0, "crashed", detail=ENDED_BADLY)
"""The score of a completion whose environment cannot be asked."""


def lacks_environment(reward: Reward, problem: Problem, completion: Completion) -> bool:
    """Return whether a function asks for the environment of a completion that has lost it.

    The function would most likely raise, and if it judges a group the siblings would be lost too. A parameter
    with the default None declares that the function handles this case.
    """
    name = "environment" if reward.per_sample else "environments"
    parameter = reward.parameters.get(name)
    if completion.transcript.environment is not None or parameter is None or parameter.default is None:
        return False
    # A column or a setting of that name replaces the environment.
    return name not in problem.columns and name not in reward.settings


def environment_reward(
    completion: str,  # noqa: ARG001 - with this argument it is called for one completion
    environment: Attributes | None,
) -> Score:
    """Return the value of the environment's `get_reward()` at the end, or of its attribute `reward`.

    It is 0 if the environment hung, died or raised, since a call of the model caused that. Raises RewardError
    if the environment has neither.
    """
    if environment is None:
        return LOST
    if not hasattr(environment, "reward"):
        raise RewardError(
            "environment_reward: the environment has neither a method get_reward nor an attribute reward; "
            f"it has {', '.join(vars(environment)) or 'no attributes'}"
        )
    value = environment.reward
    if value is not None and not isinstance(value, int | float):
        raise RewardError(f"environment_reward: the environment's reward must be a number, not {value!r}")
    return Score(value)
