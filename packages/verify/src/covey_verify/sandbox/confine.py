"""The confinement of a child, entered before it touches anything untrusted.

It takes away files, network, processes and memory in layers, each of which a platform may lack: resource
limits (every Unix), Landlock (Linux 5.13 for files, 6.7 for TCP, 6.12 for signals) and a system call filter
(Linux on x86-64 and arm64).
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from covey_verify.children import limit, prctl
from covey_verify.sandbox import seccomp

# Options of prctl, from linux/prctl.h.
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_FILTER = 2
# The system calls of Landlock, from asm-generic/unistd.h.
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
# Landlock's access rights, which are bits, from linux/landlock.h.
CAPABILITY_VERSION = 0x20080522
EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_FOLDER = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_FOLDER = 1 << 7
MAKE_FILE = 1 << 8
TRUNCATE = 1 << 14


MAX_FILE_BYTES = 16 << 20
"""Largest size in bytes of a file that a child with a folder may write."""


@dataclass(frozen=True)
class Limits:
    """The resources that one check may use."""

    wall: float = 6.0
    """Seconds from its start, after which its process group is killed. The seconds in which other work kept
    it from a processor do not count, up to MAX_WAIT of the server."""
    cpu: int = 5
    """Seconds of processor time."""
    memory: int = 1 << 30
    """Bytes of address space."""
    output: int = 1 << 20
    """Number of bytes that it may send back."""


def package_folders() -> list[str]:
    """Return the folders of installed packages."""
    return [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]


def python_folders() -> list[str]:
    """Return the folders that a Python child has to read: its libraries and this package."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr"}
    folders = [f"{p}/{lib}" for p in sorted(prefixes) for lib in ("lib", "lib64")]
    folders += [
        *package_folders(),
        "/lib",
        "/lib64",
        "/usr/share/zoneinfo",
        str(Path(__file__).resolve().parents[1]),
    ]
    return [f for f in dict.fromkeys(folders) if Path(f).exists()]


class Confinement:
    """The layers of one fork server, prepared once and entered by each of its children."""

    def __init__(
        self,
        readable: Sequence[str],
        landlock: bool,
        syscalls: bool,
        exec_too: bool,
        confined: bool,
        listed: Sequence[str],
        roots: Sequence[str],
        scratch_root: str,
    ) -> None:
        """Prepare the layers.

        For a model's programs, ``listed`` are folders whose names may be read but not their content,
        ``roots`` are a few folders that contain all of ``readable``, and each program gets a folder of its
        own in ``scratch_root``.
        """
        self.exec_too = exec_too
        self.confined = confined
        self.readable = readable
        self.roots = roots
        self.scratch_root = scratch_root
        self.abi = landlock_abi() if landlock else 0
        # A descriptor that every child inherits; building it once saves many system calls per child.
        self.ruleset = _ruleset(self.abi, readable, exec_too, scratch_root, listed) if self.abi else None
        self.threads = bool(roots) and Path("/proc/self/stat").exists()
        """Whether children may start threads, which requires that the server can count them."""
        self.filter: bytes | None = None
        if syscalls and sys.platform == "linux":
            scratch = bool(scratch_root) and self.abi > 0
            self.filter = seccomp.build(allow_exec=exec_too, scratch=scratch, threads=self.threads)

    @property
    def layers(self) -> list[str]:
        """The layers in force, for the run's record."""
        layers = ["limits"] if self.confined else []
        if self.abi:
            layers.append(f"landlock {self.abi}")
        if self.filter is not None:
            layers.append("seccomp")
        return layers

    def enter(self, limits: Limits, folder: str = "") -> None:
        """Give up all rights in this process, irrevocably; ``folder`` stays writable.

        Raises OSError if a layer refuses.
        """
        if folder:
            os.chdir(folder)
        if not self.confined:  # trusted code
            if sys.platform == "linux":
                prctl(PR_SET_DUMPABLE, 1)  # so that debuggers and profilers can look at it
            return
        # With a filter and without a folder there is no file that a child could need to write.
        writes = 0 if self.filter is not None and not folder else MAX_FILE_BYTES
        limit(resource.RLIMIT_CORE, 0)
        limit(resource.RLIMIT_NOFILE, 64)
        limit(resource.RLIMIT_FSIZE, writes)
        limit(resource.RLIMIT_CPU, limits.cpu)
        limit(resource.RLIMIT_AS, limits.memory)
        if sys.platform != "linux":
            return
        prctl(PR_SET_DUMPABLE, 0)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if self.ruleset is not None:
            # Landlock layers add up: an access needs the permission of every one.
            layers = [self.ruleset] if self.scratch_root or not folder else []
            if folder:  # a second layer: of all folders in `scratch_root` it leaves only this one
                layers.append(_ruleset(self.abi, self.roots or self.readable, self.exec_too, folder))
            for ruleset in layers:
                _syscall(RESTRICT_SELF, ruleset, 0)
            for ruleset in {*layers, self.ruleset}:
                os.close(ruleset)
        if self.filter is not None:
            _drop_capabilities()
            program = ctypes.create_string_buffer(self.filter, len(self.filter))
            # struct sock_fprog: number of 8-byte instructions and the pointer to them.
            header = struct.pack("HP", len(self.filter) // 8, ctypes.addressof(program))
            prctl(PR_SET_SECCOMP, SECCOMP_FILTER, ctypes.create_string_buffer(header, len(header)))


def landlock_abi() -> int:
    """Return the kernel's Landlock version, 0 if it has none."""
    if sys.platform != "linux":
        return 0
    # Flag 1 asks for the version and makes no ruleset.
    return max(0, _libc().syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def adopt_orphans() -> None:
    """Become the parent of processes that this process's children leave behind, to be able to end them."""
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_DUMPABLE, 0)


def _ruleset(
    abi: int, readable: Sequence[str], exec_too: bool, writable: str = "", listed: Sequence[str] = ()
) -> int:
    """Make a Landlock ruleset that forbids everything it knows except reading ``readable``.

    It also permits writing in the folder ``writable``, reading names in ``listed``, and /dev/null.
    """
    files = {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)  # rights known to each version
    # struct landlock_ruleset_attr: handled rights of files, of TCP (bind, connect) and scopes (sockets,
    # signals). Older kernels know only its first field, or its first two.
    fields = 1 if abi < 4 else 2 if abi < 6 else 3
    attributes = struct.pack("QQQ", (1 << files) - 1, 3, 3)[: 8 * fields]
    ruleset = _syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    folder = READ_FILE | READ_DIR | (EXECUTE if exec_too else 0)
    rules = [(path, folder if Path(path).is_dir() else READ_FILE) for path in readable]
    rules += [(path, READ_DIR) for path in listed]
    if writable:
        change = WRITE_FILE | MAKE_FILE | REMOVE_FILE | MAKE_FOLDER | REMOVE_FOLDER
        change |= TRUNCATE if abi > 2 else 0
        rules.append((writable, READ_FILE | READ_DIR | change))
    for path, rights in (*rules, ("/dev/null", READ_FILE | WRITE_FILE), ("/dev/urandom", READ_FILE)):
        if Path(path).exists():
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            # Rule type 1: a path and everything beneath it.
            _syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, beneath), 0)
            os.close(beneath)
    return ruleset


def _drop_capabilities() -> None:
    # Zero for all three sets (effective, permitted, inheritable), two 32-bit words each.
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    none = bytes(24)
    if _libc().capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")


def _syscall(number: int, *arguments: object) -> int:
    result = int(_libc().syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number} failed")
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
