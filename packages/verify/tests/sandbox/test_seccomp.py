"""The filter's numbers are the kernel's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from covey_verify.sandbox.seccomp import ALLOWED, ARCHES, CHECKED, EXEC, build, numbers

HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_call_numbers_are_the_kernels(machine: str) -> None:
    header = next((Path(p) for p in HEADERS[machine] if Path(p).exists()), None)
    if header is None:
        pytest.skip("the kernel's headers are not installed")
    text = header.read_text()
    known = {n: int(v) for n, v in re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", text)}
    known |= {"newfstatat": known.get("newfstatat", known.get("fstatat", -1))}
    for name, number in numbers(f"{ALLOWED};{CHECKED};{EXEC}", ARCHES[machine]).items():
        assert known.get(name) == number, name


def test_an_unknown_processor_has_no_filter() -> None:
    assert build("sparc64") is None
    assert build("x86_64") != build("x86_64", allow_exec=True)


def test_dangerous_system_calls_are_not_allowed() -> None:
    dangerous = {"socket", "connect", "bind", "ptrace", "fork", "clone", "execve", "kill", "mount", "unshare",
                 "bpf", "io_uring_setup", "process_vm_readv", "prctl", "setuid", "memfd_create"}  # fmt: skip
    assert not dangerous & set(numbers(ALLOWED + ";" + CHECKED, ARCHES["x86_64"]))
