"""The client of the fork server: it starts children, talks to them and reports how they ended.

It is safe from any thread. The server is started as a program, never forked from here: forking a process in
which torch runs threads can deadlock. A forked or spawned worker that inherits this object starts a server of
its own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from covey_verify.children import Child, how_ended
from covey_verify.machine import available_cpus
from covey_verify.sandbox.base import Outcome, OutcomeKind
from covey_verify.sandbox.confine import Limits, package_folders, python_folders
from covey_verify.sandbox.driver import READY
from covey_verify.sandbox.server import MAX_TIMEOUT, MAX_WAIT, Job
from covey_verify.sandbox.wire import BadFrame, frame, read_frame

START_CODE = """
import json, sys
from importlib.util import module_from_spec, spec_from_file_location
options = json.loads(sys.argv[1])
home = options["package"]  # found without the folder around it
spec = spec_from_file_location("covey_verify", home + "/__init__.py", submodule_search_locations=[home])
package = sys.modules["covey_verify"] = module_from_spec(spec)
if options["packages"] is None:  # a model's programs may see the sandbox's own room and nothing else
    spec.loader.exec_module(package)
sys.path += options["path"]
from covey_verify.sandbox.server import serve
serve(int(sys.argv[2]), options)
"""
# The only environment variables of a confined child: no keys, one thread per library, fixed hashes.
CLEAN_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# Seconds for the server's report after its start, preloaded modules included.
START_SECONDS = 60.0
GRACE = 5.0
"""Seconds the server may take beyond a child's last deadline before it counts as lost."""
MIN_WAIT = 0.01
"""Seconds in a processor's queue below which a child that is late was not kept waiting."""


def trusted_environment() -> dict[str, str]:
    """Return the environment of a process that runs the user's own code: the environment of this process."""
    return {"PYTHONHASHSEED": "0", **os.environ}


class HasDescriptor(Protocol):
    """A socket or a file."""

    def fileno(self) -> int:
        """Return its descriptor."""
        ...


