"""Environments: an object of the user's class for each completion, in a process of its own.

    class Game:
        def reset(self, *, secret: int) -> str | None: ...  # columns of the row, by name; ends the prompt
        def guess(self, number: int) -> str: ...            # a tool that the model may call
        def get_reward(self) -> float: ...                  # optional: its own reward at the end

The process is forked from a server that has imported the class. If it hangs or dies, only one completion is
lost.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import NamedTuple, TypeVar, cast

from covey.rng import key
from covey.sampling.tools.allowance import WaitingTime
from covey.sampling.tools.child import EnvironmentSetup
from covey.sampling.tools.definitions import Environment
from covey.system.text import escape_controls
from covey.types import Problem
from covey_verify.errors import CoveyError, DataError, RewardError
from covey_verify.hosting import MEMORY
from covey_verify.sandbox.base import Outcome
from covey_verify.sandbox.client import GRACE, ChildProcess, ForkServer
from covey_verify.sandbox.confine import Limits
from covey_verify.threads import Call, Executor

T = TypeVar("T")
CHILD = "covey.sampling.tools.child"
CALLS_AT_ONCE = 32
"""Largest number of simultaneous calls. Most of them only wait, so it may be above the number of CPUs."""
HOSTED = 300
"""Largest number of objects of a fork server, which has open files for each; any system allows 1,024."""
OPEN_FILES = 65_536
"""Limit of open files to request from the system; each object needs two in this process."""
STATE = 1 << 20
"""Largest size of an object's attributes, in bytes of JSON."""
LAST_SECONDS = 1.0
"""Seconds for an object to report its state when the time for tools is used up."""
NO_AGE = 1e8
"""Time limit of a process in seconds: none, as only a call that gets no answer ends it."""


class FinalState(NamedTuple):
    """The final state of a completion's environment."""

    state: dict[str, object] | None
    """The public attributes; None if it hung, died or has a fault."""
    fault: str = ""
    """The exception that `get_reward` raised, in words; empty if there was none."""


class Environments:
    """The fork servers of a run's environments. Safe from any thread."""

    def __init__(
        self,
        environment: Environment,
        serve: Callable[[], ForkServer],
        timeout: float,
        longest_answer: int,
        output: int,
    ) -> None:
        """``timeout``: seconds of a call; ``longest_answer`` in characters, ``output`` in bytes."""
        self.environment = environment
        self.serve = serve
        self.timeout = timeout
        self.longest_answer = longest_answer
        self.limits = Limits(NO_AGE, int(NO_AGE), MEMORY, output + STATE)
        self.lock = threading.Lock()
        self.warned = False
        # Each fork server with the episodes whose process it holds; one more is started when all are full.
        self.hosts: list[tuple[ForkServer, set[Episode]]] = []
        # The soft limit of open files is raised as far as the hard one allows, and never lowered.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))

    def host(self, episode: Episode) -> ForkServer:
        """Return a fork server with room, and count the episode there."""
        with self.lock:
            for server, hosted in self.hosts:
                if len(hosted) < HOSTED:
                    hosted.add(episode)
                    return server
            server = self.serve()
            self.hosts.append((server, {episode}))
            return server

    def warn(self, words: str) -> None:
        """Print the first failure of a `get_reward`; later ones are counted as metrics only."""
        with self.lock:
            is_first = not self.warned
            self.warned = True
        if is_first:
            print(escape_controls(f"{words}: this completion gets 0"), file=sys.stderr)

    def leave(self, episode: Episode) -> None:
        """Remove an episode whose process has ended."""
        with self.lock:
            for _, hosted in self.hosts:
                hosted.discard(episode)


def columns_not_sent(problem: Problem, columns: Iterable[str], receiver: str, error: Exception) -> DataError:
    """Return the error for a row whose columns the process of a tool or an environment cannot get."""
    return DataError(
        f"{problem.id}: columns {', '.join(columns)} cannot be sent to the process of {receiver}: {error}. "
        "Use values that JSON can hold"
    )


