"""A program that follows a run hears of every step's beginning and end, whatever the method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.training.runs import start

from covey.training.observer import Observer, ObserverRequest
from covey.training.options import RunOptions


class Listener(Observer):
    """Notes what it hears; it may ask for the end after some steps."""

    def __init__(self, last: int = 99) -> None:
        self.heard: list[tuple[str, int]] = []
        self.last = last

    def step_begins(self, step: int) -> None:
        self.heard.append(("begins", step))

    def step_ends(self, step: int, metrics: Mapping[str, float]) -> ObserverRequest:
        assert metrics
        self.heard.append(("ends", step))
        return ObserverRequest(stop=step >= self.last)


@pytest.mark.parametrize("method", ["rl", "sft", "rejection_sampling"])
@pytest.mark.parametrize(("last", "steps"), [(99, 3), (2, 2)])
def test_each_step_begins_and_ends_and_a_wish_to_stop_is_heard(
    tmp_path: Path, method: str, last: int, steps: int
) -> None:
    listener = Listener(last)
    train = {"steps": 3, "batch_size": 4}
    (result,) = start(tmp_path, options=RunOptions(observer=listener), method=method, train=train)
    assert listener.heard == [heard for n in range(steps) for heard in (("begins", n), ("ends", n + 1))]
    assert result.steps == steps
