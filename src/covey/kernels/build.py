"""Compile the C operations once per machine and load them; None where that is not possible."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from covey.kernels.choice import Trial

SOURCES = ("vector.h", "tiles.h", "ops.c", "gemm.c")
FLAGS = ["-O3", "-march=native", "-std=gnu11", "-fPIC", "-ffp-contract=fast", "-w"]
WITHOUT_TILES = ["-mno-amx-bf16"]
OFF = "COVEY_KERNELS"
"""Set to 0 to work without compiled operations; set to a path to take that library, unchecked."""


class Kernels(NamedTuple):
    """A library that computes the right values on this processor."""

    operations: ctypes.CDLL
    path: Path
    trial: Trial
    instructions: str
    """The widest that its products use."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled operations, built if they are not in the cache yet."""
    if (given := os.environ.get(OFF, "")).startswith("/"):
        _share_openmp("cc")
        return _permitted(ctypes.CDLL(given))
    found = tested_kernels() if given != "0" else None
    return None if found is None else found.operations


@cache
def tested_kernels() -> Kernels | None:
    """The fastest library that passes its trial; None where there is none."""
    compiler = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if compiler is None or os.environ.get(OFF) or platform.system() not in ("Linux", "Darwin"):
        return None
    try:
        threaded = _share_openmp(compiler)
        for extra in ([], WITHOUT_TILES) if "amx_bf16" in processor() else ([],):
            content, path = _compiled(compiler, threaded, extra)
            trial = _tried(content, path)
            if trial.works:
                _keep_freed_memory()
                loaded = _permitted(_loaded(content, path))
                return Kernels(loaded, path, trial, _instructions(extra))
        raise OSError(trial.problem)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        warnings.warn(
            f"operations could not be compiled, torch does their work: {reason!s:.300}", stacklevel=2
        )
        return None


def _instructions(extra: list[str]) -> str:
    known = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bfloat16", "avx512f": "AVX-512", "avx2": "AVX2"}
    flags = set(processor().split()) - ({"amx_bf16"} if extra else set())
    plain = "NEON" if platform.machine() in ("aarch64", "arm64") else "SSE"
    return next((name for flag, name in known.items() if flag in flags), plain)


def _share_openmp(compiler: str) -> bool:
    """Let the operations use torch's own OpenMP: a second pool of threads would fight for the same cores."""
    runtime = _openmp_runtime(compiler)
    if runtime is not None:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    return runtime is not None


