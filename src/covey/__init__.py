"""covey trains language models by reinforcement learning without a critic.

>>> import covey
>>> result = covey.train(data={"task": "last_digit"}, output="runs/quick")  # doctest: +SKIP
"""

__version__ = "0.1.0"

from covey.api import sample, train
from covey.rewards.contract import reward
from covey.types import Completion, CoveyError, Group, Problem, Score, StepRewards

__all__ = [
    "Completion",
    "CoveyError",
    "Group",
    "Problem",
    "Score",
    "StepRewards",
    "__version__",
    "reward",
    "sample",
    "train",
]
