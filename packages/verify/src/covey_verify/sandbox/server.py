"""The fork server: a small process that forks one confined child per check and kills it in time.

It is started as a program of its own (so no threads, no torch) and gets jobs over its control socket, each
with its descriptors. The checks themselves pass from the parent to the child directly: the server never sees
a program, an input or a verdict, and has nothing worth stealing. It ends when its parent does.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from covey_verify.children import die_with, kill_group
from covey_verify.sandbox import driver
from covey_verify.sandbox.confine import Confinement, Limits, adopt_orphans

# Bytes of a job on the wire, padded.
REQUEST_SIZE = 512
MAX_TIMEOUT = 1e6
"""Longest wait in seconds, since ``poll`` takes milliseconds in 31 bits."""
# Limits of a model's program, which is ended if it passes one.
MAX_THREADS = 64
MAX_FILES = 1_000
"""Most files in the program's folder."""
MAX_BYTES = 64 << 20
"""Most bytes of all files in the program's folder."""
MAX_WAIT = 120.0
"""Seconds for which other work on the machine may keep a child from a processor before it is given up."""
WATCH = 0.02
"""Seconds between two checks of the resources that no limit of the system counts (threads, files)."""
LAYERS = ("readable", "landlock", "syscalls", "exec_too", "confined", "listed", "roots", "scratch_root")
"""The server's options that its ``Confinement`` takes."""
ABOVE = 16
"""Lowest descriptor that cannot collide with a child's channels; within any limit of open files."""


@dataclass(frozen=True)
class Job:
    """A job of the driver with its limits; padded to a fixed size on the wire."""

    job: str
    limits: Limits
    has_stdin: bool = False
    folder: str = ""
    """The folder in which it works and may write; "" if it has none."""

    def pack(self) -> bytes:
        """Return the job as REQUEST_SIZE bytes."""
        data = json.dumps(asdict(self)).encode()
        assert len(data) <= REQUEST_SIZE
        return data.ljust(REQUEST_SIZE)

    @classmethod
    def unpack(cls, data: bytes) -> Job:
        """Return the job that ``pack`` has packed."""
        fields = json.loads(data)
        return cls(**{**fields, "limits": Limits(**fields["limits"])})


@dataclass
class RunningChild:
    """A child that runs a job."""

    pid: int
    status: socket.socket
    """The socket on which its end is reported; the other side closes it to have the child killed, and writes
    to it to be told how long the child was kept waiting."""
    started: float
    wall: float
    deadline: float
    folder: str = ""
    ending: str = ""
    """`timeout` if it was killed at the end of its seconds, `starved` if it did not get them."""
    kept_waiting: float = 0.0
    """Seconds, at the last look, in which it could have run but had no processor."""

    def tell(self, report: Mapping[str, object]) -> None:
        """Send a line to the other side, which may have gone."""
        with contextlib.suppress(OSError):
            self.status.sendall(json.dumps(report).encode() + b"\n")

    def look(self, clock: float) -> None:
        """See how long it was kept waiting, and end it if its own seconds are over."""
        self.kept_waiting = max(self.kept_waiting, seconds_kept_waiting(self.pid))
        self.deadline = self.started + self.wall + min(self.kept_waiting, MAX_WAIT)
        if clock >= self.deadline:
            self.ending = "starved" if self.kept_waiting > MAX_WAIT else "timeout"
            kill_group(self.pid)


