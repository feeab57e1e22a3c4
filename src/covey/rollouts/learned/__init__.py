"""Learned rewards: reward models as rewards. They load torch, which other rewards do without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from covey.config.load import ResolvedConfig
from covey.rewards.contract import Reward
from covey.rewards.loading import Function, load_rewards
from covey.rewards.scorer import Rewards
from covey_verify.errors import ConfigError


def _import_function(name: str) -> Callable[..., object]:
    from covey.rollouts.learned import reward_models

    return getattr(reward_models, name)


LEARNED: Mapping[str, Callable[[], Callable[..., object]]] = {
    name: partial(_import_function, name) for name in ("reward_model", "process_reward_model")
}
"""name -> the function that imports the reward, called when a config names it."""


def is_learned(reward: Reward) -> bool:
    """Whether a reward is a reward model's."""
    return reward.function.__module__ == f"{__name__}.reward_models"


def weights_identity(reward: Reward) -> str:
    """Return the hash of a learned reward's weights, which are loaded if they were not."""
    from covey.rollouts.learned.reward_models import model_of_settings

    return model_of_settings(reward.function.__name__, reward.settings).identity


def reward_model_bytes(rewards: Iterable[Reward]) -> int:
    """Return the bytes of the reward models among some rewards, which are loaded if they were not."""
    learned = [r for r in rewards if is_learned(r)]
    if not learned:
        return 0
    from covey.models.live_memory import alive_bytes
    from covey.rollouts.learned.reward_models import model_of_settings

    models = (model_of_settings(r.function.__name__, r.settings).model for r in learned)
    return alive_bytes(weight for model in models for weight in model.parameters())


def rewards_of(
    resolved: ResolvedConfig,
    named: Sequence[object],
    wrap: Callable[[Function], Function] = lambda function: function,
) -> Rewards:
    """Load rewards under a config's settings. Raises ConfigError with the line that names them."""
    config = resolved.config
    try:
        rewards = load_rewards(named, resolved.folder, config.scoring, config.sandbox, LEARNED, wrap)
    except ConfigError as error:
        message = str(error)
        # Only rewards of the config itself have a line there; a task brings its own.
        raise ConfigError(resolved.with_place(message) if named == config.rewards else message) from None
    if config.method == "rl" and not any(r.weight for r in rewards):
        message = "rewards: every weight is 0, so no completion is better than another; give one a weight"
        raise ConfigError(resolved.with_place(message))
    return rewards
