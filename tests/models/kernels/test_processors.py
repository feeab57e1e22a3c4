"""The operations as other processors would run them: in an emulator, or with fewer instructions of this one.

Each case compiles `check.c` with the sources of the library and runs it. Speed is not seen here.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from covey.models.kernels import compiler as compiling

HERE = Path(__file__).parent
KERNELS = Path(compiling.__file__).parent
TILES = ["-march=native", "-include", str(HERE / "emulated_tiles.h")]
CASES = {
    "Haswell": ("gcc", ["-march=haswell"], ["qemu-x86_64", "-cpu", "Haswell"]),
    "any x86-64": ("gcc", ["-march=x86-64"], ["qemu-x86_64", "-cpu", "qemu64"]),
    "Neoverse": ("aarch64-linux-gnu-gcc", ["-mcpu=neoverse-n1"], ["qemu-aarch64"]),
    "emulated AMX": ("cc", TILES, []),
    "this one": ("cc", ["-march=native"], []),
    "by clang": ("clang", ["-march=native"], []),
}


def runs_here(flags: list[str]) -> bool:
    """Whether this processor itself has the instructions, so that no emulator is needed."""
    lines = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    wanted = {"-march=haswell": "avx2", "-march=x86-64": "sse2"}.get(flags[0])
    return wanted is not None and wanted in lines


@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "Neoverse" else []) for n in CASES]
)
def test_operations_are_right(tmp_path: Path, name: str, numbers: str) -> None:
    compiler, flags, emulator = CASES[name]
    if shutil.which(compiler) is None or (compiler == "gcc" and platform.machine() != "x86_64"):
        pytest.skip(f"no compiler for it: {compiler}")
    if emulator and runs_here(flags):
        emulator = []
    elif emulator and shutil.which(emulator[0]) is None:
        pytest.skip(f"no emulator: {emulator[0]} (apt-get install qemu-user)")
    if name == "emulated AMX" and numbers == "float32":
        pytest.skip("tiles are of bfloat16")
    options = [*compiling.FLAGS, "-fopenmp", "-static", f"-I{KERNELS}"]
    options += {"bfloat16": ["-DBFLOAT16"], "mixed": ["-DMIXED"]}.get(numbers, [])
    names = ("gemm", "team") if numbers == "mixed" else ("ops", "attention", "gemm", "team")
    sources = [HERE / "check.c", *(KERNELS / f"{name}.c" for name in names)]
    program = tmp_path / "check"
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    for source, made in zip(sources, objects, strict=True):
        command = [compiler, *options, *flags, "-c", source, "-o", made]
        subprocess.run(command, check=True, timeout=120)
    # Linked without -fopenmp: what runs the blocks is in team.c.
    link = [compiler, "-static", "-pthread", *objects, "-lm", "-o", program]
    subprocess.run(link, check=True, timeout=120)
    done = subprocess.run([*emulator, program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
