"""State of each sampling server, the weights written for it, its restart, and the work that all share."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, Queue

from covey.errors import SamplersLost
from covey.models.policy import Policy, save_policy
from covey.sampling.base import Request, SampledCompletion, SamplingParams
from covey.sampling.dialects import Dialect, ServerFault
from covey.system.opening import open_to_readers
from covey.types import Completion
from covey_verify.children import how_ended, run
from covey_verify.web import ask

RETRY_SECONDS = 5.0
"""Seconds after which an excluded server is tried again."""
Transport = Callable[[str, object, str, float, int], object]
"""A function that sends a request: ``covey_verify.web.ask``, or another with its signature."""
STANDARD_ERROR = 2
"""File descriptor, which a child inherits; `sys.stderr` need not have one."""
FAILURES = (OSError, ValueError, RecursionError, ServerFault)
"""Exceptions that a request to a server may raise."""


@dataclass
class RemoteServer:
    """The state of one server."""

    url: str
    dialect: Dialect | None = None
    """The kind of the server; None: it has never answered."""
    model: str = ""
    version: int | None = None
    """Version of the weights that it has proven to have."""
    stamp: object = None
    """The mark of its replies since then; it changes if the server is restarted or its weights change."""
    exclusion_reason: str = ""
    """The reason why it is excluded; empty if it takes part."""
    last_tried: float = -RETRY_SECONDS
    """Time of the last try, on the monotonic clock."""
    hangs: bool = False
    """Whether it is excluded because it did not answer in time, after it had proven itself before."""
    draws_checked: bool = False
    """Whether the frequencies of its draws have been compared since it was last recognized."""
    rounding: float | None = None
    """Mean difference of log-probs, nats, when it first had the correct weights."""
    busy: int = 0
    """Number of sampling requests that it works on."""
    times_admitted: int = 0
    """Number of times that it has proven to have the current weights."""

    @property
    def excluded(self) -> bool:
        """Whether it takes no part until it passes the probes."""
        return bool(self.exclusion_reason)


@dataclass(frozen=True)
class Piece:
    """Completions of a request that are asked for together; one with a ``prefix`` is asked for alone."""

    request: int
    samples: Sequence[int]
    prefix: Completion | None = None


@dataclass
class WorkList:
    """The work of one call of ``sample``: pieces still to be asked for, and results."""

    requests: Sequence[Request]
    params: SamplingParams
    queue: deque[Piece]
    results: Queue[list[SampledCompletion] | Exception | None] = field(default_factory=Queue)
    """None: a server was excluded or has weights to take; an exception: a mistake of ours, to be raised."""
    threads_started_for: dict[str, int] = field(default_factory=dict)
    """Address -> the server's ``times_admitted`` when threads were last started for it."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False
    """Whether no more pieces are asked for."""

    def put_back(self, piece: Piece) -> None:
        """Put a piece back at the front of the queue."""
        with self.changed:
            self.queue.appendleft(piece)
            self.changed.notify_all()

    def next_result(self) -> list[SampledCompletion] | None:
        """Return the samples of the next piece; None if a thread has ended, or if none came for a second.

        Raises the exception of a thread.
        """
        try:
            result = self.results.get(timeout=1.0)
        except Empty:
            return None
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """End the threads that wait for pieces."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class WeightsFolder:
    """The folder in which weights are written for servers, one version at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._version: int | None = None
        """The version that was written last."""

    def save_version(self, policy: Policy, version: int) -> Path:
        """Write the weights of a version once and return their folder; all others there are deleted."""
        target = self.folder / f"version_{version:06d}"
        if self._version != version or not target.is_dir():
            # Renamed once it is whole, so that no server reads a part of it.
            unfinished = self.folder / f".{target.name}.part"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            save_policy(policy, unfinished)
            open_to_readers(unfinished)
            for outdated in self.folder.glob("version_*"):
                shutil.rmtree(outdated, ignore_errors=True)
            unfinished.rename(target)
            self._version = version
        return target.resolve()


def timed_out(error: BaseException | None) -> bool:
    """Whether an error, or its cause, says that a server did not answer in time."""
    while error is not None:
        if isinstance(error, TimeoutError):
            return True
        error = error.__cause__
    return False


def same_complaint(reason: str, previous: str) -> bool:
    """Whether two reasons to exclude a server differ at most in their numbers, versions for instance."""
    without_numbers = partial(re.compile(r"\d[\d.e+-]*").sub, "")
    return without_numbers(reason) == without_numbers(previous)


def none_left(servers: Sequence[RemoteServer]) -> SamplersLost:
    """Return the error for a run that has no server to sample on, with what each of them did."""
    reasons = "; ".join(f"{s.url}: {s.exclusion_reason}" for s in servers)
    return SamplersLost(
        f"no sampling server is left: {reasons}. Start servers with this model and repeat the command"
    )


def restart(command: str, url: str, folder: Path, timeout: float) -> None:
    """Run a shell command that restarts the server at ``url`` on a model folder, and wait until it answers.

    It is for a server that cannot take weights while it runs. The command reads them from COVEY_URL and
    COVEY_MODEL and returns once the server is starting. Command and start together have ``timeout`` seconds.
    Raises OSError.
    """
    deadline = time.monotonic() + timeout
    environment = {**os.environ, "COVEY_URL": url, "COVEY_MODEL": str(folder)}
    try:
        # Its output goes to our standard error, because with --json our standard output has one object only.
        # The server that it leaves in the background is not ended.
        output = {"stdout": STANDARD_ERROR, "stderr": None}
        process = run(command, timeout, shell=True, env=environment, **output)  # noqa: S604 - the user's
    except subprocess.TimeoutExpired:
        raise OSError(f"rollout.sampler.restart did not return in {timeout:g} s") from None
    if process.returncode:
        raise OSError(f"rollout.sampler.restart failed: {how_ended(process.returncode)}")
    while not _answers(url):
        if time.monotonic() > deadline:
            raise OSError(f"no answer within {timeout:g} s after rollout.sampler.restart")
        time.sleep(0.5)


def _answers(url: str) -> bool:
    try:
        ask(f"{url}/health", timeout=5.0)
    except OSError:  # a status other than 2xx, too
        return False
    except ValueError:
        pass  # a reply that is no JSON is a reply
    return True
