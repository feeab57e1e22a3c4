"""Sandboxes of the operating system: a fork server whose children give up all their rights.

`landlock` confines each child by Landlock, a system call filter and resource limits. `bwrap` also starts the
server inside bubblewrap's namespaces: no network device, no foreign process, no files but Python's own.
`unsafe_local` only limits resources.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile, mkdtemp

from covey_verify import children
from covey_verify.errors import SandboxUnavailable
from covey_verify.sandbox.base import MIN_SECONDS, Arguments, Outcome, reply_result, too_long
from covey_verify.sandbox.client import ChildProcess, ForkServer
from covey_verify.sandbox.confine import Limits, python_folders
from covey_verify.sandbox.importable import PACKAGES, hidden_folders, libraries, package_paths, paths_except
from covey_verify.sandbox.server import MAX_WAIT
from covey_verify.sandbox.wire import encode_value

NOT_BLOCKED = "files, network, other processes, signals and the environment of this user"
VISIBLE = "whether a file exists, its size and its times (stat), of all files that this user can see"
"""Information that Landlock does not hide, since it guards only the content of files."""
PROGRAMS = ["/usr/bin", "/usr/libexec", "/usr/include"]
"""Folders that compilers need to read."""
PROCESSES = "/proc"
"""Needed by programs that look up their own path. Bubblewrap mounts its own; the host's is never readable."""