class Server:
    """The loop that starts children, watches their deadlines and reports their ends."""

    def __init__(self, control: socket.socket, confinement: Confinement) -> None:
        self.control = control
        self.confinement = confinement
        self.pid = os.getpid()
        self.children: dict[int, RunningChild] = {}
        self.poll = select.poll()
        # SIGCHLD writes a byte into this pipe, so `poll` wakes up when a child ends.
        self.wake, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        os.set_blocking(self.wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        self.poll.register(control, select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)

    def run(self) -> None:
        """Serve until the parent has closed the control socket."""
        try:
            while True:
                for descriptor, _ in self.poll.poll(self._patience()):
                    if descriptor == self.control.fileno():
                        if not self._start():
                            return
                    elif descriptor == self.wake:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self.wake, 4096)
                    else:
                        children = self.children.values()
                        self._answer(next(c for c in children if c.status.fileno() == descriptor))
                self._reap()
                clock = time.monotonic()
                for pid, child in self.children.items():
                    # ``roots`` is set for a model's programs only.
                    if self.confinement.roots and self._greedy(pid, child):
                        kill_group(pid)
                    if clock >= child.deadline:
                        child.look(clock)
        finally:
            for pid in self.children:
                kill_group(pid)

    def _patience(self) -> float | None:
        """Return the milliseconds until the next deadline or check; None (no limit) without children."""
        if not self.children:
            return None
        seconds = min(c.deadline for c in self.children.values()) - time.monotonic()
        seconds = min(seconds, WATCH) if self.confinement.roots else seconds
        return 1000 * min(max(0.0, seconds), MAX_TIMEOUT) + 1

    def _start(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self.control, REQUEST_SIZE, 4, socket.MSG_WAITALL)
        # The parent has closed the socket: an incomplete job ends the server.
        if len(data) < REQUEST_SIZE:
            return False
        job = Job.unpack(data)
        status, *theirs = descriptors
        try:
            pid = os.fork()
        except OSError as error:
            with socket.socket(fileno=status) as reply:
                reply.sendall(json.dumps({"error": f"fork: {error}"}).encode() + b"\n")
            pid = -1
        if pid == 0:
            self._child(job, theirs)
        for descriptor in theirs:
            os.close(descriptor)
        if pid > 0:
            start = time.monotonic()
            wall = job.limits.wall
            self.children[pid] = RunningChild(
                pid, socket.socket(fileno=status), start, wall, start + wall, job.folder
            )
            self.poll.register(status, select.POLLIN)
        return True

    def _answer(self, child: RunningChild) -> None:
        """Tell the other side how long a child was kept waiting; kill it if that side has gone."""
        question = b""
        with contextlib.suppress(OSError):
            question = child.status.recv(1)
        if question:
            child.look(time.monotonic())
            child.tell({"kept_waiting": child.kept_waiting})
        else:
            kill_group(child.pid)

    def _child(self, job: Job, descriptors: list[int]) -> None:
        # The exit status of a child that fails, in its job or before. In every case os._exit keeps it from
        # returning into the server's loop.
        code = 120
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            die_with(self.pid)  # no other process would end it if the server were killed
            # All are moved out of the way first, since one may occupy the target (0, 3, 4) of another.
            high = [fcntl.fcntl(d, fcntl.F_DUPFD, ABOVE) for d in descriptors]
            if job.has_stdin:
                os.dup2(high.pop(0), 0)
            for target, descriptor in enumerate(high, start=driver.CHANNEL):
                os.dup2(descriptor, target)
            first = driver.CHANNEL + len(high)  # 0 its input, 1 and 2 /dev/null, then the channels
            ruleset = self.confinement.ruleset or 1024  # still needed to enter; all others are closed
            os.closerange(first, ruleset)
            os.closerange(ruleset + 1, 1024)
            self.confinement.enter(job.limits, job.folder)
            os.write(driver.CHANNEL, driver.READY)  # every failure from here on is the candidate's
            driver.JOBS[job.job]()
            code = 0
        finally:
            os._exit(code)

    def _greedy(self, pid: int, child: RunningChild) -> bool:
        """Return whether a child has more threads, or more in its folder, than a program needs."""
        with contextlib.suppress(OSError):
            if self.confinement.threads:
                # After the command's name, which may contain anything up to the last ")", field 17 is
                # num_threads.
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if int(fields[17]) > MAX_THREADS:
                    return True
            return bool(child.folder) and _overfull(child.folder)
        return False

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            child = self.children.pop(pid, None)
            if child is not None:  # until wait4 the system still knows for how long it waited
                child.look(0.0)
            _, status, usage = os.wait4(pid, 0)
            if child is None:  # it was started by a child that ended before it
                continue
            kill_group(pid)
            self._kill_orphans()
            self.poll.unregister(child.status)
            with child.status:
                child.tell(
                    {
                        "code": os.waitstatus_to_exitcode(status),
                        "ending": child.ending,
                        "cpu": usage.ru_utime + usage.ru_stime,
                        "seconds": time.monotonic() - child.started,
                        "kept_waiting": child.kept_waiting,
                    }
                )

    def _kill_orphans(self) -> None:
        """End processes that a child left behind in other sessions; their parent is now the server."""
        with contextlib.suppress(OSError):
            mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for pid in set(map(int, mine)) - set(self.children):
                kill_group(pid)


def seconds_kept_waiting(pid: int) -> float:
    """Return for how long a process's threads, and its descendants' threads, had no processor to run on.

    0 where the system does not tell (only Linux does).
    """
    seconds = 0.0
    with contextlib.suppress(OSError, ValueError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                # Nanoseconds on a processor, nanoseconds in its queue, number of slices.
                seconds += int((thread / "schedstat").read_text().split()[1]) / 1e9
                started = (thread / "children").read_text().split()
                seconds += sum(seconds_kept_waiting(int(child)) for child in started)
    return seconds


def _overfull(folder: str) -> bool:
    """Return whether a folder has too many files or bytes; the walk stops as soon as it does."""
    folders = [folder]
    files = 0
    size = 0
    while folders:
        with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                files += 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    size += entry.stat(follow_symlinks=False).st_size
                if files > MAX_FILES or size > MAX_BYTES:
                    return True
    return False


def serve(descriptor: int, options: Mapping[str, Any]) -> None:
    """Prepare the server by ``options``, report, and run it. Called by the client's START_CODE."""
    control = socket.socket(fileno=descriptor)
    # A parent that dies closes the socket: until ``run`` polls it, SIGIO ends even an import that hangs.
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        os.chdir(options["folder"])
        adopt_orphans()
        for module in options["preload"]:
            getattr(driver.load_module(module), "warm_up", lambda: None)()
        confinement = Confinement(**{name: options[name] for name in LAYERS})
        driver.PACKAGES = options["packages"]
        if options["importable"] is not None:  # what the user's file has imported so far stays
            sys.meta_path.insert(0, driver.Importable(options["importable"]))
        if confinement.ruleset is not None:
            confinement.ruleset = fcntl.fcntl(confinement.ruleset, fcntl.F_DUPFD, ABOVE)
        report: dict[str, object] = {"layers": confinement.layers}
    except BaseException as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    fcntl.fcntl(control, fcntl.F_SETFL, flags)
    control.sendall(json.dumps(report).encode() + b"\n")
    if "error" in report:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    sys.stdout = sys.stderr = open(1, "w", closefd=False)
    # Freeze what is loaded now: a collection in a child would write to, and so copy, the pages it shares.
    gc.collect()
    gc.freeze()
    Server(control, confinement).run()
