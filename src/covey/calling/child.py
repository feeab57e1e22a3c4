"""What the processes of tools do. Light on imports: one is forked for each call, or each environment."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import sys
from collections.abc import Mapping
from typing import TypedDict

from covey_verify.sandbox.driver import CHANNEL, failure, load_module, receive, send


class EnvironmentSetup(TypedDict):
    """What the process of an environment is told first."""

    function: str
    """What the process runs: ``serve_environment``, as module:name."""
    place: str
    """Module or file of the class."""
    name: str
    columns: dict[str, object]
    """What ``reset`` gets."""
    problem_seed: int
    """Of random numbers until ``reset`` returns: all completions of a problem begin alike."""
    seed: int
    """Of those afterwards."""
    most: int
    """Characters of an answer."""


def call_tool(place: str, name: str, given: Mapping[str, object], most: int) -> str:
    """What a tool returns, as text of at most ``most`` characters: what is no text is written as JSON."""
    with asyncio.Runner() as loop:
        return _text(_awaited(getattr(load_module(place), name)(**given), loop))[:most]


def serve_environment(setup: EnvironmentSetup) -> None:
    """Make an environment, reset it, and call its methods until the other side is gone."""
    most = setup["most"]
    _seed(setup["problem_seed"])
    with asyncio.Runner() as loop:
        try:
            environment = getattr(load_module(setup["place"]), setup["name"])()
            said = _awaited(environment.reset(**setup["columns"]), loop)
            send(CHANNEL, {"value": None if said is None else _text(said)})
            _seed(setup["seed"])
        except BaseException as error:
            send(CHANNEL, failure(error))
            return
        while True:
            try:
                method, given = receive(CHANNEL)
            except EOFError:
                return
            try:
                if method:
                    answer = _text(_awaited(getattr(environment, method)(**given), loop))[:most]
                    send(CHANNEL, {"value": answer})
                else:
                    send(CHANNEL, {"value": _state(environment, loop)})
            except BaseException as error:
                send(CHANNEL, failure(error))


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _state(environment: object, loop: asyncio.Runner) -> dict[str, object]:
    """Its public attributes that can be JSON, and as `reward` what `get_reward` returns, if it has that."""
    found = {n: v for n, v in getattr(environment, "__dict__", {}).items() if not n.startswith("_")}
    ask = getattr(environment, "get_reward", None)
    if ask is not None:
        found["reward"] = _awaited(ask(), loop)
    if ask is not None or isinstance(found.get("reward"), float):
        _check_reward(found["reward"], "its attribute reward is" if ask is None else "it returned")
    plain = {}
    for name, value in found.items():
        try:
            plain[name] = json.loads(json.dumps(value, allow_nan=False, default=_listed))
        except (TypeError, ValueError, RecursionError):
            continue  # a connection, a board of objects: nothing that a reward in another process could get
    return plain


def _check_reward(value: object, what: str) -> None:
    """Raise ValueError for what no completion can be paid: JSON would lose it, and with it why."""
    plain = _listed(value) if hasattr(value, "tolist") else value
    if plain is None or (isinstance(plain, int | float) and abs(plain) <= sys.float_info.max):
        return
    shown = "a number that is too large" if isinstance(plain, int) else repr(plain)[:60]
    raise ValueError(f"{what} {shown}; a finite number or None is expected")


def _awaited(returned: object, loop: asyncio.Runner) -> object:
    return loop.run(returned) if inspect.iscoroutine(returned) else returned


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    """Numbers of numpy as numbers, not as texts that look like them; the rest in words."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _listed(value: object) -> object:
    """What numpy holds; nothing else is taken for JSON."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return value.tolist()
