"""The reward that a completion's environment gives itself (`rollout.tools.environment`)."""

from __future__ import annotations

from covey.errors import RewardError
from covey.sandbox.wire import Attributes
from covey.types import Score

ENDED_BADLY = "the environment hung or died, or its get_reward raised"


def environment_reward(
    completion: str,  # noqa: ARG001 - who asks for it is called with one at a time
    environment: Attributes | None,
) -> Score:
    """What the environment's `get_reward()` returned at the end, or its attribute `reward`.

    0 where it hung, died or raised, as it is the model's call that it stumbled over. Raises RewardError where
    it has neither.
    """
    if environment is None:
        return Score(0.0, "crashed", detail=ENDED_BADLY)
    if not hasattr(environment, "reward"):
        raise RewardError(
            "environment_reward: the environment has neither a method get_reward nor an attribute reward; it "
            f"has {', '.join(vars(environment)) or 'no attributes'}"
        )
    own = environment.reward
    if own is not None and not isinstance(own, int | float):
        raise RewardError(f"environment_reward: the environment's reward is {own!r}; a number is expected")
    return Score(own)
