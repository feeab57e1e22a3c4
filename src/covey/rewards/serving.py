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
from typing import Any

from covey.config.usercode import load_function
from covey.errors import CoveyError
from covey.rewards.contract import Context, Reward, described, own_copy, trace_of
from covey.sandbox.driver import CHANNEL, PEER, receive, send
from covey.sandbox.wire import decode_value
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

    def reply(request: Mapping[str, Any], answer: Mapping[str, object]) -> None:
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
    settings = decode_value(setup["settings"])
    if "config_folder" in setup:
        settings["config_folder"] = Path(setup["config_folder"])
    if "sandbox" in setup:
        from covey.sandbox.choice import remade

        settings["sandbox"] = remade(*setup["sandbox"])
    return settings


def answered(reward: Reward, request: Mapping[str, Any]) -> dict[str, object]:
    """A call of a reward function and its outcome, as plain values."""
    context = Context(request["step"])
    try:
        returned = reward.function(**_arguments(reward, request, context))
        return {"scores": _scores(reward, request, returned), "logged": context.logged}
    except BaseException as error:
        return {**_failure(reward, error), "logged": context.logged}


async def answered_later(reward: Reward, request: Mapping[str, Any]) -> dict[str, object]:
    """The same of an async function; ``late`` if it took too long."""
    context = Context(request["step"])
    clock = asyncio.timeout(request["seconds"])
    try:
        async with clock:
            returned = await reward.function(**_arguments(reward, request, context))
        return {"scores": _scores(reward, request, returned), "logged": context.logged}
    except BaseException as error:
        failure = {"late": True} if clock.expired() else _failure(reward, error)
        return {**failure, "logged": context.logged}


def _arguments(reward: Reward, request: Mapping[str, Any], context: Context) -> dict[str, Any]:
    return {**decode_value(request["arguments"]), **context.provided(reward), **own_copy(reward.settings)}


def _scores(reward: Reward, request: Mapping[str, Any], returned: object) -> list[dict[str, object]]:
    scores = reward.scores(Problem(request["problem"], ""), returned, request["count"])
    return [{**vars(s), "metrics": dict(s.metrics)} for s in scores]


def _failure(reward: Reward, error: BaseException) -> dict[str, object]:
    if isinstance(error, CoveyError):
        return {"refused": str(error), "code": error.code}
    return {"raised": described(error, reward.file), "trace": trace_of(error)}