class ForkServer:
    """A fork server and the connection to it."""

    def __init__(
        self,
        *,
        preload: Sequence[str] = (),
        prefix: Sequence[str] = (),
        readable: Sequence[str] = (),
        landlock: bool = True,
        syscalls: bool = True,
        exec_too: bool = False,
        path: Sequence[str] = (),
        confined: bool = True,
        at_once: int | None = None,
        folder: str = "/",
        listed: Sequence[str] = (),
        roots: Sequence[str] = (),
        scratch_root: str = "",
        packages: Sequence[str] | None = None,
        importable: Sequence[str] | None = None,
    ) -> None:
        """Prepare a server, which starts at the first request.

        ``confined=False`` is for trusted code, which keeps this user's rights and environment. ``at_once``
        limits the children of ``call`` that run at the same time; None: a child for each CPU. ``folder`` is
        the working directory of all children. ``packages`` names the packages that a model's programs may
        import, ``importable`` the packages that a user's functions may import; with either setting children
        read only ``readable`` and not all that is installed. ``Confinement`` explains the other settings.
        """
        self.at_once = at_once or available_cpus()
        self.options = {
            "preload": list(preload),
            "readable": [*(python_folders() if packages is importable is None else []), *readable],
            "listed": list(listed),
            "roots": list(roots),
            "scratch_root": scratch_root,
            "packages": None if packages is None else list(packages),
            "importable": None if importable is None else list(importable),
            "landlock": landlock,
            "syscalls": syscalls,
            "exec_too": exec_too,
            "package": str(Path(__file__).resolve().parents[1]),
            "path": [*package_folders(), *path],
            "confined": confined,
            "folder": folder,
        }
        self.environment = CLEAN_ENVIRONMENT if confined else trusted_environment()
        # No user site, no script folder on the path, no `site`, no .pyc files.
        self.flags = ["-s", "-P", "-S", "-B"] if confined else ["-P"]
        self.prefix = list(prefix)
        self.layers: list[str] = []
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Reset to the state without a server: of a new object, and of a copy in a forked process."""
        self.slots = threading.BoundedSemaphore(self.at_once)
        self.lock = threading.Lock()
        self.process: Child | None = None
        self.control: socket.socket | None = None

    def start(self) -> str:
        """Start the server unless it runs. Return "", or the reason why it cannot start."""
        with self.lock:
            if self.process is not None and self.process.poll() is None:
                return ""
            self._stop()
            self.control, theirs = socket.socketpair()
            # Trusted code needs the virtual environment, which Python finds by the unresolved link.
            program = os.path.realpath(sys.executable) if self.options["confined"] else sys.executable
            python = [program, *self.flags, "-c", START_CODE]
            command = [*self.prefix, *python, json.dumps(self.options), str(theirs.fileno())]
            with theirs, tempfile.TemporaryFile() as complaints:
                self.process = Child(
                    command,
                    pass_fds=[theirs.fileno()],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=complaints,
                )
                theirs.close()
                report = json.loads(
                    _receive_until(self.control, b"\n", time.monotonic() + START_SECONDS) or b"{}"
                )
                if "layers" in report:
                    self.layers = report["layers"]
                    atexit.register(self.close)
                    return ""
                complaints.seek(0)
                words = report.get("error") or complaints.read()[-500:].decode(errors="replace").strip()
            self._stop()
            return f"the fork server cannot be started: {words or 'no answer'}"

    def close(self) -> None:
        """End the server and all its children."""
        with self.lock:
            self._stop()

    def _stop(self) -> None:
        if self.control is not None:
            # The closed socket tells the server to kill its children and exit.
            self.control.close()
        if self.process is not None:
            try:
                self.process.wait(timeout=GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = self.control = None
        atexit.unregister(self.close)

    @contextlib.contextmanager
    def child(
        self,
        job: str,
        limits: Limits,
        stdin: int | None = None,
        channel: socket.socket | None = None,
        peer: HasDescriptor | None = None,
        folder: str = "",
    ) -> Iterator[ChildProcess]:
        """Start a child on a job, and kill it with its whole group when the block is left.

        ``channel`` connects it to another process in place of this one, ``peer`` to another child or a file
        in addition. It works in ``folder``, if this is given, and may write there.
        """
        # Two connections: the server reports the child's end on `status`, the child itself talks on the
        # channel. Closing `status` makes the server kill the child.
        status, their_status = socket.socketpair()
        ours, theirs = socket.socketpair()
        with status, their_status, ours, theirs:
            # The order in which the server hands them on: status, standard input, channel, peer.
            descriptors = [their_status.fileno()]
            if stdin is not None:
                descriptors.append(stdin)
            descriptors.append((channel or theirs).fileno())
            if peer is not None:
                descriptors.append(peer.fileno())
            lost = self._ask(Job(job, limits, stdin is not None, folder).pack(), descriptors)
            their_status.close()
            theirs.close()
            yield ChildProcess(status, ours, limits, channel is None, lost)

    def _ask(self, request: bytes, descriptors: Sequence[int]) -> str:
        gone = ""
        for _ in range(2):
            if lost := self.start():
                return lost
            with self.lock:
                if self.control is None:
                    return "the fork server was closed"
                try:
                    socket.send_fds(self.control, [request], descriptors)
                except OSError as error:  # the server is dead, though its process may not have ended yet
                    gone = f"the fork server is gone: {error}"
                    self._stop()
                else:
                    return ""
        return gone

    def call(self, function: str, *args: object, limits: Limits, **settings: object) -> Outcome:
        """Run ``module:function`` in a child and return its value, any JSON.

        The outcome is ``error`` if it raised, and its text starts with the exception's name. After a crash
        the call is made once more: a second crash is taken to be the input's fault, not chance.
        """
        for _ in range(2):
            with self.slots, self.child("verify", limits) as child:
                outcome = child.ask({"function": function, "args": args, "settings": settings})
            if outcome.kind not in ("crashed", "lost"):
                break
        return outcome


class ChildProcess:
    """The parent's side of a running child."""

    def __init__(
        self, status: socket.socket, channel: socket.socket, limits: Limits, own_channel: bool, lost: str
    ) -> None:
        self.status = status
        self.channel = channel
        self.limits = limits
        self.started = time.monotonic()
        # GRACE longer than the child's own limit, which the server enforces: then the server itself is lost.
        self.deadline = self.patience = self.started + limits.wall + MAX_WAIT + GRACE
        self.report: dict[str, Any] = {}
        """The latest reports of the server about it."""
        self.granted = 0.0
        """Seconds by which replies may come later, because it had no processor."""
        self.partner: ChildProcess | None = None
        """A child that it waits for."""
        self.unconfined = own_channel
        """True until the child has reported on the channel that it is confined; False from the start if
        another process has the channel and hears the report."""
        self.ending = Outcome("lost", text=lost) if lost else None

    def send(self, message: object) -> None:
        """Send a frame. An error is ignored here: a child that does not read is ended by its deadline."""
        with contextlib.suppress(OSError):
            self.channel.settimeout(min(max(0.001, self.deadline - time.monotonic()), MAX_TIMEOUT))
            self.channel.sendall(frame(message))

    def receive(self, within: float = math.inf) -> Any:
        """Return the next frame, or None if none came in time; ``wait_for_end`` then gives the reason."""
        self.patience = min(self.deadline, time.monotonic() + within)
        try:
            self._wait_until_confined()
            return read_frame(self._receive, self.limits.output)
        except BadFrame as error:
            self.ending = self.ending or Outcome("flood", text=str(error))
        except TimeoutError:
            self.ending = self.ending or Outcome("timeout", text=f"no answer within {within:g} s")
        except (OSError, EOFError):
            pass
        return None

    def ask(self, message: object, within: float = math.inf, grace: float = math.inf) -> Outcome:
        """Send a message to trusted code. Return its reply, or how it ended within ``grace`` seconds."""
        self.send(message)
        reply = self.receive(within)
        if not isinstance(reply, dict):
            return self.without_reply(grace)
        if "value" in reply:
            return Outcome("ok", reply["value"])
        return Outcome("error", reply.get("trace"), f"{reply['error']}: {reply['text']}")

    def output(self) -> bytes:
        """Return everything that it writes until it ends, at most ``limits.output`` bytes."""
        output = b""
        with contextlib.suppress(OSError, EOFError):
            self._wait_until_confined()
            while part := self._receive(1 << 16):
                output += part
                if len(output) > self.limits.output:
                    self.ending = Outcome("flood", text=f"more than {self.limits.output} bytes of output")
                    break
        return output[: self.limits.output]

    def _wait_until_confined(self) -> None:
        if self.ending is not None:
            raise EOFError
        if self.unconfined:
            # The first byte on the channel, written by our code before any untrusted code runs.
            self.unconfined = self._receive(1) != READY

    def _receive(self, size: int) -> bytes:
        while True:
            self.channel.settimeout(min(max(0.001, self.patience - time.monotonic()), MAX_TIMEOUT))
            try:
                return self.channel.recv(size)
            except TimeoutError:
                extension = self.kept_waiting() - self.granted
                if extension < MIN_WAIT or time.monotonic() >= self.deadline:
                    raise
                self.granted += extension
                self.patience = min(self.deadline, self.patience + extension)

    def kept_waiting(self) -> float:
        """Return the seconds in which it, or its partner, had no processor."""
        with contextlib.suppress(OSError):
            self.status.sendall(b"?")
            self._hear(time.monotonic() + GRACE)
        return self.known_wait + (self.partner.kept_waiting() if self.partner is not None else 0.0)

    @property
    def known_wait(self) -> float:
        """The seconds in which it had no processor, by the server's latest report."""
        return float(self.report.get("kept_waiting", 0.0))

    def own_seconds(self) -> float:
        """Return the seconds since its start, without those in which it had no processor."""
        passed = time.monotonic() - self.started
        if passed > 10 * MIN_WAIT:  # in a shorter time it cannot have been kept waiting for long
            self.kept_waiting()
        return passed - self.known_wait

    def _hear(self, deadline: float) -> bool:
        """Read the server's reports, one a line in JSON. Return whether there was any."""
        lines = _receive_until(self.status, b"\n", deadline).splitlines()
        for line in lines:
            self.report |= json.loads(line)
        return bool(lines)

    def close(self) -> None:
        """Let the server kill it. Threads that wait for it, and the block of ``child``, see its end."""
        for connection in (self.status, self.channel):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def without_reply(self, within: float = math.inf) -> Outcome:
        """Wait for the end of a child that owes a reply, as ``wait_for_end``; exit code 0 is a crash too."""
        self.deadline = min(self.deadline, time.monotonic() + within)
        ended = self.wait_for_end()
        return Outcome("crashed", text=how_ended(0)) if ended.kind == "ok" else ended

    def wait_for_end(self) -> Outcome:
        """Wait for the end, at most until the deadline, and return how it ended."""
        if self.ending is not None:
            return self.ending
        with contextlib.suppress(OSError):
            # A child that waits for the next request sees the end of the channel and exits.
            self.channel.shutdown(socket.SHUT_RDWR)
        report = self.report
        while "code" not in report and self._hear(self.deadline):
            pass
        if "code" not in report or self.unconfined:
            gone = "the child could not be confined" if "code" in report else "the fork server is gone"
            return Outcome("lost", text=report.get("error", gone))
        kind, text = self._kind_of_end(**report)
        return Outcome(kind, text=text, seconds=report["seconds"] - report["kept_waiting"])

    def _kind_of_end(self, code: int, ending: str, cpu: float, **_: object) -> tuple[OutcomeKind, str]:
        limits = self.limits
        if ending == "starved":
            return "lost", f"the machine kept it waiting for more than {MAX_WAIT:g} s"
        if ending:
            return "timeout", f"no answer within {limits.wall:g} s"
        # The CPU limit may show as SIGXCPU, or as SIGKILL at the hard limit.
        if code == -signal.SIGXCPU or (code < 0 and cpu >= limits.cpu):
            return "timeout", f"more than {limits.cpu} s of processor time"
        return ("crashed", how_ended(code)) if code else ("ok", "")


def _receive_until(connection: socket.socket, end: bytes, deadline: float) -> bytes:
    """Return the bytes up to and including ``end``, or b"" if it does not arrive before the deadline."""
    data = b""
    try:
        while not data.endswith(end):
            connection.settimeout(min(max(0.001, deadline - time.monotonic()), MAX_TIMEOUT))
            part = connection.recv(4096)
            if not part:
                return b""
            data += part
    except OSError:
        return b""
    finally:
        connection.settimeout(None)
    return data


@cache
def verifier_server(*preload: str) -> ForkServer:
    """Return the server for trusted verifiers of untrusted text, shared within this process.

    It uses every layer that the platform offers, but requires none, since the code it runs is ours.
    """
    return ForkServer(preload=preload)
