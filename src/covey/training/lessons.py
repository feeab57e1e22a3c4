"""The lessons of the loops over given examples, by the name of the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from covey.config.methods import Loop
from covey.training import given, preference, reward_model
from covey.training.given import Lesson
from covey.training.run import Run

LESSONS: Mapping[Loop, Callable[[Run], Lesson]] = {
    "imitation": given.imitation,
    "preference": preference.preferences,
    "reward_model": reward_model.judgements,
}
