"""covey trains language models by reinforcement learning without a critic.

>>> import covey
>>> result = covey.train(data={"task": "last_digit"}, output="runs/quick")  # doctest: +SKIP
"""

import os

# Threads that wait spin for milliseconds by default, which costs a factor of three when another
# program uses a core. OpenMP reads this once, when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from covey.api import evaluate, explain, resume, sample, train
from covey.rewards.contract import reward
from covey.types import VERSION, Completion, CoveyError, Group, Problem, Score, StepRewards

__version__ = VERSION

__all__ = [
    "Completion",
    "CoveyError",
    "Group",
    "Problem",
    "Score",
    "StepRewards",
    "__version__",
    "evaluate",
    "explain",
    "resume",
    "reward",
    "sample",
    "train",
]
