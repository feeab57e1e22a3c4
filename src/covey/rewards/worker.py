"""Workers: processes that run a user's reward function and can be killed.

A worker imports the file once and keeps its state. A call that hangs, even in C code that never releases the
interpreter, costs only the completion whose text is to blame: the process is killed and the next call starts
a new one. An isolated function has a fresh process for each call, under `isolate: sandbox` a confined one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, InvalidStateError
from functools import cache, partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

from covey.rewards.blame import CallFailed, WorkerLost, scores_with_blame, with_texts
from covey.rewards.contract import WORKER_PROCESS, Context, Reward
from covey.rewards.worker_process import CallReply, CallRequest, UserSetup, call_reward, call_reward_async
from covey.types import Problem
from covey_verify.contract import FROM_TRAINER, own_copy
from covey_verify.errors import RewardError
from covey_verify.hosting import UserCode, call_limits, module_of
from covey_verify.sandbox.base import Outcome
from covey_verify.sandbox.client import GRACE, ForkServer, trusted_environment
from covey_verify.sandbox.confine import Limits
from covey_verify.sandbox.driver import MAX_FRAME
from covey_verify.sandbox.wire import Attributes, encode_value
from covey_verify.threads import Call, Executor
from covey_verify.types import Score

FOREVER = Limits(wall=1e8, output=MAX_FRAME)
"""Limits of a worker: a call that it does not answer ends it, not its age."""
IMPORT_SECONDS = 600.0
"""Seconds that importing the user's file may take."""
MAX_LOST = 3
"""Number of machines that may be lost during one call."""
ASYNC_CALLS = 256
"""Largest number of calls of an async function under way at once."""
PLAIN_TYPES = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    list,
    tuple,
    set,
    frozenset,
    dict,
    Attributes,
}
"""Types whose values arrive in the other process exactly as they were sent."""


class WorkerLink(Protocol):
    """The process of a worker, wherever it runs."""

    gone: str | None
    """The reason why it no longer answers; None while it does."""

    def ask(self, message: CallRequest) -> Future[CallReply]:
        """Send a request and return the future of its reply. Raises CallFailed if the process has ended."""

    def kept_waiting(self, look: bool = True) -> float:
        """Return the seconds in which it had no processor; without ``look``, those last reported."""

    def close(self, why: str) -> None:
        """Kill the process and fail all waiting requests."""


class UserCall(NamedTuple):
    """A call of a user's reward function."""

    problem: Problem
    arguments: Mapping[str, object]
    completions: int
    """The number of completions."""
    context: Context
    seconds: float


class Caller(Protocol):
    """Calls a user's function in the place that it declares: ``Worker``, ``Isolated`` or ``Inline``."""

    reward: Reward

    def attempt(self, call: UserCall) -> Outcome:
        """Make a call and return how it ended, ``ok`` if there was any reply."""


def scores_of_call(caller: Caller, call: UserCall) -> list[Score]:
    """Return the scores of a call; a text that is to blame for a failure gets 0.

    Raises CallFailed where the function itself fails, RewardError where it breaks its contract.
    """

    def ask(left_out: Collection[int], wall: float, instead: int | None = None) -> Outcome:
        arguments = with_texts(call.arguments, left_out, instead, caller.reward.per_sample)
        return caller.attempt(call._replace(arguments=arguments, seconds=wall))

    return scores_with_blame(ask, call.completions, call.context, call.seconds)


@cache
def server() -> ForkServer:
    """The fork server of all workers, whose children are trusted and have the rights of this process."""
    return ForkServer(preload=[WORKER_PROCESS], confined=False, path=sys.path)


