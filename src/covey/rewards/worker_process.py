"""The program of a worker's process, which calls a user's reward function on request.

Only plain values come in and go out; the returned values are checked against the contract here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from covey.rewards.contract import Context, Reward
from covey_verify.contract import own_copy
from covey_verify.errors import CoveyError, describe_error, trace_of
from covey_verify.sandbox.driver import CHANNEL, PEER, receive, send
from covey_verify.sandbox.wire import decode_value
from covey_verify.usercode import load_function


class UserSetup(TypedDict):
    """The message that a worker gets once: where the user's function is, and how to call it."""

    function: str
    """The function that the process runs: ``serve_user``, as module:name."""
    spec: str
    base: str
    reward: str
    folder: str
    path: list[str]
    settings: object
    """The function's settings, encoded (``wire``)."""
    environment: NotRequired[dict[str, str]]
    """Environment variables of the asking process, if they are to be used."""
    sandbox: NotRequired[tuple[str, str, Sequence[str]]]
    """The sandbox's name, URL and packages."""


class CallRequest(TypedDict):
    """One call of the function."""

    id: NotRequired[int]
    """Number of the request on its link; the reply has the same number."""
    problem: str
    arguments: object
    """The call's arguments, encoded (``wire``)."""
    count: int
    step: int
    seconds: float


class CallReply(TypedDict, total=False):
    """The outcome of a call: scores, or the reason why there are none."""

    id: int
    scores: list[dict[str, Any]]
    logged: dict[str, list[float]]
    extra: dict[str, list[str]]
    late: bool
    refused: str
    code: int
    raised: str
    trace: str
    by_text: bool
    """Whether it was raised in code that the function had from a text."""


def serve_user(setup: UserSetup) -> None:
    """Call a user's reward function at each request, until the other side closes the channel."""
    # The folder may have been removed since the trainer started; the function may not need it.
    with contextlib.suppress(OSError):
        os.chdir(setup["folder"])
    # The fork server may be older than the trainer's environment: a notebook may have set a key since.
    if "environment" in setup:
        os.environ.clear()
        os.environ.update(setup["environment"])
    # The trainer's path may have grown since the fork server started.
    sys.path += [folder for folder in setup["path"] if folder not in sys.path]
    # PEER is the trainer's screen: the function's prints, and prints of C code, go there.
    os.dup2(PEER, 1)
    os.dup2(PEER, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    random.seed(0)
    try:
        reward = _reward_of(setup)
    except BaseException as error:
        send(CHANNEL, {"raised": describe_error(error, "")})
        return
    send(CHANNEL, {"ready": True})
    # Several threads send replies, and their frames must not be interleaved.
    writing = threading.Lock()
    process = os.getpid()
    loop = asyncio.new_event_loop()
    if reward.is_async:
        threading.Thread(target=loop.run_forever, daemon=True).start()

    def send_reply(request: CallRequest, reply: CallReply) -> None:
        # The function has forked, and its child returned as well: a call has one reply.
        if os.getpid() != process:
            os._exit(0)
        with writing:
            send(CHANNEL, {"id": request["id"], **reply})

    async def answer_async(request: CallRequest) -> None:
        send_reply(request, await handle_call_async(reward, request))

    def answer(request: CallRequest) -> None:
        send_reply(request, handle_call(reward, request))

    while True:
        try:
            request: CallRequest = receive(CHANNEL)
        # The trainer has closed its end, or died.
        except EOFError:
            return
        if reward.is_async:
            asyncio.run_coroutine_threadsafe(answer_async(request), loop)
        elif reward.options.concurrent:
            threading.Thread(target=answer, args=(request,), daemon=True).start()
        else:
            answer(request)


def answer_once(setup: UserSetup, request: CallRequest) -> CallReply:
    """Load a user's reward function, call it once and return the reply; the process ends with it."""
    try:
        reward = _reward_of(setup)
    except BaseException as error:
        return {"raised": describe_error(error, ""), "trace": trace_of(error)}
    if reward.is_async:
        return asyncio.run(handle_call_async(reward, request))
    return handle_call(reward, request)


def _reward_of(setup: UserSetup) -> Reward:
    """Import the user's function. Raises whatever its file raises."""
    function = load_function(setup["spec"], Path(setup["base"]))
    return Reward(setup["reward"], function, settings=_settings(setup))


def _settings(setup: UserSetup) -> dict[str, object]:
    settings: dict[str, object] = decode_value(setup["settings"])
    if "sandbox" in setup:
        from covey_verify.sandbox.choice import remade

        settings["sandbox"] = remade(*setup["sandbox"])
    return settings


def _logged_reply(context: Context) -> CallReply:
    return {"logged": context.logged, "extra": context.extra}


def handle_call(reward: Reward, request: CallRequest) -> CallReply:
    """Call a reward function and return the outcome as plain values."""
    context = Context(request["step"])
    arguments = _arguments(reward, request, context)
    reply = call_reward(reward, request["problem"], arguments, request["count"])
    return {**reply, **_logged_reply(context)}


async def handle_call_async(reward: Reward, request: CallRequest) -> CallReply:
    """Await a call of an async reward function and return the outcome; ``late`` if it took too long."""
    context = Context(request["step"])
    arguments = _arguments(reward, request, context)
    clock = asyncio.timeout(request["seconds"])
    try:
        async with clock:
            reply = await call_reward_async(reward, request["problem"], arguments, request["count"])
    except TimeoutError:
        reply = {"late": True}
    return {**reply, **_logged_reply(context)}


def call_reward(reward: Reward, row: str, arguments: Mapping[str, object], count: int) -> CallReply:
    """Call a reward function and return its scores, or how it failed."""
    try:
        return _scores(reward, row, reward.function(**arguments), count)
    except BaseException as error:
        return _failure(reward, error)


async def call_reward_async(
    reward: Reward, row: str, arguments: Mapping[str, object], count: int
) -> CallReply:
    """Await a call of an async reward function and return its scores, or how it failed."""
    try:
        return _scores(reward, row, await reward.function(**arguments), count)
    except asyncio.CancelledError:  # the call has taken too long, which handle_call_async reports
        raise
    except BaseException as error:
        return _failure(reward, error)


def _arguments(reward: Reward, request: CallRequest, context: Context) -> dict[str, object]:
    # Each call gets its own copy of the settings, so a function that changes them cannot affect the next
    # call.
    return {
        **decode_value(request["arguments"]),
        **context.arguments_for(reward),
        **own_copy(reward.settings),
    }


def _scores(reward: Reward, row: str, returned: object, count: int) -> CallReply:
    scores = reward.scores(row, returned, count)
    return {"scores": [{**vars(s), "metrics": dict(s.metrics)} for s in scores]}


def _failure(reward: Reward, error: BaseException) -> CallReply:
    if isinstance(error, CoveyError):
        return {"refused": str(error), "code": error.code}
    return {
        "raised": describe_error(error, reward.file),
        "trace": trace_of(error),
        "by_text": _by_text(error),
    }


def _by_text(error: BaseException) -> bool:
    """Return whether an exception comes from code without a file, as `eval` and `exec` compile it."""
    if isinstance(error, SyntaxError) and str(error.filename).startswith("<"):
        return True
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The methods that `dataclass` generates have no file either, but they are not the code of a module.
    return any(code.co_name == "<module>" and code.co_filename.startswith("<") for code in codes)