class ProcessSandbox:
    """A backend made of processes: `bwrap`, `landlock` or `unsafe_local`."""

    def __init__(self, name: str, packages: Sequence[str] = PACKAGES) -> None:
        """Start with ``packages``, which candidates may import besides the standard library."""
        self.name = name
        self.packages = tuple(packages)
        self.scratch_root = mkdtemp(prefix="covey-")
        """The folder in which each candidate has a folder of its own."""
        weakref.finalize(self, _remove_folder, self.scratch_root, os.getpid())
        self.server = self._start_candidates()
        # Servers by their preloaded modules, and (server, its workshop) by the readable folders.
        self._verifiers: dict[tuple[str, ...], ForkServer] = {}
        self._builders: dict[tuple[str, ...], tuple[ForkServer, str]] = {}
        self._building = threading.Lock()

    @property
    def _confines(self) -> bool:
        """Whether children give up their rights; `unsafe_local` only limits their resources."""
        return self.name != "unsafe_local"

    def _prefix(
        self,
        programs: Sequence[str],
        writable: str = "",
        candidates: tuple[list[Path], list[str]] | None = None,
    ) -> list[str]:
        """Return the beginning of a server's command: bubblewrap's, see ``_bwrap``, or nothing."""
        return _bwrap(programs, writable, candidates) if self.name == "bwrap" else []

    def verifiers(self, *preload: str) -> ForkServer:
        """Return a server as confined as the candidates', for verifiers that execute the text they judge."""
        if preload not in self._verifiers:
            self._verifiers[preload] = self._start(preload=preload)
        return self._verifiers[preload]

    def host(
        self,
        preload: Sequence[str],
        package: Path,
        code: Sequence[Path],
        path: Sequence[str],
        at_once: int | None = None,
    ) -> ForkServer:
        """Return a server for a user's functions: as confined, but it imports and reads their code.

        ``package``: the folder of our own modules among ``preload``. ``code``: folders of the user's code. A
        package is readable as a whole, of other folders only the Python files and packages. While the server
        imports, it reads all that is installed; a function then reads the standard library,
        ``self.packages`` and the user's code.
        """
        parts = (_code_in(folder) for folder in dict.fromkeys(code))
        theirs = [str(part) for folder in parts for part in folder]
        allowed = package_paths(self.packages)
        readable, listed = paths_except(libraries(), hidden_folders())
        return ForkServer(
            prefix=self._prefix([str(package), *theirs]),
            preload=preload,
            readable=[*readable, *allowed, *theirs],
            listed=listed,
            landlock=self._confines,
            syscalls=self._confines,
            path=path,
            at_once=at_once,
            importable=_modules([*allowed, *theirs]),
        )

    def _start(
        self,
        exec_too: bool = False,
        preload: Sequence[str] = (),
        programs: Sequence[str] = (),
        writable: str = "",
    ) -> ForkServer:
        visible = [*(PROGRAMS if exec_too else []), *programs]
        return ForkServer(
            prefix=self._prefix(visible, writable),
            preload=preload,
            readable=[folder for folder in visible if folder != PROCESSES],
            landlock=self._confines,
            syscalls=self._confines,
            exec_too=exec_too,
        )

    def _start_candidates(self) -> ForkServer:
        """Return the server whose children run a model's code; of all packages they see only ``packages``."""
        allowed = package_paths(self.packages)
        hidden = hidden_folders()
        readable, listed = paths_except(libraries(), hidden)
        return ForkServer(
            prefix=self._prefix([], self.scratch_root, (hidden, allowed)),
            readable=[*readable, *allowed],
            listed=listed,
            roots=[*libraries(), *allowed],
            scratch_root=self.scratch_root,
            packages=_modules(allowed),
            landlock=self._confines,
            syscalls=self._confines,
        )

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[str]:
        """Make a folder for one candidate; "" if nothing would keep other candidates out of it."""
        if self.name == "bwrap" and not any("landlock" in layer for layer in self.layers):
            yield ""
            return
        folder = mkdtemp(dir=self.scratch_root)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @cached_property
    def compilers(self) -> ForkServer:
        """The server whose children may start programs; it starts compilers only."""
        return self._start(exec_too=True)

    @property
    def layers(self) -> list[str]:
        """The layers in force, known once the server runs."""
        return [*(["namespaces"] if self.server.prefix else []), *self.server.layers]

    def script(self, code: str, stdin: str, limits: Limits) -> Outcome:
        """Run a program; ``ok`` with its output if it ended with status 0."""
        if lost := self.server.start():
            return Outcome("lost", text=lost)
        with self._scratch() as folder:
            return _with_input(self.server, "script", {"code": code}, stdin, limits, folder)

    def compile(self, argv: Sequence[str], text: str, limits: Limits) -> Outcome:
        """Run a compiler with ``text`` as standard input; ``ok`` with its messages if it accepts the text."""
        return _with_input(self.compilers, "command", {"argv": list(argv)}, text, limits)

    def build(
        self,
        argv: Sequence[str],
        files: Mapping[str, bytes],
        limits: Limits,
        product: str = "",
        readable: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> tuple[Outcome, bytes]:
        """Run a trusted program on untrusted files, in a temporary folder of its own.

        ``readable`` are the paths that it has to read besides the usual programs. Return how it ended, with
        its messages, and the content of the file ``product``, empty if it was not made.
        """
        # Several threads may ask for the first server of the same folders.
        with self._building:
            if readable not in self._builders:
                workshop = mkdtemp(prefix="covey-")
                builder = self._start(exec_too=True, programs=readable, writable=workshop)
                weakref.finalize(builder, shutil.rmtree, workshop, ignore_errors=True)
                self._builders[readable] = (builder, workshop)
        server, workshop = self._builders[readable]
        if lost := server.start():
            return Outcome("lost", text=lost), b""
        if self.name == "bwrap" and not any("landlock" in layer for layer in server.layers):
            raise SandboxUnavailable("programs that write files run side by side only under Landlock (5.13)")
        with TemporaryDirectory(dir=workshop) as folder:
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            setup = {"argv": list(argv), "environment": environment or {}}
            with server.slots, server.child("command", limits, folder=folder) as child:
                child.send(setup)
                output = child.output().decode("utf-8", "surrogateescape")
                ended = child.wait_for_end()._replace(value=output)
            file = Path(folder, product)
            if ended.kind == "ok" and product and not file.is_file():
                ended = Outcome("crashed", output, f"it made no {product}")
            return ended, file.read_bytes() if file.is_file() else b""

    def calls(
        self, code: str, entry: str, inputs: Sequence[Arguments], limits: Limits, call_seconds: float
    ) -> Iterator[Outcome]:
        """Call ``entry`` with each input; after a hang or a crash the next input gets a new process.

        All processes together have ``limits.wall`` seconds; waiting for a slot does not count.
        """
        remaining = list(inputs)
        seconds = limits.wall
        if lost := self.server.start():
            yield from [Outcome("lost", text=lost)] * len(remaining)
            return
        while remaining:
            if seconds < MIN_SECONDS:
                yield from [too_long()] * len(remaining)
                return
            whole = replace(limits, wall=seconds)
            with (
                self._scratch() as folder,
                self.server.slots,
                self.server.child("calls", whole, folder=folder) as child,
            ):
                child.send({"code": code, "entry": entry})
                result = _reply(child, call_seconds)
                spent = 0.0
                if result.kind != "ok":
                    # The code itself cannot be loaded, so no input can be tried.
                    yield from [result] * len(remaining)
                    return
                # An exception of the function leaves its process usable; any other end needs a new one.
                while remaining and result.kind in ("ok", "error"):
                    args, settings = remaining.pop(0)
                    child.send(
                        {"id": 0, "args": encode_value(tuple(args)), "settings": encode_value(settings)}
                    )
                    result = _reply(child, call_seconds)
                    before = spent
                    spent = child.own_seconds()
                    yield result._replace(seconds=spent - before)
            seconds -= spent

    def check(self, code: str, entry: str, setup: str, test: str, limits: Limits) -> Outcome:
        """Run test code in one child against a candidate in another child.

        ``ok`` with the number of calls it made if the test passes.
        """
        if lost := self.server.start():
            return Outcome("lost", text=lost)
        ours, theirs = socket.socketpair()
        # Each waits for the other, so only the time of both together can be too long.
        late = replace(limits, wall=limits.wall + MAX_WAIT)
        with (
            ours,
            theirs,
            self._scratch() as folder,
            self.server.slots,
            # The two children talk to each other over ours/theirs; this process only hears the checker.
            self.server.child("calls", late, channel=ours, folder=folder) as candidate,
            self.verifiers().child("check", late, peer=theirs) as checker,
        ):
            ours.close()
            theirs.close()
            checker.send({"code": code, "entry": entry, "setup": setup, "test": test})
            checker.partner = candidate
            reply = checker.receive(limits.wall)
            if not isinstance(reply, dict):
                return checker.wait_for_end()
            if "lost" in reply:
                return Outcome("lost", text=reply["lost"])
            if reply["passed"]:
                return Outcome("ok", reply["calls"])
            error = f"{reply['error']}: {reply['text'][:200]}"
            # The checker only sees the connection close; the candidate's own end tells why.
            ended = candidate.wait_for_end() if reply["error"] == "CandidateGone" else Outcome("error")
            return Outcome("crashed" if ended.kind == "ok" else ended.kind, text=ended.text or error)


def _reply(child: ChildProcess, call_seconds: float) -> Outcome:
    reply = child.receive(call_seconds)
    if reply is None:
        return child.without_reply()
    return Outcome("ok") if isinstance(reply, dict) and "ready" in reply else reply_result(reply)


def _remove_folder(folder: str, pid: int) -> None:
    """Remove a folder, but only in the process that made it and not in its forks."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _has_proc(bubblewrap: str) -> bool:
    """Return whether bubblewrap may mount a /proc of its own, where a server sees threads and waits."""
    tried = [bubblewrap, "--unshare-all", "--ro-bind", "/", "/", "--proc", PROCESSES, "/bin/true"]
    return children.run(tried, 60.0).returncode == 0


def _with_input(
    server: ForkServer, job: str, setup: object, stdin: str, limits: Limits, folder: str = ""
) -> Outcome:
    linux = sys.platform == "linux"
    # A file and not a pipe: a pipe would block on large inputs that the program does not read.
    with os.fdopen(os.memfd_create("input"), "w+b") if linux else TemporaryFile() as file:
        file.write(stdin.encode("utf-8", "surrogateescape"))
        file.seek(0)
        with server.slots, server.child(job, limits, stdin=file.fileno(), folder=folder) as child:
            child.send(setup)
            output = child.output().decode("utf-8", "surrogateescape")
            return child.wait_for_end()._replace(value=output)


def _modules(paths: Sequence[str]) -> list[str]:
    """Return names as imported: `numpy` for a folder, `six` for six.py, `_x` for _x.cpython-312.so."""
    return sorted({Path(path).name.removesuffix(".py").partition(".")[0] for path in paths})


def _code_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a package, otherwise its Python files and packages."""
    if (folder / "__init__.py").exists():
        return [folder]
    return [*folder.glob("*.py"), *(file.parent for file in folder.glob("*/__init__.py"))]


def _mounts_over(hidden: Sequence[Path], allowed: Sequence[str], visible: Sequence[str]) -> list[str]:
    """Return the mounts that cover hidden folders within visible folders, except for the allowed paths."""
    # The order matters, because later mounts cover earlier mounts: empty folders over hidden folders, then
    # the allowed packages within them, then no more writing.
    roots = [Path(folder).resolve() for folder in visible]
    covered = [str(folder) for folder in hidden if any(map(folder.is_relative_to, roots))]
    ours = (str(Path(__file__).resolve().parent), str(Path(children.__file__).resolve()))
    mounts = [part for folder in covered for part in ("--tmpfs", folder)]
    for path in (*allowed, *ours):  # the server's own files last
        mounts += ["--ro-bind", path, path]
    for folder in covered:
        mounts += ["--remount-ro", folder]
    return mounts


def _bwrap(
    programs: Sequence[str], writable: str = "", candidates: tuple[list[Path], list[str]] | None = None
) -> list[str]:
    """Return the command that starts bubblewrap with nothing visible but Python and the paths asked for.

    ``candidates``: the folders that candidates must not see, and the paths in them that they may see.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailable("bubblewrap is not installed (the program is called bwrap)")
    command = [program, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    command += ["--cap-drop", "ALL", "--new-session", "--chdir", "/"]
    # The server looks at its children there; Landlock keeps them from it.
    if PROCESSES in programs or _has_proc(program):
        command += ["--proc", PROCESSES]
    files = [path for path in programs if path != PROCESSES]
    visible = python_folders() if candidates is None else libraries()
    for path in map(Path, (os.path.realpath(sys.executable), *visible, *files)):
        real = str(path.resolve())
        command += ["--ro-bind", real, real]
        # Merged systems have /lib as a link to /usr/lib; it has to exist inside as well.
        command += ["--symlink", str(path.readlink()), str(path)] if path.is_symlink() else []
    if candidates is not None:
        command += _mounts_over(*candidates, visible)
    for device in ("/dev/null", "/dev/urandom"):
        command += ["--dev-bind", device, device]
    for number, standard in enumerate(("stdin", "stdout", "stderr")):
        command += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{standard}"]
    return [*command, "--bind", writable, writable] if writable else command
