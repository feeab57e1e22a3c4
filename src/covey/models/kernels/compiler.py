"""Compilation of the kernels, for this processor or for the processors that a wheel serves.

This file imports only what needs no other package, as the build of a wheel imports it (`hatch_build.py`).
"""

from __future__ import annotations

import itertools
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from covey_verify.children import run

SOURCES = ("vector.h", "units.h", "tiles.h", "ops.c", "attention.c", "gemm.c", "rows.c", "team.c")
# -ffp-contract=fast may fuse products into sums; `bits` tests that sampling and training agree all the same.
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-ffp-contract=fast", "-w", "-pthread"]
NATIVE = "-march=native"
WITHOUT_TILES = "-mno-amx-bf16"
COMPILE_SECONDS = 120
"""Seconds for the compilation of one file."""


class Level(NamedTuple):
    """The processors that one library of a wheel serves."""

    name: str
    instructions: str
    """Widest instructions that its products use."""
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    """Flags in /proc/cpuinfo that a processor must have."""


_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16"}
_TILES = ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
LEVELS = (
    Level("x86-64-amx", "AMX", "x86_64", _TILES, _BF16 | {"amx_tile", "amx_bf16"}),
    Level("x86-64-v4-bf16", "AVX-512 with bfloat16", "x86_64", _TILES[:2], _BF16),
    Level("x86-64-v4", "AVX-512", "x86_64", _TILES[:1], _V4),
    Level("x86-64-v3", "AVX2", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("x86-64", "SSE", "x86_64", ("-march=x86-64",), frozenset()),
    Level("aarch64", "NEON", "aarch64", ("-march=armv8-a",), frozenset()),
)
"""Levels of all machines, the best of each first."""


def c_sources() -> dict[str, bytes]:
    """The C files of a library, by name."""
    folder = Path(__file__).parent
    return {name: (folder / name).read_bytes() for name in SOURCES}


def compile_library(compiler: str, flags: Sequence[str], files: Mapping[str, bytes]) -> bytes:
    """Compile a library and return its bytes. Raises CalledProcessError or TimeoutExpired."""
    apple = platform.system() == "Darwin"  # its clang knows the blocks, but not the option
    blocks = ["-Xclang", "-fopenmp"] if apple else ["-fopenmp"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        # One source serves several numbers: each is compiled once per define and its names get a suffix.
        objects: list[str] = []
        parts = [("team", []), ("rows", []), ("gemm", ["-DMIXED"])]
        parts += itertools.product(("ops", "attention", "gemm"), ([], ["-DBFLOAT16"]))
        for source, extra in parts:
            objects.append(str(folder / f"{source}{len(objects)}.o"))
            command = [compiler, *FLAGS, *flags, *blocks, *extra, "-c", str(folder / f"{source}.c")]
            run([*command, "-o", objects[-1]], COMPILE_SECONDS).check_returncode()
        # Linked without -fopenmp: what runs the blocks is in team.c.
        target = folder / "kernels.so"
        command = [compiler, "-shared", "-pthread", *objects, "-lm", "-o", str(target)]
        run(command, COMPILE_SECONDS).check_returncode()
        return target.read_bytes()
