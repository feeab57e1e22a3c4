"""The libraries that a wheel carries: which one a processor gets, and what is said where there is none."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.models.kernels import build, compiler
from covey.models.kernels.choice import Trial

linux = pytest.mark.skipif(platform.system() != "Linux", reason="wheels have libraries for Linux only")
ZEN4 = " ".join(sorted(compiler.LEVELS[1].needs))


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A wheel whose libraries hold their own names, in a process that finds no compiler."""
    for level in compiler.LEVELS:
        (tmp_path / f"{level.name}.so").write_bytes(level.name.encode())
    monkeypatch.setattr(build, "WHEEL", tmp_path)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (build.OFF, "CC"):
        monkeypatch.delenv(name, raising=False)
    build.tested_kernels.cache_clear()
    yield tmp_path
    build.tested_kernels.cache_clear()


@linux
@pytest.mark.parametrize(
    ("flags", "first"),
    [
        ("flags : fpu sse2", "x86-64"),
        ("flags : " + " ".join(sorted(compiler.LEVELS[3].needs)), "x86-64-v3"),
        (f"flags : {ZEN4}", "x86-64-v4-bf16"),
        (f"flags : {ZEN4} amx_tile amx_bf16", "x86-64-amx"),
    ],
)
def test_a_processor_gets_the_best_that_its_flags_allow(wheel, monkeypatch, flags: str, first: str) -> None:
    monkeypatch.setattr(build, "processor", lambda: flags)
    found = [c.content.decode() for c in build._candidates()]
    names = [level.name for level in compiler.LEVELS if level.machine == "x86_64"]
    assert found == names[names.index(first) :], "the others follow, should its trial fail"


@linux
def test_one_that_fails_its_trial_is_followed_by_the_next(wheel, monkeypatch) -> None:
    monkeypatch.setattr(build, "processor", lambda: f"flags : {ZEN4}")
    monkeypatch.setattr(build, "_load_library", lambda content, _: content)

    def tried(content: bytes, _: Path) -> Trial:
        return Trial(problem="" if content == b"x86-64-v3" else "illegal instruction")

    monkeypatch.setattr(build, "_trial_result", tried)
    found = build.tested_kernels()
    assert found is not None
    assert (found.instructions, found.origin) == ("AVX2", "from the wheel")


@linux
def test_with_neither_library_nor_compiler_one_line_says_the_cost(wheel, capfd) -> None:
    for file in wheel.glob("*.so"):
        file.unlink()
    assert build.tested_kernels() is None
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "about three times as long" in said[0]


@linux
def test_tiles_compile_with_gcc(tmp_path: Path) -> None:
    """Nothing here can run them, and where tiles are emulated gcc's own forms of them do not occur."""
    if shutil.which("gcc") is None or platform.machine() != "x86_64":
        pytest.skip("no compiler for it: gcc")
    source = Path(compiler.__file__).with_name("gemm.c")
    flags = [*compiler.FLAGS, *compiler.LEVELS[0].flags, "-fopenmp", "-DBFLOAT16"]
    made = tmp_path / "tiles.s"
    done = subprocess.run(
        ["gcc", *flags, "-S", source, "-o", made], capture_output=True, text=True, timeout=200
    )
    if "unrecognized" in done.stderr or "not recognized" in done.stderr:
        pytest.skip("no compiler for it: a gcc that knows AMX")
    assert done.returncode == 0, done.stderr
    assert "tdpbf16ps" in made.read_text()