def _permitted(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """A library whose tiles, if it uses them, this process has asked for."""
    if hasattr(loaded, "permit_tiles") and loaded.permit_tiles() != 0:
        raise OSError("the system does not let this process use AMX")
    return loaded


def _tried(content: bytes, path: Path) -> Trial:
    """What a child found when it ran this library: computed once, then kept beside it."""
    kept = path.with_suffix(".json")
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Trial(**json.loads(_own_file(kept)))
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "kernels.so"
        copy.write_bytes(content)
        command = [sys.executable, "-m", "covey.kernels.trial"]
        environment = {**os.environ, OFF: str(copy), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    try:
        trial = Trial(**json.loads(done.stdout))
    except (ValueError, TypeError):
        last = done.stderr.strip().rpartition("\n")[2] or f"ended with {done.returncode}"
        trial = Trial(problem=f"they fail on this processor: {last:.200}")
    with contextlib.suppress(OSError):
        _keep(kept, json.dumps(vars(trial)).encode())
    return trial


def _keep_freed_memory() -> None:
    """Let glibc reuse large blocks: mapping fresh pages for every tensor costs more than the products."""
    if platform.libc_ver()[0] == "glibc":
        libc, mmap_threshold, trim_threshold = ctypes.CDLL(None), -3, -1
        libc.mallopt(mmap_threshold, 1 << 27)
        libc.mallopt(trim_threshold, 1 << 30)


def _compiled(compiler: str, threaded: bool, extra: Sequence[str] = ()) -> tuple[bytes, Path]:
    """The library, and where it is kept."""
    flags = [*FLAGS, *extra, *(["-fopenmp"] if threaded else [])]
    sources = {name: (files("covey") / "kernels" / name).read_bytes() for name in SOURCES}
    identity = hashlib.sha256(b"\0".join((*sources.values(), Path(__file__).read_bytes())))
    identity.update(repr((flags, platform.machine(), processor(), _version(compiler))).encode())
    target = _cache_folder() / f"kernels-{identity.hexdigest()[:16]}.so"
    content = _kept(target)
    if content is None:
        if os.path.lexists(target):
            print(f"note: {target} is damaged or not ours alone; compiled anew", file=sys.stderr)
        content = _build(compiler, flags, sources)
        with contextlib.suppress(OSError):  # on a full disk it is compiled anew next time
            _keep(target, content)
            _keep(_digest_of(target), hashlib.sha256(content).hexdigest().encode())
    return content, target


def _build(compiler: str, flags: list[str], sources: dict[str, bytes]) -> bytes:
    print("note: compiling operations for this processor, once: half a minute", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, content in sources.items():
            (folder / name).write_bytes(content)
        objects: list[str] = []
        for source, extra in itertools.product(("ops", "gemm"), ([], ["-DBFLOAT16"])):
            objects.append(str(folder / f"{source}{len(objects)}.o"))
            command = [compiler, *flags, *extra, "-c", str(folder / f"{source}.c"), "-o", objects[-1]]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        # Linked without -fopenmp: the symbols come from the runtime that torch has loaded.
        undefined = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
        built = folder / "kernels.so"
        command = [compiler, "-shared", *undefined, *objects, "-lm", "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return built.read_bytes()


def _kept(target: Path) -> bytes | None:
    """The cached library, if it is intact and only this user can have written it."""
    try:
        content, digest = _own_file(target), _own_file(_digest_of(target))
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest().encode() == digest else None


def _own_file(path: Path) -> bytes:
    """The content of a file that only this user can change. Raises OSError for any other."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or not _ours_alone(found):
            raise PermissionError(path)
        return file.read()


def _ours_alone(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest_of(target: Path) -> Path:
    return target.with_suffix(".sha256")


def _keep(path: Path, content: bytes) -> None:
    """Write a file atomically and durably; only its owner can read it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(handle)
    Path(temporary).replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _loaded(content: bytes, path: Path) -> ctypes.CDLL:
    """Load exactly the bytes that were checked: the file could be changed or truncated meanwhile."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            handle = os.memfd_create("covey-kernels")  # stays open: the loader knows libraries by their path
            os.write(handle, content)
            return ctypes.CDLL(f"/proc/self/fd/{handle}")
    return ctypes.CDLL(str(path))


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or (Path.home() / ".cache" if os.environ.get("HOME") else None)
    for folder in (
        Path(base) / "covey" if base else None,
        Path(tempfile.gettempdir()) / f"covey-{os.getuid()}",
    ):
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                found = folder.stat()
            except OSError:
                continue
            if _ours_alone(found) and os.access(folder, os.W_OK):
                return folder
            if found.st_uid == os.getuid() and not _ours_alone(found):
                print(
                    f"note: others may write to {folder}, so it is not used: chmod go-w it", file=sys.stderr
                )
    raise OSError("no folder to keep compiled operations in that only you can write to")


def _openmp_runtime(compiler: str) -> str | None:
    """The OpenMP library that torch has loaded, if this compiler's code can use it."""
    wanted = ("libomp", "libiomp5") if "clang" in _version(compiler) else ("libgomp",)
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split()[-1] for line in maps.splitlines() if line.rpartition("/")[2].startswith(wanted)}
    return min(paths, default=None)


@cache
def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout


def processor() -> str:
    """What `-march=native` depends on, and with it the last bits of sums."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
