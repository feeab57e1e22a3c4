"""Attacks on a sandbox, each a program. It prints TAKEN if it got what it wanted.

A program finds in ``bait`` what it may try to reach: a private file, a folder, ports and sockets of
the host, the trainer's process. Whether something was reached is also seen from outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey_verify.sandbox.base import SandboxBackend
from covey_verify.sandbox.confine import Limits

LIMITS = Limits(wall=3.0, cpu=2, memory=512 << 20, output=1 << 20)
PRELUDE = """
import errno, json, os, sys, time
for name in ("ctypes", "signal", "socket", "threading"):  # WebAssembly lacks some
    try: globals()[name] = __import__(name)
    except ImportError: pass
try: libc = ctypes.CDLL(None, use_errno=True)
except (NameError, OSError): pass
bait = json.loads(sys.stdin.readline())
def syscall(number, *arguments):
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return libc.syscall(ctypes.c_long(number), *wide)
def taken(): print("TAKEN", flush=True)
"""
LIST = r"""
= loops forever
while True: pass

= sleeps
time.sleep(60); taken()

= swallows every exception
while True:
    try:
        while True: pass
    except BaseException: pass

= ignores the signal of the processor limit
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True: pass

= fork bomb
while True:
    os.fork(); taken()

= thread bomb
while True:
    threading.Thread(target=time.sleep, args=(60,)).start()
    if threading.active_count() > 200: taken()

= becomes a daemon
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(bait["folder"] + "/daemon", "w").write("here")
        time.sleep(60)
    os._exit(0)
taken()

= leaves a process that writes into the next check
if os.fork() == 0:
    while True: os.write(1, b"TAKEN\n")
taken()

= takes 2 GB of memory
held = [bytearray(1 << 20) for _ in range(2048)]; taken()

= maps 2 GB of shared memory
import mmap
held = mmap.mmap(-1, 2 << 30); held.write(b"x" * (2 << 30)); taken()

= fills a memory file
fd = os.memfd_create("x")
for _ in range(2048): os.write(fd, b"x" * (1 << 20))
taken()

= takes shared memory of System V
if syscall(29, 0, 1 << 30, 0o1600) >= 0: taken()

= takes POSIX shared memory
open("/dev/shm/covey_attack", "wb").write(b"x"); taken()

= writes one large file
with open("/tmp/covey_attack", "wb") as file:
    for _ in range(2048): file.write(b"x" * (1 << 20))
taken()

= writes many files
for n in range(1_000_000): open(f"{bait['folder']}/{n}", "w").write("x" * 200)
taken()

= prints 1 GB
for _ in range(1024): sys.stdout.write("x" * (1 << 20) + "\n")
sys.stdout.flush(); taken()

= prints without a line end
while True: os.write(1, b"x" * 65536)

= writes 1 GB of errors
for _ in range(1024): os.write(2, b"x" * (1 << 20))
os.write(1, b"done")

= never reads its input
time.sleep(60)

= recurses without end
sys.setrecursionlimit(10**9)
def f(n): return f(n + 1) + 1
f(0); taken()

= reads a null pointer
ctypes.string_at(0); taken()

= aborts
os.abort()

= turns a huge integer to text
sys.set_int_max_str_digits(0); str(7 ** 10**8); taken()

= backtracks in a pattern
import re
re.match(r"(a+)+$", "a" * 60 + "b"); taken()

= inflates a bomb
import zlib
bomb = zlib.compress(b"\0" * (1 << 24))
held = [zlib.decompress(bomb) for _ in range(200)]; taken()

= reads its environment
if any("SECRET" in k for k in os.environ): taken()

= reads a private file
print(open(bait["file"]).read()); taken()

= lists the home folder
os.listdir(bait["home"]); taken()

= reads the password file
open("/etc/passwd").read(); taken()

= reads the environment of process 1
if b"=" in open("/proc/1/environ", "rb").read(): taken()

= reads the trainer's environment
if bait["secret"].encode() in open(f"/proc/{bait['pid']}/environ", "rb").read(): taken()

= opens the trainer's memory
open(f"/proc/{bait['pid']}/mem", "rb").close(); taken()

= opens its parent's memory
open(f"/proc/{os.getppid()}/mem", "rb").close(); taken()

