"""covey trains language models by reinforcement learning without a critic.

>>> import covey
>>> result = covey.train(data={"task": "last_digit"}, output="runs/quick")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import os

# Threads that wait spin for milliseconds by default, which costs a factor of three when another
# program uses a core. OpenMP reads this once, when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

TYPE_CHECKING = False  # importing typing takes as long as all the rest of this file
if TYPE_CHECKING:
    from typing import Any

    from covey.api import evaluate, explain, resume, sample, train
    from covey.types import Completion, Group, Problem
    from covey_verify.contract import reward
    from covey_verify.errors import CoveyError
    from covey_verify.types import Score, StepRewards

    __version__: str

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

_API = ("evaluate", "explain", "resume", "sample", "train")
_OF_VERIFIERS = ("CoveyError", "Score", "StepRewards", "reward")
_HOMES = {**dict.fromkeys(_API, "covey.api"), **dict.fromkeys(_OF_VERIFIERS, "covey_verify")}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the command line has to handle signals before anything that takes time.
    if name not in __all__:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    home = importlib.import_module(_HOMES.get(name, "covey.types"))
    return getattr(home, "VERSION" if name == "__version__" else name)


def __dir__() -> list[str]:
    return __all__