class Worker:
    """A user's reward function in a process of its own. Safe from any thread."""

    def __init__(self, reward: Reward, link: Callable[[UserSetup], WorkerLink]) -> None:
        """``link`` starts the process."""
        self.reward = reward
        self.link = link
        self.lock = threading.Lock()
        self.links: list[WorkerLink] = []
        """The process, if it has been started: at most one."""
        # The list, not self: a finalizer that referred to the worker would keep it alive.
        weakref.finalize(self, _close, self.links)

    @property
    def overlaps(self) -> bool:
        """Whether several calls may be under way at once."""
        return self.reward.is_async or self.reward.options.concurrent

    def start(self) -> WorkerLink:
        """Return the process, started if it is not running.

        Raises RewardError if the user's file cannot be imported.
        """
        with self.lock:
            if self.links and self.links[0].gone is None:
                return self.links[0]
            _close(self.links)
            self.links.append(self.link(setup_message(self.reward)))
            return self.links[0]

    def attempt(self, call: UserCall) -> Outcome:
        """Make a call; see ``Caller``. Raises WorkerLost if one machine after another is lost."""
        message = request_of(self.reward, call)
        # Where calls overlap, another call may have ended the process, so a failed call is made once more.
        may_retry = self.overlaps
        machines_lost = 0
        while True:
            link = self.start()
            try:
                wait_before = link.kept_waiting(look=False)
                # An async function is timed in its process too, so the wait here is longer by GRACE.
                limit = call.seconds + (GRACE if self.reward.is_async else 0.0)
                kept_waiting = partial(_waited_since, wait_before, link)
                reply = Call.begin(link.ask(message), limit, kept_waiting).result()
            except TimeoutError:
                link.close(f"killed: a call took more than {call.seconds:g} s")
                return Outcome("timeout", text=f"no answer within {call.seconds:g} s")
            except WorkerLost:
                machines_lost += 1
                if machines_lost > MAX_LOST:
                    raise
            except CallFailed as error:
                if not may_retry:
                    return Outcome("crashed", text=str(error))
                may_retry = False
            else:
                return Outcome("ok", reply)


def _waited_since(before: float, link: WorkerLink) -> float:
    return link.kept_waiting() - before


class Isolated:
    """A user's reward function that has a fresh, limited process for each call. Safe from any thread."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self.setup = setup_message(reward)
        base = Path(self.setup["base"])
        code = UserCode(WORKER_PROCESS, [module_of(self.setup["spec"], base)], base)
        self.server = (
            code.limited_server()
            if reward.call_sandbox is None
            else code.sandboxed_server(reward.call_sandbox)
        )

    def attempt(self, call: UserCall) -> Outcome:
        """Make a call; see ``Caller``."""
        request = request_of(self.reward, call)
        limits = call_limits(call.seconds)
        outcome = self.server.call(f"{WORKER_PROCESS}:answer_once", self.setup, request, limits=limits)
        if outcome.kind in ("crashed", "flood"):
            return Outcome("crashed", text=f"it ended its own process ({outcome.text})")
        return outcome


class Inline:
    """A user's reward function that is called in this process. A call that hangs is abandoned, not ended."""

    def __init__(self, reward: Reward, executor: Executor, size: int) -> None:
        """``size`` of its calls may be under way at once."""
        self.reward = reward
        self.executor = executor
        self.size = size

    def attempt(self, call: UserCall) -> Outcome:
        """Make a call; see ``Caller``."""
        try:
            return Outcome("ok", self._submit(call, own_copy(call.arguments)).result())
        except TimeoutError:
            return Outcome("timeout", text=f"no answer within {call.seconds:g} s")

    def _submit(self, call: UserCall, arguments: Mapping[str, object]) -> Call[CallReply]:
        problem = call.problem.id
        if self.reward.is_async:
            reply = call_reward_async(self.reward, problem, arguments, call.completions)
            return self.executor.submit_async(reply, call.seconds)
        work = partial(call_reward, self.reward, problem, arguments, call.completions)
        return self.executor.submit(f"{self.reward.name}, inline", self.size, work, call.seconds)


def setup_message(reward: Reward) -> UserSetup:
    """Return the message that sets up a process for calls of a user's function."""
    assert reward.origin is not None
    setup: UserSetup = {
        "function": f"{WORKER_PROCESS}:serve_user",
        "spec": reward.origin.spec,
        "base": reward.origin.folder,
        "reward": reward.name,
        "folder": str(Path.cwd()),
        "path": sys.path,
        "settings": sendable(reward, reward.plain_settings, "setting"),
    }
    # A sandbox is an object with processes of its own: the worker makes one anew from these fields.
    sandbox = reward.settings.get("sandbox")
    if sandbox is not None:
        setup["sandbox"] = (sandbox.name, getattr(sandbox, "url", ""), getattr(sandbox, "packages", ()))
    return setup


def request_of(reward: Reward, call: UserCall) -> CallRequest:
    """Return one call as plain values. Raises RewardError if a column would not arrive as it is."""
    return {
        "problem": call.problem.id,
        "arguments": sendable(reward, call.arguments, "column"),
        "count": call.completions,
        "step": call.context.step,
        "seconds": call.seconds,
    }


