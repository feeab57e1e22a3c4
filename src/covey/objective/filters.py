"""Group filters: whether a scored group is worth training on.

Data by name: (G,) ``rewards``; (G,) bool ``correct``, the run's verdict (``Group.correct``); and
``dead``, whether all the rewards that the algorithm compares are equal (``Group.dead``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from covey.objective.setting import Setting
from covey_verify.types import Fraction

if TYPE_CHECKING:
    from torch import Tensor


def informative(dead: bool) -> bool:
    """Whether the rewards differ at all: a tied group has zero gradient. DAPO, arXiv 2503.14476."""
    return not dead


def mixed(correct: Tensor) -> bool:
    """Whether some completions are correct and some incorrect: 0 < number correct < G, as DAPO prints it.

    Drops groups that only differ by their format or length, and all where no reward passes .5.
    """
    return bool(correct.any() and not correct.all())


def pass_rate_band(
    rewards: Tensor,
    *,
    low: Annotated[
        Fraction, Setting("Lowest pass rate of a group that is trained on.", usual="0.1 to 0.2")
    ] = 0.2,
    high: Annotated[
        Fraction, Setting("Highest pass rate of a group that is trained on.", usual="0.8 to 0.9")
    ] = 0.8,
    threshold: Annotated[float, Setting("A reward above this counts as passed.")] = 0.5,
) -> bool:
    """Whether low <= fraction of rewards above threshold <= high. PRIME, arXiv 2502.01456: [.2, .8]."""
    rate = float((rewards > threshold).double().mean())
    return low <= rate <= high
