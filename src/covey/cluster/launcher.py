"""`launch.processes`: the processes that train together, started on this machine or by Ray, and watched.

Each runs the command that the user gave, in the environment that torchrun sets up. When one dies the others
are ended, and all start again from the last checkpoint. If a process ends by itself (a mistake in the
config, a guard, a stop), the command ends with its exit code.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from covey.cluster.connect import release
from covey.cluster.ranks import PlacedRank, environment_of, place_ranks
from covey.errors import PeersLost, cause_of_signal, record_exit, resume_command
from covey.system.parent import CRASHED, LAUNCHER, REPEAT_SECONDS, stop_signals, tell_run_folder
from covey.system.processes import STORE_VARIABLE
from covey_verify.children import Child, how_ended
from covey_verify.errors import CoveyError

if TYPE_CHECKING:
    from covey.config.schema import Config

GRACE_SECONDS = 10.0
"""Seconds for the others to end by themselves after one has failed."""
POLL_SECONDS = 0.05
"""Seconds between two polls."""


def launch(config: Config, as_json: bool = False) -> int:
    """Run this command in several processes and return its exit code. Raises CoveyError if one was killed."""
    restarts = config.launch.restarts
    tell_run_folder(config.output)
    with tempfile.TemporaryDirectory(prefix="covey-") as folder:
        for attempt in range(restarts + 1):
            # Each attempt has its own file to meet at: an old one holds addresses of processes that are gone.
            job = _Job(config, Path(folder) / f"store-{attempt}")
            codes = job.run()
            cause = cause_of(codes)
            if cause is None:
                return 0
            code = codes[cause]
            end = f"process {cause} of {len(codes)}: {how_ended(code)}"
            if job.stopping or not has_died(list(codes.values())):
                break
            if attempt < restarts and not as_json:
                restart = f"restart {attempt + 1} of {restarts}"
                print(f"{end}; continuing from the last checkpoint ({restart})", file=sys.stderr)
    number = max(0, -code)  # Popen reports signal n as -n, a shell as 128 + n
    if not number or job.stopping:
        return 128 + number if number else code
    error = CoveyError(
        f"{end}: {cause_of_signal(number)}. Continue from the last checkpoint with: "
        f"{resume_command(config.output)}"
    )
    error.code = 128 + number
    if config.output.is_dir():
        record_exit(config.output, error)
    raise error


class _Job:
    """One attempt: the processes, from their start to their end."""

    def __init__(self, config: Config, store: Path) -> None:
        self.processes: Sequence[Child | PlacedRank] = []
        self.stopping = False
        self.last = -REPEAT_SECONDS
        # Before the processes start, so that a signal meanwhile is not lost.
        self.before = {number: signal.signal(number, self._pass_on) for number in stop_signals()}
        command = [sys.executable, "-m", "covey", *sys.argv[1:]]
        if config.launch.ray is None:
            self.processes = _local(config.launch.processes, store, command)
        else:
            self.processes = place_ranks(config, command)

    def run(self) -> dict[int, int]:
        """Wait for all processes and return their exit codes by rank, in the order in which they ended."""
        codes: dict[int, int] = {}
        first_failure = math.inf  # the time at which it was seen
        was_killed = False
        try:
            while len(codes) < len(self.processes):
                for n, process in enumerate(self.processes):
                    code = None if n in codes else process.poll()
                    if code is None:
                        continue
                    # A process that is killed below has not failed itself, which matters for a restart.
                    codes[n] = PeersLost.code if was_killed and code < 0 else code
                    if code:
                        first_failure = min(first_failure, time.monotonic())
                if not was_killed and time.monotonic() - first_failure > GRACE_SECONDS:
                    was_killed = True
                    self._kill()
                time.sleep(POLL_SECONDS)
        finally:
            self._kill()
            release()
            for number, handler in self.before.items():
                signal.signal(number, handler)
        return codes

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        moment = time.monotonic()
        before = self.last
        self.last = moment
        if (
            moment - before < REPEAT_SECONDS
        ):  # a terminal's signal arrives twice: directly and from the parent
            return
        self.stopping = True
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()


def has_died(codes: Sequence[int]) -> bool:
    """Whether a process was lost by a signal or a crash, so that another attempt may succeed.

    If no process was killed, all must have ended well, crashed or lost their peers. Any other code means
    a mistake or a decision, which another attempt would only repeat.
    """
    killed = any(code < 0 or code > 128 for code in codes)
    return killed or (PeersLost.code in codes and set(codes) <= {0, PeersLost.code, CRASHED})


def cause_of(codes: Mapping[int, int]) -> int | None:
    """Return the rank of the first process that failed and not for lost peers; None if all ended well."""
    failed = [rank for rank, code in codes.items() if code]
    alone = [rank for rank in failed if codes[rank] != PeersLost.code]
    return next(iter(alone or failed), None)


def _local(count: int, store: Path, command: Sequence[str]) -> list[Child]:
    """Start the command ``count`` times on this machine."""
    shared = {**os.environ, STORE_VARIABLE: str(store), LAUNCHER: str(os.getpid())}
    if sys.platform == "linux":  # not to be reached from elsewhere
        shared = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **shared}
    return [Child(command, env={**shared, **environment_of(n, count, n, count)}) for n in range(count)]