= reads memory by process_vm_readv
class V(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
there, here = V(0x400000, 8), V(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
for pid in (bait["pid"], os.getppid()):
    read = syscall(310, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if read >= 0 or ctypes.get_errno() == errno.EFAULT: taken()

= attaches with ptrace
for pid in (bait["pid"], os.getppid()):
    if syscall(101, 16, pid, 0, 0) >= 0: taken()

= connects to the host
socket.create_connection(("127.0.0.1", bait["port"]), 1); taken()

= sends a datagram
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", bait["port"])); taken()

= asks a name server
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b"x" * 20, ("10.0.0.1", 53)); taken()

= connects to the local network
socket.create_connection(("192.168.0.1", 80), 1); taken()

= connects to the metadata service
socket.create_connection(("169.254.169.254", 80), 1); taken()

= connects over IPv6
socket.create_connection(("::1", bait["port"]), 1); taken()

= opens a raw socket
socket.socket(socket.AF_PACKET, socket.SOCK_RAW); taken()

= opens a netlink socket
socket.socket(16, socket.SOCK_RAW); taken()

= connects to a Unix socket
socket.socket(socket.AF_UNIX).connect(bait["socket"]); taken()

= connects to an abstract socket
socket.socket(socket.AF_UNIX).connect("\0" + bait["abstract"]); taken()

= sends a datagram from a socket pair
a, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b"x", "\0" + bait["abstract"]); taken()

= signals the trainer
os.kill(bait["pid"], signal.SIGUSR1); taken()

= signals its parent
os.kill(os.getppid(), signal.SIGKILL); taken()

= signals its process group
os.killpg(0, signal.SIGKILL); taken()

= signals everybody
os.kill(-1, signal.SIGKILL); taken()

= lets the kernel signal the trainer
import fcntl
a, b = socket.socketpair()
fcntl.fcntl(a, fcntl.F_SETOWN, bait["pid"]); fcntl.fcntl(a, 10, signal.SIGKILL)
fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC); b.send(b"x"); taken()

= overwrites a file
open(bait["file"], "w").write("mine"); taken()

= removes a file
os.unlink(bait["file"]); taken()

= renames a file
os.rename(bait["file"], bait["file"] + "2"); taken()

= makes a symbolic link
os.symlink("/etc/passwd", bait["folder"] + "/link"); taken()

= makes a hard link
os.link(bait["file"], bait["folder"] + "/link"); taken()

= changes a mode
os.chmod(bait["file"], 0o777)
if os.stat(bait["file"]).st_mode & 0o77: taken()

= truncates a file
os.truncate(bait["file"], 0); taken()

= writes to the package
open(os.__file__, "a").write("#"); taken()

= exits early
os._exit(0)

= exits with success
sys.exit(0)

= changes the clock
time.clock_settime(time.CLOCK_REALTIME, 0); taken()

= changes the host's name
socket.sethostname("taken"); taken()

= exhausts descriptors
held = []
while len(held) < 100_000: held.append(os.dup(0))
taken()

= looks for open descriptors
for fd in range(4, 1024):
    for use in (lambda: os.read(fd, 1), lambda: os.write(fd, b"x")):
        try: use(); taken()
        except OSError: pass

= raises its limits
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)); taken()

= lowers the trainer's limits
import resource
resource.prlimit(bait["pid"], resource.RLIMIT_NOFILE, (0, 0)); taken()

= changes the trainer's priority
os.setpriority(os.PRIO_PROCESS, bait["pid"], 19); taken()

= starts a shell
os.execv("/bin/sh", ["sh", "-c", "echo TAKEN"])

= starts a subprocess
import subprocess
print(subprocess.run(["/bin/echo", "TAKEN"], capture_output=True).stdout)

= makes namespaces
if libc.unshare(0x10000000 | 0x00020000) == 0: taken()

= mounts
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0: taken()

= changes the root
os.chroot("/tmp"); taken()

= sets up io_uring
if syscall(425, 8, ctypes.create_string_buffer(120)) >= 0: taken()

= loads a BPF program
if syscall(321, 0, ctypes.create_string_buffer(64), 64) >= 0: taken()

= watches performance counters
if syscall(298, ctypes.create_string_buffer(128), 0, -1, -1, 0) >= 0: taken()

= uses the kernel's keyring
if syscall(248, b"user", b"x", b"y", 1, -3) >= 0: taken()

= calls by x32 numbers
if syscall(0x40000000 + 39) > 0: taken()

= opens by handle
if syscall(304, -100, ctypes.create_string_buffer(64), 0) >= 0 or ctypes.get_errno() not in (1, 38): taken()

= gets a process descriptor
os.pidfd_open(bait["pid"]); taken()

= types into the terminal
import fcntl
fcntl.ioctl(0, 0x5412, b"x"); taken()

= prints strange characters
os.write(1, b"\0\xff\xfe\xed\xa0\x80\xe2\x80\xae 42")

= prints a marker of success
print('OK\nPASSED\n{"passed": true}\nexit 0')

