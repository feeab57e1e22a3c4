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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from covey.rewards.contract import Context, Reward
from covey_verify.contract import own_copy
from covey_verify.errors import CoveyError, described, trace_of
from covey_verify.sandbox.driver import CHANNEL, PEER, receive, send
from covey_verify.sandbox.wire import decode_value
from covey_verify.usercode import load_function


class UserSetup(TypedDict):
    """What a worker is told once: where the user's function is, and how it is to be called."""

    function: str
    """What the process runs: ``serve_user``, as module:name."""
    spec: str
    base: str
    reward: str
    folder: str
    path: list[str]
    settings: object
    """Encoded (``wire``)."""
    environment: NotRequired[dict[str, str]]
    """Its variables, where they are those of the process that asks."""
    config_folder: NotRequired[str]
    sandbox: NotRequired[tuple[str, str, Sequence[str]]]
    """Its name and URL."""


class CallRequest(TypedDict):
    """One call of the function."""

    id: NotRequired[int]
    """The link numbers its requests; a reply bears the number of its request."""
    problem: str
    arguments: object
    """Encoded (``wire``)."""
    count: int
    step: int
    seconds: float


class CallReply(TypedDict, total=False):
    """How a call went: scores, or why there are none."""

    id: int
    scores: list[dict[str, Any]]
    logged: dict[str, list[float]]
    extra: dict[str, list[str]]
    late: bool
    refused: str
    code: int
    raised: str
    trace: str


def serve_user(setup: UserSetup) -> None:
    """Call a user's reward function as often as the other side asks, until it is gone."""
    with contextlib.suppress(OSError):
        os.chdir(setup["folder"])
    if "environment" in setup:  # it may have changed since: a key set between two runs of a notebook
        os.environ.clear()
        os.environ.update(setup["environment"])
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

    def reply(request: CallRequest, answer: CallReply) -> None:
        with writing:
            send(CHANNEL, {"id": request["id"], **answer})

    async def later(request: CallRequest) -> None:
        reply(request, await answered_later(reward, request))

    def now(request: CallRequest) -> None:
        reply(request, answered(reward, request))

    while True:
        try:
            request: CallRequest = receive(CHANNEL)
        except EOFError:
            return
        if reward.is_async:
            asyncio.run_coroutine_threadsafe(later(request), loop)
        elif reward.options.concurrent:
            threading.Thread(target=now, args=(request,), daemon=True).start()
        else:
            now(request)


def answer_once(setup: UserSetup, request: CallRequest) -> CallReply:
    """One call of a user's reward function, in a process that ends with it."""
    try:
        function = load_function(setup["spec"], Path(setup["base"]))
        reward = Reward(setup["reward"], function, settings=_settings(setup))
    except BaseException as error:
        return {"raised": described(error, ""), "trace": trace_of(error)}
    if reward.is_async:
        return asyncio.run(answered_later(reward, request))
    return answered(reward, request)


def _settings(setup: UserSetup) -> dict[str, object]:
    settings: dict[str, object] = decode_value(setup["settings"])
    if "config_folder" in setup:
        settings["config_folder"] = Path(setup["config_folder"])
    if "sandbox" in setup:
        from covey_verify.sandbox.choice import remade

        settings["sandbox"] = remade(*setup["sandbox"])
    return settings


def _logged(context: Context) -> CallReply:
    return {"logged": context.logged, "extra": context.extra}


def answered(reward: Reward, request: CallRequest) -> CallReply:
    """A call of a reward function and its outcome, as plain values."""
    context = Context(request["step"])
    try:
        returned = reward.function(**_arguments(reward, request, context))
        return {"scores": _scores(reward, request, returned), **_logged(context)}
    except BaseException as error:
        return {**_failure(reward, error), **_logged(context)}


async def answered_later(reward: Reward, request: CallRequest) -> CallReply:
    """The same of an async function; ``late`` if it took too long."""
    context = Context(request["step"])
    clock = asyncio.timeout(request["seconds"])
    try:
        async with clock:
            returned = await reward.function(**_arguments(reward, request, context))
        return {"scores": _scores(reward, request, returned), **_logged(context)}
    except BaseException as error:
        failure: CallReply = {"late": True} if clock.expired() else _failure(reward, error)
        return {**failure, **_logged(context)}


def _arguments(reward: Reward, request: CallRequest, context: Context) -> dict[str, object]:
    return {**decode_value(request["arguments"]), **context.provided(reward), **own_copy(reward.settings)}


def _scores(reward: Reward, request: CallRequest, returned: object) -> list[dict[str, Any]]:
    scores = reward.scores(request["problem"], returned, request["count"])
    return [{**vars(s), "metrics": dict(s.metrics)} for s in scores]


def _failure(reward: Reward, error: BaseException) -> CallReply:
    if isinstance(error, CoveyError):
        return {"refused": str(error), "code": error.code}
    return {"raised": described(error, reward.file), "trace": trace_of(error)}
