"""The reward that a completion's environment gives itself (`rollout.tools.environment`)."""

from __future__ import annotations

from covey.rewards.contract import Reward
from covey.types import Completion, Problem
from covey_verify.errors import RewardError
from covey_verify.sandbox.wire import Attributes
from covey_verify.types import Score

ENDED_BADLY = "the environment hung or died, or its get_reward raised"
LOST = Score(0.0, "crashed", detail=ENDED_BADLY)
"""What a completion gets whose environment cannot be asked."""


def lacks_environment(reward: Reward, problem: Problem, completion: Completion) -> bool:
    """Whether a function asks for the environment of a completion that has none left.

    It would most likely raise, and where it judges a group the siblings would be lost with it. One whose
    parameter has the default None says that it knows what to do.
    """
    name = "environment" if reward.per_sample else "environments"
    parameter = reward.parameters.get(name)
    if completion.environment is not None or parameter is None or parameter.default is None:
        return False
    return name not in problem.columns and name not in reward.settings


def environment_reward(
    completion: str,  # noqa: ARG001 - who asks for it is called with one at a time
    environment: Attributes | None,
) -> Score:
    """What the environment's `get_reward()` returned at the end, or its attribute `reward`.

    0 where it hung, died or raised, as it is the model's call that it stumbled over. Raises RewardError where
    it has neither.
    """
    if environment is None:
        return LOST
    if not hasattr(environment, "reward"):
        raise RewardError(
            "environment_reward: the environment has neither a method get_reward nor an attribute reward; it "
            f"has {', '.join(vars(environment)) or 'no attributes'}"
        )
    own = environment.reward
    if own is not None and not isinstance(own, int | float):
        raise RewardError(f"environment_reward: the environment's reward is {own!r}; a number is expected")
    return Score(own)