class Link:
    """One process of a worker; replies may come in any order."""

    def __init__(self, setup: UserSetup) -> None:
        self.waiting: dict[int, Future[CallReply]] = {}
        self.numbers = itertools.count()
        self.gone: str | None = None
        """The reason why it no longer answers; None while it does."""
        self.lock = threading.Lock()
        self.stack = contextlib.ExitStack()
        with _standard_error() as screen:
            self.child = self.stack.enter_context(server().child("serve", FOREVER, peer=screen))
        self.child.send({**setup, "environment": trusted_environment()})
        # The child imports the user's file, then reports ready or the exception.
        ready = self.child.receive(IMPORT_SECONDS)
        if not (isinstance(ready, dict) and "ready" in ready):
            why = ready["raised"] if isinstance(ready, dict) else self._end()
            self.close(why)
            self.stack.close()
            raise RewardError(f"reward {setup['reward']}: {setup['spec']} cannot be imported: {why}")
        threading.Thread(target=self._listen, name="reward answers", daemon=True).start()

    def ask(self, message: CallRequest) -> Future[CallReply]:
        """Send a request and return the future of its reply. Raises CallFailed if the process has ended."""
        future = Future[CallReply]()
        with self.lock:
            if self.gone is not None:
                raise CallFailed(self.gone)
            number = next(self.numbers)
            self.waiting[number] = future
            # A frame above MAX_FRAME would end the connection for all calls, so requests stay well below it.
            size = len(json.dumps(message))
            if size > MAX_FRAME // 2:
                raise RewardError(f"problem {message['problem']}: {size} bytes are too many for one call")
            self.child.send({"id": number, **message})
        return future

    def kept_waiting(self, look: bool = True) -> float:
        """Return the seconds in which it had no processor."""
        with self.lock:
            return self.child.kept_waiting() if look and self.gone is None else self.child.known_wait

    def _listen(self) -> None:
        # Runs in its own thread until the child closes its end; ``receive`` then returns None.
        reply: CallReply | None = self.child.receive()
        while isinstance(reply, dict):
            future = self.waiting.pop(reply["id"], None)
            if future is not None:
                # The caller may have given up.
                with contextlib.suppress(InvalidStateError):
                    future.set_result(reply)
            reply = self.child.receive()
        if self.gone is None:
            self.close(self._end())
        self.stack.close()

    def _end(self) -> str:
        # The channel is closed, so the child has to exit within GRACE.
        return f"it ended its own process ({self.child.without_reply(GRACE).text})"

    def close(self, why: str) -> None:
        """Kill the process and fail all waiting requests."""
        self.gone = self.gone or why
        self.child.close()  # the thread that reads its replies wakes up
        for future in list(self.waiting.values()):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(CallFailed(self.gone))
        self.waiting.clear()


def sendable(reward: Reward, values: Mapping[str, object], what: str) -> object:
    """Return a reward function's arguments encoded. Raises RewardError if one would not arrive as it is."""
    for name, value in values.items():
        type_name = _unsendable_type(value)
        if type_name is not None:
            raise RewardError(
                f"reward {reward.name}: {what} {name!r} holds a {type_name}, which cannot be sent to the "
                "reward's process. Leave it out of the signature, or declare the function with "
                '@reward(isolate="inline")'
            )
    try:
        return encode_value(dict(values))
    except ValueError as error:
        raise RewardError(f"reward {reward.name}: {what}s cannot be sent: {error}") from None


def _unsendable_type(value: object) -> str | None:
    """Return the name of a type within the value that would not arrive as it is, or None."""
    if type(value) not in PLAIN_TYPES:
        return type(value).__name__
    if isinstance(value, dict):
        return _unsendable_type([*value, *value.values()])
    if isinstance(value, list | tuple | set | frozenset):
        # Fast way for long lists of numbers or strings: no recursion for each element.
        types = {type(element) for element in value}
        if types <= PLAIN_TYPES and not types & {list, tuple, set, frozenset, dict}:
            return None
        for element in value:
            type_name = _unsendable_type(element)
            if type_name is not None:
                return type_name
    return None


def _standard_error() -> FileIO:
    """Return this process's standard error, to which a worker prints; the null device if there is none."""
    try:
        return FileIO(os.dup(2), "w")
    except OSError:
        return FileIO(os.devnull, "w")


def _close(links: list[WorkerLink]) -> None:
    while links:
        links.pop().close("the run is over")


def arguments_to_send(reward: Reward, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that are sent with each call; the worker already has the others."""
    return {k: v for k, v in arguments.items() if k not in reward.settings and k not in FROM_TRAINER}
