"""What a worker's process does: it calls a user's reward function, over and over.

Only plain values come in and go out; what the function returns is held to its contract here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from covey.config.usercode import load_function
from covey.errors import CoveyError
from covey.rewards.contract import Reward, described, own_copy, trace_of
from covey.sandbox.driver import CHANNEL, PEER, receive, send
from covey.sandbox.wire import decode
from covey.types import Problem


def serve_user(setup: Mapping[str, Any]) -> None:
    """Call a user's reward function as often as the other side asks, until it is gone."""
    with contextlib.suppress(OSError):
        os.chdir(setup["folder"])
    sys.path += [place for place in setup["path"] if place not in sys.path]  # it may have grown since
    os.dup2(PEER, 1)
    os.dup2(PEER, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    random.seed(0)
    try:
        function = load_function(setup["spec"], Path(setup["base"]))
        reward = Reward(setup["reward"], function, settings=_settings(setup))
    except BaseException as error:
        send(CHANNEL, {"raised": described(error, "")})
        return
    send(CHANNEL, {"ready": True})
    writing = threading.Lock()
    loop = asyncio.new_event_loop()
    if reward.is_async:
        threading.Thread(target=loop.run_forever, daemon=True).start()

    def reply(request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        with writing:
            send(CHANNEL, {"id": request["id"], **answer})

    async def later(request: Mapping[str, Any]) -> None:
        reply(request, await answered_later(reward, request))

    def now(request: Mapping[str, Any]) -> None:
        reply(request, answered(reward, request))

    while True:
        try:
            request = receive(CHANNEL)
        except EOFError:
            return
        if reward.is_async:
            asyncio.run_coroutine_threadsafe(later(request), loop)
        elif reward.options.concurrent:
            threading.Thread(target=now, args=(request,), daemon=True).start()
        else:
            now(request)


def _settings(setup: Mapping[str, Any]) -> dict[str, Any]:
    settings = decode(setup["settings"])
    if "config_folder" in setup:
        settings["config_folder"] = Path(setup["config_folder"])
    if "sandbox" in setup:
        from covey.sandbox.choice import remade

        settings["sandbox"] = remade(*setup["sandbox"])
    return settings


def answered(reward: Reward, request: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a reward function and its outcome, as plain values."""
    logged: list[tuple[str, float]] = []
    try:
        returned = reward.function(**_arguments(reward, request, logged))
        return {"scores": _scores(reward, request, returned), "logged": logged}
    except BaseException as error:
        return {**_failure(reward, error), "logged": logged}


async def answered_later(reward: Reward, request: Mapping[str, Any]) -> dict[str, Any]:
    """The same of an async function; ``late`` if it took too long."""
    logged: list[tuple[str, float]] = []
    clock = asyncio.timeout(request["seconds"])
    try:
        async with clock:
            returned = await reward.function(**_arguments(reward, request, logged))
        return {"scores": _scores(reward, request, returned), "logged": logged}
    except BaseException as error:
        failure = {"late": True} if clock.expired() else _failure(reward, error)
        return {**failure, "logged": logged}


def _arguments(reward: Reward, request: Mapping[str, Any], logged: list[tuple[str, float]]) -> dict[str, Any]:
    extra = {
        "trainer_state": SimpleNamespace(global_step=request["step"]),
        "log_metric": lambda name, value: logged.append((str(name), float(value))),
        "log_extra": lambda *_: None,
    }
    asked = {n: v for n, v in extra.items() if n in reward.parameters}
    return {**decode(request["arguments"]), **asked, **own_copy(reward.settings)}


def _scores(reward: Reward, request: Mapping[str, Any], returned: Any) -> list[dict[str, Any]]:
    scores = reward.scores(Problem(request["problem"], ""), returned, request["count"])
    return [{**vars(s), "parts": dict(s.parts)} for s in scores]


def _failure(reward: Reward, error: BaseException) -> dict[str, Any]:
    if isinstance(error, CoveyError):
        return {"refused": str(error), "code": error.code}
    return {"raised": described(error, reward.file), "trace": trace_of(error)}