class Episode:
    """A completion's use of its environment; calls run one after another, in the order of ``submit``."""

    def __init__(self, environments: Environments, executor: Executor, problem: Problem, seed: int) -> None:
        self.environments = environments
        self.executor = executor
        self.problem = problem
        self.seed = seed
        self.stack = contextlib.ExitStack()
        self.child: ChildProcess | None = None
        self.ending: Outcome | None = None
        """The end of its process; None while it may be used."""
        self.called = False
        """Whether the model has called a method."""
        self.lock = threading.RLock()
        """Held during a call, so that the connection is not closed while another thread uses it."""
        self.last: Future[object] | None = None

    def submit(self, function: Callable[[], T]) -> Call[T]:
        """Queue a function after all that this completion has queued before."""
        # A chain of futures: each waits for the previous one, which starts earlier because it was submitted
        # earlier, so a waiting thread never blocks the call that it waits for.
        previous = self.last

        def run() -> T:
            if previous is not None:
                wait([previous])
            return function()

        # Without a limit here, because the call to the process has its own.
        call = self.executor.submit("tools", CALLS_AT_ONCE, run, math.inf)
        self.last = cast(Future[object], call.future)
        return call

    def call(self, method: str, arguments: Mapping[str, object], seconds: float) -> Outcome:
        """Call a method and return its result or failure. The first call makes and resets the object.

        An empty ``method`` asks for the state (see ``child``).
        """
        with self.lock:
            if self.ending is None and self.child is None:
                self._check_opening(self._reset())
            self.called = self.called or bool(method)
            return self.ending or self._ask((method, arguments), seconds)

    def opening_text(self) -> str | None:
        """Return the text of `reset`, with which the prompt is to end. The object is not used again."""
        try:
            with self.lock:
                return self._reset()
        finally:
            self.close()

    def end(self, batch: WaitingTime | None = None) -> FinalState:
        """Ask for the final state and end the process. It has one second if its ``batch`` may wait no longer.

        If `get_reward` raises after the model has called a method, those calls may have caused it, so only
        this completion is affected. Raises RewardError if the model called nothing.
        """
        out_of_time = batch is not None and batch.seconds_left() <= 0
        seconds = min(LAST_SECONDS if out_of_time else math.inf, self.environments.timeout)
        try:
            outcome = self.call("", {}, seconds)
        finally:
            self.close()
        if outcome.kind != "error":
            return FinalState(outcome.value if outcome.kind == "ok" else None)
        words = f"{self._name}: get_reward raised {outcome.text[:300]} on problem {self.problem.id}"
        if not self.called:
            raise RewardError(words)
        self.environments.warn(words)
        return FinalState(None, words)

    def close(self) -> None:
        """End its process, whatever it is doing; no other is started."""
        self.ending = self.ending or Outcome("crashed", text="it was given up")
        if self.child is not None:
            # Without the lock, which a call that hangs would hold: the shutdown makes that call return.
            self.child.close()
        with self.lock:
            self.stack.close()
        self.environments.leave(self)

    @property
    def _name(self) -> str:
        return self.environments.environment.spec

    def _reset(self) -> str | None:
        """Make the object, and return the result of its `reset`."""
        environment = self.environments.environment
        server = self.environments.host(self)
        self.child = self.stack.enter_context(server.child("serve", self.environments.limits))
        module, name = environment.home
        columns = environment.columns(self.problem.columns)
        # Two seeds: siblings begin alike until ``reset`` returns, then each has its completion's stream.
        setup: EnvironmentSetup = {
            "function": f"{CHILD}:serve_environment",
            "module": module,
            "name": name,
            "columns": columns,
            "problem_seed": key("reset", self.problem.id) % (1 << 32),
            "seed": self.seed % (1 << 32),
            "longest_answer": self.environments.longest_answer,
        }
        try:
            outcome = self._ask(setup, self.environments.timeout)
        except (TypeError, ValueError) as error:
            raise columns_not_sent(self.problem, columns, self._name, error) from None
        if outcome.kind != "ok":
            raise DataError(f"{self.problem.id}: {self._name}: reset failed: {outcome.text or outcome.kind}")
        return None if outcome.value is None else str(outcome.value)

    def _check_opening(self, opening: str | None) -> None:
        """Raise DataError if the prompt does not end with the text of `reset`: a group has one prompt."""
        if opening and not self.problem.ends_with(opening):
            raise DataError(
                f"{self.problem.id}: {self._name}: reset returned {opening[:60]!r}, but the prompt does not "
                "end with it. It must return the same text for all completions of a row: let it depend on "
                "columns, and on `random` or numpy, which are seeded. If only some rows have a text, let it "
                "return '' for the others, not None"
            )

    def _ask(self, message: object, seconds: float) -> Outcome:
        """Send a message and wait ``seconds`` for its answer. A process that gives none is ended.

        Raises CoveyError if it is lost.
        """
        assert self.child is not None
        outcome = self.child.ask(message, seconds, GRACE)
        if outcome.kind in ("ok", "error"):
            return outcome
        # ``close`` in another thread may have ended it first, which then is the reason.
        self.ending = self.ending or outcome
        self.close()
        if self.ending.kind == "lost":
            raise CoveyError(f"{self._name}: {self.problem.id}: its process was lost: {self.ending.text}")
        return self.ending
