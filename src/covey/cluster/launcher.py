"""`launch.processes`: the processes that train together, started on this machine or by Ray, and watched.

Each runs the command that the user gave, in the environment that torchrun sets up. When one dies the others
are ended, and all start again from the last checkpoint. If a process ends by itself (a mistake in the
config, a guard, a stop), the command ends with its exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from covey.cluster.connect import release
from covey.cluster.ranks import PlacedRank, place_ranks
from covey.errors import PeersLost
from covey.system.parent import CRASHED, LAUNCHER, TOGETHER, stop_signals, works_in
from covey.system.processes import STORE

if TYPE_CHECKING:
    from covey.config.schema import Config

LAST_WORDS = 10.0
"""Seconds for the others to end by themselves after one has failed."""
TICK = 0.05
"""Seconds between two polls."""


def launch(config: Config, as_json: bool = False) -> int:
    """Run this command in several processes. -> its exit code."""
    restarts = config.launch.restarts
    works_in(config.output)
    with tempfile.TemporaryDirectory(prefix="covey-") as folder:
        for attempt in range(restarts + 1):
            # Each attempt has its own file to meet at: an old one holds addresses of processes that are gone.
            job = _Job(config, Path(folder) / f"store-{attempt}")
            code = job.run()
            if job.stopping or not job.died or attempt == restarts:
                return code
            if not as_json:
                left = f"restart {attempt + 1} of {restarts}"
                print(f"a process has died: going on from the last checkpoint ({left})", file=sys.stderr)
    raise AssertionError


class _Job:
    """One attempt: the processes, from their start to their end."""

    def __init__(self, config: Config, store: Path) -> None:
        self.processes: Sequence[subprocess.Popen[bytes] | PlacedRank] = []
        self.stopping = self.died = False
        self.last = -TOGETHER
        # Before the processes start, so that a signal meanwhile is not lost.
        self.before = {number: signal.signal(number, self._pass_on) for number in stop_signals()}
        command = [sys.executable, "-m", "covey", *sys.argv[1:]]
        if config.launch.ray is None:
            self.processes = _local(config.launch.processes, store, command)
        else:
            self.processes = place_ranks(config, command)

    def run(self) -> int:
        """Wait for all of them. -> the exit code of the first that failed, 0 if none did."""
        # Number of a process -> its exit code, in the order in which they were seen to end.
        codes: dict[int, int] = {}
        since = 0.0
        try:
            while len(codes) < len(self.processes):
                for n, process in enumerate(self.processes):
                    if n not in codes and (code := process.poll()) is not None:
                        codes[n] = code
                        # When the first failure was seen; 0 while there is none.
                        since = since or time.monotonic() * bool(code)
                if since and time.monotonic() - since > LAST_WORDS:
                    self._kill()
                time.sleep(TICK)
        finally:
            self._kill()
            release()
            for number, handler in self.before.items():
                signal.signal(number, handler)
        self.died = has_died(list(codes.values()))
        return _code_of(list(codes.values()))

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        now, before, self.last = time.monotonic(), self.last, time.monotonic()
        if now - before < TOGETHER:  # a terminal's comes through the parent, too
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

    Without one killed by a signal, all others must have ended well, crashed or lost their peers: any other
    code is a mistake or a decision, which would only repeat.
    """
    killed = any(code < 0 or code > 128 for code in codes)
    return killed or (PeersLost.code in codes and set(codes) <= {0, PeersLost.code, CRASHED})


def _local(count: int, store: Path, command: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start the command ``count`` times on this machine."""
    shared = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        STORE: str(store),
        LAUNCHER: str(os.getpid()),
    }
    if sys.platform == "linux":  # not to be reached from elsewhere
        shared = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **shared}
    return [
        # In a session of its own: Ctrl-C reaches it once, through this process.
        subprocess.Popen(  # noqa: S603 - the command that the user gave
            command, env={**shared, "RANK": str(n), "LOCAL_RANK": str(n)}, start_new_session=True
        )
        for n in range(count)
    ]


def _code_of(codes: Sequence[int]) -> int:
    """Return the command's exit code: the first cause, rather than the loss of peers that followed."""
    # Popen reports signal n as -n, a shell as 128 + n.
    failed = [128 - code if code < 0 else code for code in codes if code]
    said = [code for code in failed if code != PeersLost.code]
    return next(iter(said or failed), 0)
