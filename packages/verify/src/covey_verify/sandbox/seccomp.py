"""The system calls that a sandboxed process may make, as a classic BPF program written by hand.

It is an allow-list: calls that are not named here fail with EPERM. No library is needed, so the filter
also works inside other sandboxes. Numbers are the kernel's (asm/unistd_64.h for x86-64,
asm-generic/unistd.h for arm64); the tests compare them with the headers where these are installed.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable
from typing import NamedTuple

# name x86-64 arm64, "-" where the architecture has no such call
ALLOWED = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; close 3 57; close_range 436 436;
lseek 8 62; dup 32 23; dup2 33 -; dup3 292 24; pipe 22 -; pipe2 293 59; open 2 -; openat 257 56;
stat 4 -; fstat 5 80; lstat 6 -; newfstatat 262 79; statx 332 291; access 21 -; faccessat 269 48;
faccessat2 439 439; readlink 89 -; readlinkat 267 78; getdents64 217 61; getcwd 79 17; fadvise64 221 223;
poll 7 -; ppoll 271 73; select 23 -; pselect6 270 72; epoll_create1 291 20; epoll_ctl 233 21;
epoll_wait 232 -; epoll_pwait 281 22; eventfd2 290 19; recvfrom 45 207; shutdown 48 210;
getsockname 51 204; getsockopt 55 209; mmap 9 222; mprotect 10 226; munmap 11 215; brk 12 214;
mremap 25 216; madvise 28 233; futex 202 98; membarrier 324 283; rseq 334 293; set_robust_list 273 99;
arch_prctl 158 -; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139; sigaltstack 131 132;
alarm 37 -; setitimer 38 103; getitimer 36 102; restart_syscall 219 128; nanosleep 35 101;
clock_nanosleep 230 115; clock_gettime 228 113; clock_getres 229 114; gettimeofday 96 169; time 201 -;
times 100 153; sched_yield 24 124; sched_getaffinity 204 123; getrandom 318 278; uname 63 160;
getpid 39 172; gettid 186 178; getppid 110 173; getuid 102 174; geteuid 107 175; getgid 104 176;
getegid 108 177; getgroups 115 158; getrlimit 97 163; getrusage 98 165; exit 60 93; exit_group 231 94
"""
# Allowed only with certain arguments, see ARGUMENTS: name -> (index of the argument, its allowed values).
CHECKED = """
ioctl 16 29; fcntl 72 25; prlimit64 302 261; socketpair 53 199; sendto 44 206
"""
F_DUPFD_CLOEXEC = 1030
ARGUMENTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "ioctl": (
        1,
        (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451),
    ),  # TCGETS WINSZ FIONREAD FIONBIO FIO(N)CLEX
    "fcntl": (1, (0, 1, 2, 3, 4, F_DUPFD_CLOEXEC)),  # duplicate and flags; F_SETOWN would signal others
    "prlimit64": (0, (0,)),  # its own limits
    "socketpair": (0, (1,)),  # AF_UNIX
    "sendto": (4, (0,)),  # without an address
    "clone": (0, (0x3D0F00, 0x7D0F00)),  # a thread as glibc and musl make one, never a process
}
EXEC = """
execve 59 221; execveat 322 281; vfork 58 -; clone 56 220; wait4 61 260; chdir 80 49; rename 82 -;
renameat 264 38; renameat2 316 276
"""
SCRATCH = """
unlink 87 -; unlinkat 263 35; mkdir 83 -; mkdirat 258 34; rmdir 84 -; rename 82 -; renameat 264 38;
renameat2 316 276; ftruncate 77 46; fsync 74 82; fdatasync 75 83; chdir 80 49
"""
"""Calls for a child with a folder of its own, allowed only if Landlock restricts them to that folder."""
THREAD = "clone 56 220"
# Its flags are in memory, where a filter cannot read them.
CLONE3 = 435


class Arch(NamedTuple):
    """The properties of a processor that the filter depends on."""

    audit: int
    """The kernel's AUDIT_ARCH_ constant."""
    column: int
    """Index of its column in the tables."""


ARCHES = {
    "x86_64": Arch(0xC000003E, 0),
    "amd64": Arch(0xC000003E, 0),
    "aarch64": Arch(0xC00000B7, 1),
    "arm64": Arch(0xC00000B7, 1),
}
# Return values of a filter.
KILL = 0x80000000
ALLOW = 0x7FFF0000
ERRNO = 0x00050000
# Opcodes of classic BPF.
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
AND = 0x54
RETURN = 0x06
X32_BIT = 0x40000000
"""The bit that marks x32 calls."""


def numbers(table: str, arch: Arch) -> dict[str, int]:
    """Return name -> number of a table for a processor.

    >>> numbers("read 0 63; open 2 -", ARCHES["aarch64"])
    {'read': 63}
    """
    rows = (row.split() for row in table.split(";"))
    return {name: int(row[arch.column]) for name, *row in rows if row[arch.column] != "-"}


def build(
    machine: str | None = None, *, allow_exec: bool = False, scratch: bool = False, threads: bool = False
) -> bytes | None:
    """Return the filter for a processor, ready for prctl; None if the processor is not known.

    ``allow_exec`` lets the process become or start other programs (compilers), which keep the filter.
    ``scratch`` lets it make and remove files, ``threads`` lets it start threads.
    """
    arch = ARCHES.get((machine or platform.machine()).lower())
    if arch is None:
        return None
    # An instruction is (opcode, jump if true, jump if false, operand); jumps skip that many instructions.
    # Offsets into struct seccomp_data: 0 the call number, 4 the architecture, 16 + 8 i argument i. A process
    # of another architecture is killed, because its numbers mean other calls.
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, arch.audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if arch.column == 0:  # x32 calls have other numbers
        code += [(AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, KILL)]
    additions = (";" + EXEC if allow_exec else "") + (";" + SCRATCH if scratch else "")
    allowed = numbers(ALLOWED + additions, arch)
    for number in allowed.values():
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    code += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]  # libc then tries clone
    for name, number in numbers(CHECKED + (";" + THREAD if threads else ""), arch).items():
        block = list(_check_argument(name))
        code += [(EQUAL, 0, len(block), number), *block]
    code.append((RETURN, 0, 0, ERRNO | errno.EPERM))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _check_argument(name: str) -> Iterable[tuple[int, int, int, int]]:
    """Yield instructions that allow the call if its argument is in the list, and else return EPERM.

    They always return, since loading the argument has replaced the call number.
    """
    index, values = ARGUMENTS[name]
    # The lower half of the 64-bit argument, little-endian.
    low = 16 + 8 * index
    denied = (RETURN, 0, 0, ERRNO | errno.EPERM)
    if name == "sendto":  # a pointer: both halves have to be zero
        yield from ((LOAD, 0, 0, low + 4), (EQUAL, 1, 0, 0), denied)
    if name == "socketpair":  # a stream: datagram sockets could be sent anywhere
        yield from ((LOAD, 0, 0, 24), (AND, 0, 0, 0xF), (EQUAL, 1, 0, 1), denied)
    yield (LOAD, 0, 0, low)
    for value in values:
        yield from ((EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))
    yield denied