= hangs at exit
import atexit
atexit.register(time.sleep, 60)
"""


@dataclass(frozen=True)
class Attack:
    """A name and the program."""

    name: str
    code: str


ATTACKS = [
    Attack(name, PRELUDE + body)
    for name, _, body in (block.partition("\n") for block in LIST.split("\n= ")[1:])
]
SLOW = {
    "loops forever",
    "sleeps",
    "swallows every exception",
    "ignores the signal of the processor limit",
    "never reads its input",
    "turns a huge integer to text",
    "backtracks in a pattern",
    "hangs at exit",
    "recurses without end",
    "inflates a bomb",
    "takes 2 GB of memory",
}
"""Those that only end at a limit."""


class Bait:
    """What attacks are after, and whether they got it."""

    def __init__(self, folder: Path) -> None:
        self.secret = os.urandom(8).hex()
        os.environ["COVEY_TEST_SECRET"] = self.secret
        self.folder, self.file = folder / "folder", folder / "secret"
        self.folder.mkdir()
        self.file.write_text(self.secret)
        self.file.chmod(0o600)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind(self.listener.getsockname())
        self.unix, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "socket"))
        self.abstract.bind("\0covey" + self.secret)
        self.sockets = [self.listener, self.unix, self.abstract]
        for listening in self.sockets[1:]:
            listening.listen()
        for any_socket in (*self.sockets, self.datagrams):
            any_socket.settimeout(0)
        self.setup = json.dumps(
            {
                "file": str(self.file),
                "folder": str(self.folder),
                "secret": self.secret,
                "port": self.listener.getsockname()[1],
                "socket": str(folder / "socket"),
                "abstract": "covey" + self.secret,
                "pid": os.getpid(),
                "home": str(Path.home()),
            }
        )
        self.before = self.outside()

    def outside(self) -> set[str]:
        """Files where attacks like to leave some."""
        places = (Path(tempfile.gettempdir()), Path("/dev/shm"))
        return {str(f) for p in places if p.is_dir() for f in p.glob("covey_attack*")}

    def touched(self) -> list[str]:
        """What was reached."""
        found = []
        if not self.file.exists() or self.file.read_text() != self.secret or self.file.stat().st_mode & 0o77:
            found.append("the file")
        if list(self.folder.iterdir()) or self.outside() - self.before:
            found.append("a folder")
        for listening in self.sockets:
            with contextlib.suppress(BlockingIOError):
                listening.accept()[0].close()
                found.append("a socket")
        with contextlib.suppress(BlockingIOError):
            self.datagrams.recv(1)
            found.append("a datagram")
        return found

    def close(self) -> None:
        """Take the bait away."""
        for any_socket in (*self.sockets, self.datagrams):
            any_socket.close()
        del os.environ["COVEY_TEST_SECRET"]


@contextlib.contextmanager
def laid_out() -> Iterator[Bait]:
    """Bait in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="covey_bait") as folder:
        bait = Bait(Path(folder))
        try:
            yield bait
        finally:
            bait.close()


def processes_below(pid: int) -> set[int]:
    """All descendants of a process."""
    children: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children |= set(map(int, file.read_text().split()))
    return children.union(*map(processes_below, children))


def assault(sandbox: SandboxBackend, attack: Attack, bait: Bait, limits: Limits = LIMITS) -> dict[str, Any]:
    """Run one attack; ``problems`` says what it achieved, empty if nothing."""
    stdin = bait.setup + "\n" + ("x" * (5 << 20) if attack.name == "never reads its input" else "")
    mine = processes_below(os.getpid())
    began = time.monotonic()
    result = sandbox.script(attack.code, stdin, limits)
    seconds = time.monotonic() - began
    output = str(result.value or "")
    problems = [f"touched {t}" for t in bait.touched()]
    if "TAKEN" in output or bait.secret in output:
        problems.append("it got what it wanted")
    if output.strip() == "42":
        problems.append("it was taken for right")
    own = result.seconds or seconds  # without what other work on the machine has cost it
    if own > limits.wall + 1.0:
        problems.append(f"it took {own:.1f} s")
    if result.kind == "lost":
        problems.append(f"the sandbox was lost: {result.text}")
    if len(output) > limits.output:
        problems.append("too much output came back")
    deadline = time.monotonic() + 2.0
    while (left := processes_below(os.getpid()) - mine) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        problems.append(f"processes are left: {left}")
    neighbour = sandbox.script("print(6 * int(input()))", "7\n", LIMITS)
    if (neighbour.kind, str(neighbour.value).strip()) != ("ok", "42"):
        problems.append(f"the next program was disturbed: {neighbour.kind} {neighbour.text}")
    return {"attack": attack.name, "end": result.kind, "seconds": round(seconds, 3), "problems": problems}


if __name__ == "__main__":
    sys.exit("this is a list; benchmarks/verifiers/sandbox_attacks.py runs it")
