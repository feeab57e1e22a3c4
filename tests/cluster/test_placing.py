"""Placing actors on a cluster that loses a node meanwhile, played by a stand-in for Ray."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from covey.cluster import reward_workers
from covey.cluster.samplers import PlacedSamplers
from covey.config.load import load_config
from covey_verify.errors import ConfigError, RewardError


class RayError(Exception):
    pass


class RayActorError(RayError):
    def __init__(self, says: str, actor_init_failed: bool) -> None:
        super().__init__(says)
        self.actor_init_failed = actor_init_failed


LOST = RayActorError("its node has died", actor_init_failed=False)
BROKEN = RayActorError("raised in its creation task: no such file", actor_init_failed=True)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Exception | None]:
    """What the actors say that are asked whether they are ready, one after the other."""
    script: list[Exception | None] = []
    monkeypatch.setattr("covey.cluster.connect._placed", [])

    def get(_: object, timeout: float = 0.0) -> None:
        if (answer := script.pop(0)) is not None:
            raise answer

    actor = SimpleNamespace(ready=SimpleNamespace(remote=object))
    kind = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: actor))
    ray, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    functions: dict[str, Any] = {
        "get": get,
        "kill": lambda *_, **__: None,
        "remote": lambda _: kind,
        "wait": lambda left, timeout: (left[:1], left[1:]),
        "exceptions": exceptions,
    }
    for name, function in functions.items():
        setattr(ray, name, function)
    exceptions.RayError, exceptions.RayActorError = RayError, RayActorError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    return script


SETUP: Any = {"reward": "closeness"}


def test_a_reward_worker_whose_node_is_lost_is_placed_again(answers: list[Exception | None]) -> None:
    answers += [LOST, LOST, None]
    reward_workers.PlacedLink(SETUP)
    assert answers == []


@pytest.mark.parametrize("said", [[BROKEN, None], [LOST] * reward_workers.MAX_PLACEMENTS])
def test_what_fails_by_itself_or_again_and_again_is_an_error(
    answers: list[Exception | None], said: list[Exception | None]
) -> None:
    answers += said
    with pytest.raises(RewardError, match=r"closeness: not placed by Ray: (raised in|its node)"):
        reward_workers.PlacedLink(SETUP)


def samplers(count: int) -> Any:
    made = object.__new__(PlacedSamplers)
    made.actors = {f"ray:{n}": SimpleNamespace(ready=SimpleNamespace(remote=object)) for n in range(count)}
    return made


def test_of_the_samplers_one_has_to_come_up(answers: list[Exception | None]) -> None:
    config = load_config(values={"data": {"task": "sums"}}).config
    answers += [LOST, None]
    samplers(2)._wait(config)
    answers[:] = [LOST, LOST]
    with pytest.raises(ConfigError, match="did not start: its node has died"):
        samplers(2)._wait(config)
    answers[:] = [BROKEN, None]
    with pytest.raises(ConfigError, match="did not start: raised in"):
        samplers(2)._wait(config)
