"""Which compiler makes the library: each that is there in turn; without any, what one made before."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.models.kernels import build
from covey.models.kernels.choice import Trial
from covey.models.kernels.compiler import LEVELS
from covey.runs.compatibility import operations_library
from covey.system.cache import cache_folder

WORKS = """\
if [ "$1" = --version ]; then echo "$0 1.0"; exit; fi
for last; do :; done
echo "by ${0##*/}" > "$last"
"""
"""A compiler: its last argument is the file that it makes."""
FAILS = "echo '/tmp/x/gemm.c:1:10: fatal error: stdlib.h: No such file' >&2; echo terminated. >&2; exit 1"


class Machine:
    """A PATH with nothing but these programs, a cache, and no wheel; libraries are what they are made by."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.cache = folder / "bin", folder / "cache" / "covey"
        self.programs.mkdir()
        self.tried: list[bytes] = []
        self.incorrect: set[bytes] = set()

    def has(self, **programs: str) -> None:
        """Those, and no others."""
        for old in self.programs.iterdir():
            old.unlink()
        for name, lines in programs.items():
            (self.programs / name).write_text(f"#!/bin/sh\n{lines}\n")
            (self.programs / name).chmod(0o755)

    def trial(self, content: bytes, _: Path) -> Trial:
        self.tried.append(content)
        return Trial(problem="incorrect sums" if content in self.incorrect else "")

    def library(self) -> bytes | None:
        """What a new process would take."""
        build.tested_kernels.cache_clear()
        build._version.cache_clear()
        found = build.tested_kernels()
        return None if found is None else self.tried[-1]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    own = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(own.programs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (build.OFF, "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build, "WHEEL", tmp_path)
    monkeypatch.setattr(build, "processor", lambda: "flags : fpu sse2")
    monkeypatch.setattr(build, "_trial_result", own.trial)
    monkeypatch.setattr(build, "_load_library", lambda content, _: content)
    yield own
    build.tested_kernels.cache_clear()
    build._version.cache_clear()


def test_the_next_compiler_is_tried_where_one_fails_and_that_is_said_once(machine: Machine, capfd) -> None:
    machine.has(cc=FAILS, gcc=WORKS, clang=WORKS)
    assert machine.library() == b"by gcc\n"
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot" in line]
    error = "/tmp/x/gemm.c:1:10: fatal error: stdlib.h: No such file"
    assert said == [f"note: cc cannot compile the operations: {error}"]


def test_a_silent_compiler_is_reported_with_its_exit_code(machine: Machine, capfd) -> None:
    machine.has(cc="exit 3", gcc="not a program")
    (machine.programs / "gcc").write_bytes(b"\x7fELF nonsense")
    assert machine.library() is None
    said = capfd.readouterr().err
    assert "note: cc cannot compile the operations: exit code 3\n" in said
    assert "note: gcc cannot compile the operations: [Errno " in said
    assert said.splitlines()[-1].endswith(build.REMEDY)
    assert build.no_compiler() == "no C compiler that works (cc, gcc failed)"


def test_a_compiler_that_hangs_is_replaced_by_the_next(machine: Machine, monkeypatch, capfd) -> None:
    machine.has(cc=WORKS, gcc=WORKS)
    told = []

    def version(compiler: str) -> str:
        told.append(compiler)
        if compiler == "cc":
            raise subprocess.TimeoutExpired(compiler, 20)
        return compiler

    version.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(build, "processor", lambda: "flags : amx_bf16")
    monkeypatch.setattr(build, "_version", version)
    assert machine.library() == b"by gcc\n"
    assert told == ["cc", "gcc"], "nothing else is asked of one that does not answer"
    assert "cc cannot compile the operations: no answer within 20 seconds" in capfd.readouterr().err


def test_a_library_is_known_by_what_made_it(machine: Machine, monkeypatch) -> None:
    """A run that continues with another compiler's has other last bits, and has to say so."""

    def recorded() -> str | None:
        machine.library()
        return operations_library()

    machine.has(cc=WORKS)
    first = recorded()
    assert recorded() == first
    monkeypatch.setenv("CC", "gcc")
    machine.has(cc=WORKS, gcc=WORKS)
    assert recorded() != first
    assert first.split(", sha256 ")[0] == recorded().split(", sha256 ")[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux alone has processes in files")
def test_a_terminals_interruption_does_not_end_a_compiler(machine: Machine) -> None:
    """Ctrl-C while the operations were compiled began a run with a slower library, which it then kept."""
    seen = machine.programs.parent / "groups"
    machine.has(cc=f'read -r _ _ _ _ group _ < /proc/$$/stat; echo "$group" >> {seen}\n{WORKS}')
    assert machine.library() == b"by cc\n"
    groups = seen.read_text().split()
    assert len(groups) > 5
    assert str(os.getpgrp()) not in groups


def test_a_compiler_may_speak_in_another_encoding(machine: Machine) -> None:
    machine.has(cc=WORKS.replace("$0 1.0", "Compilateur d\\351velopp\\351"))
    assert machine.library() == b"by cc\n"


def test_an_older_compiler_without_tiles_is_no_failure(machine: Machine, monkeypatch, capfd) -> None:
    tiles = f'case "$*" in *--version*|*-shared*|*{build.WITHOUT_TILES}*) ;; *) exit 1;; esac\n{WORKS}'
    machine.has(cc=tiles)
    monkeypatch.setattr(build, "processor", lambda: "flags : amx_bf16")
    assert machine.library() == b"by cc\n"
    machine.incorrect.add(b"by cc\n")
    with pytest.warns(UserWarning, match="incorrect sums"):
        assert machine.library() is None
    assert "cannot" not in capfd.readouterr().err


@pytest.mark.parametrize(("made", "named"), [(" permit_tiles", "AMX"), ("", "AVX-512")])
def test_a_library_is_named_by_what_is_in_it(machine: Machine, monkeypatch, made: str, named: str) -> None:
    """gcc 9 compiles for a processor with AMX, but not for its tiles."""
    machine.has(cc=WORKS.replace("by ", f"{made} by "))
    needs = {level.instructions: level.needs for level in LEVELS}
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "processor", lambda: " ".join(needs[named] | {"amx_bf16"}))
    monkeypatch.setattr(build, "_permit_tiles", lambda loaded: loaded)
    machine.library()
    assert build.tested_kernels().instructions == named


def test_the_next_library_is_taken_where_this_process_may_not_load_one(
    machine: Machine, monkeypatch, capfd
) -> None:
    """A small stack for signals, which another library has set here and not in the child, forbids tiles."""
    machine.has(cc=WORKS, gcc=WORKS)

    def permitted(loaded: bytes) -> bytes:
        if loaded == b"by cc\n":
            raise OSError("the system does not let this process use AMX")
        return loaded

    monkeypatch.setattr(build, "_permit_tiles", permitted)
    assert machine.library() == b"by gcc\n"
    assert "is not used: the system does not let this process use AMX" in capfd.readouterr().err


def test_the_compiler_that_is_named_comes_first(machine: Machine, monkeypatch, capfd) -> None:
    machine.has(cc=WORKS, clang=WORKS)
    monkeypatch.setenv("CC", "clang")
    assert machine.library() == b"by clang\n"
    monkeypatch.setenv("CC", "clang-99")
    assert machine.library() == b"by cc\n"
    assert "note: CC=clang-99 is not a program here and is not used\n" in capfd.readouterr().err


def test_two_names_of_one_compiler_are_one(machine: Machine) -> None:
    machine.has(gcc=WORKS)
    (machine.programs / "cc").symlink_to("gcc")
    assert build.compilers() == ["cc"]


def test_a_library_that_is_incorrect_is_followed_by_another_compilers(machine: Machine) -> None:
    machine.has(gcc=WORKS, clang=WORKS)
    machine.incorrect.add(b"by gcc\n")
    assert machine.library() == b"by clang\n"


def test_without_a_compiler_the_newest_library_of_any_is_used(machine: Machine, capfd) -> None:
    for age, name in ((1, "gcc"), (3, "cc"), (2, "clang")):
        machine.has(**{name: WORKS})
        machine.library()
        made = max(machine.cache.glob("*.so"), key=lambda path: path.read_text() == f"by {name}\n")
        os.utime(made, (age, age))
    capfd.readouterr()
    machine.has()
    assert machine.library() == b"by cc\n"
    assert capfd.readouterr().err == ""
    machine.has(cc=FAILS)
    assert machine.library() == b"by cc\n", "nor does one that no longer works cost its library"


def test_without_a_compiler_a_damaged_or_incorrect_library_is_passed_over(machine: Machine, capfd) -> None:
    made = {}
    for age, name in enumerate(("gcc", "cc", "clang")):
        machine.has(**{name: WORKS})
        machine.library()
        made[name] = next(p for p in machine.cache.glob("*.so") if p.read_text() == f"by {name}\n")
        os.utime(made[name], (age, age))
    made["clang"].write_bytes(b"planted")
    machine.incorrect.add(b"by cc\n")
    capfd.readouterr()
    machine.has()
    assert machine.library() == b"by gcc\n"
    assert capfd.readouterr().err == f"note: {made['clang']} is damaged or not ours alone; not used\n"
    assert b"planted" not in machine.tried


@pytest.mark.parametrize("changed", ["processor", "c_sources"])
def test_a_library_of_other_sources_or_another_processor_is_not_used(
    machine: Machine, monkeypatch, changed: str
) -> None:
    machine.has(cc=WORKS)
    assert machine.library() is not None
    machine.has()
    other = {"processor": lambda: "flags : fpu sse2 avx", "c_sources": lambda: {"ops.c": b"other"}}
    monkeypatch.setattr(build, changed, other[changed])
    assert machine.library() is None


def test_the_folder_is_asked_for_once_not_blamed_on_compilers(machine: Machine, monkeypatch, capfd) -> None:
    def none() -> Path:
        raise OSError("no folder")

    machine.has(cc=WORKS)
    monkeypatch.setattr(build, "cache_folder", none)
    with pytest.warns(UserWarning, match="cannot be used .no folder"):
        assert machine.library() is None
    assert capfd.readouterr().err == ""
    assert cache_folder() == machine.cache
