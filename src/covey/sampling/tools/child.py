"""Code of the processes that run tools. Few imports: one is forked per call, or per environment."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import sys
from collections.abc import Mapping
from contextlib import closing
from typing import TypedDict

from covey_verify.sandbox.driver import CHANNEL, failure, load_module, receive, send


class EnvironmentSetup(TypedDict):
    """The first message to the process of an environment."""

    function: str
    """The function that the process runs: ``serve_environment``, as module:name."""
    module: str
    """Module or file of the class."""
    name: str
    columns: dict[str, object]
    """Arguments of ``reset``."""
    problem_seed: int
    """Seed of random numbers until ``reset`` returns: all completions of a problem begin in the same way."""
    seed: int
    """Seed of random numbers after ``reset``."""
    longest_answer: int
    """Most characters of an answer."""


def call_tool(module: str, name: str, arguments: Mapping[str, object], limit: int) -> str:
    """Return a tool's result as text of at most ``limit`` characters; other values are written as JSON."""
    function = getattr(load_module(module), name)
    # The runner makes its event loop when it first runs a coroutine: a sandbox has no sockets for one.
    with closing(asyncio.Runner()) as loop:
        result = _await_result(function(**arguments), loop)
    return _text(result)[:limit]


def serve_environment(setup: EnvironmentSetup) -> None:
    """Make an environment, reset it, and call its methods until the trainer closes the connection."""
    limit = setup["longest_answer"]
    _seed(setup["problem_seed"])
    # One event loop for the object's whole life, since a connection that it opens belongs to a loop.
    with closing(asyncio.Runner()) as loop:
        try:
            environment = getattr(load_module(setup["module"]), setup["name"])()
            opening = _await_result(environment.reset(**setup["columns"]), loop)
            send(CHANNEL, {"value": None if opening is None else _text(opening)})
            _seed(setup["seed"])
        except BaseException as error:
            send(CHANNEL, failure(error))
            return
        while True:
            try:
                method, arguments = receive(CHANNEL)
            except EOFError:
                return
            try:
                if method:
                    answer = _await_result(getattr(environment, method)(**arguments), loop)
                    send(CHANNEL, {"value": _text(answer)[:limit]})
                else:
                    send(CHANNEL, {"value": _state(environment, loop)})
            except BaseException as error:
                send(CHANNEL, failure(error))


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _state(environment: object, loop: asyncio.Runner) -> dict[str, object]:
    """Return an environment's public attributes that are JSON; `reward` is the result of its `get_reward`."""
    state = {n: v for n, v in getattr(environment, "__dict__", {}).items() if not n.startswith("_")}
    get_reward = getattr(environment, "get_reward", None)
    if get_reward is not None:
        state["reward"] = _await_result(get_reward(), loop)
    # A float attribute ``reward`` is checked too: JSON refuses NaN, so the loop below would drop it silently.
    if get_reward is not None or isinstance(state.get("reward"), float):
        _check_reward(state["reward"], "its attribute reward is" if get_reward is None else "it returned")
    attributes = {}
    for name, value in state.items():
        try:
            attributes[name] = json.loads(json.dumps(value, allow_nan=False, default=_plain_values))
        except (TypeError, ValueError, RecursionError):
            continue  # such as a connection, which could not be sent to a reward's process either
    return attributes


def _check_reward(value: object, subject: str) -> None:
    """Raise ValueError for a value that cannot be a reward: JSON would drop it, and the reason with it."""
    number = _plain_values(value) if hasattr(value, "tolist") else value
    if number is None or (isinstance(number, int | float) and abs(number) <= sys.float_info.max):
        return
    described = "a number that is too large" if isinstance(number, int) else repr(number)[:60]
    raise ValueError(f"{subject} {described}; a finite number or None is expected")


def _await_result(result: object, loop: asyncio.Runner) -> object:
    return loop.run(result) if inspect.iscoroutine(result) else result


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    """Return numpy's arrays and numbers as Python's, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _plain_values(value: object) -> object:
    """Return the values of a numpy array or number. Raises TypeError for anything else."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return value.tolist()
