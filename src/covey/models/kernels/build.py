"""Building the kernel library: taken from the wheel or compiled once per machine, tried, then loaded."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from covey.models.kernels.choice import Trial, trial_of
from covey.models.kernels.compiler import FLAGS, LEVELS, NATIVE, WITHOUT_TILES, c_sources, compile_library
from covey.models.kernels.library_cache import keep_library, kept_library, tell_damaged
from covey.system.allocator import keep_freed_memory
from covey.system.cache import cache_folder, read_private_file, write_private_file
from covey.system.integrity import sealed, unsealed
from covey_verify.children import CRASHES, how_ended, run

OFF = "COVEY_KERNELS"
"""Environment variable: 0 means no compiled operations, a path means that library, unchecked."""
WHEEL = Path(__file__).with_name("prebuilt")
"""Folder of the libraries in a wheel, one for each of `compiler.LEVELS`."""
TILES = b"permit_tiles"
"""Name of a function that only libraries with AMX tiles have."""
TRIAL_SECONDS = 120
"""Seconds until a trial is given up."""
TRIAL = (
    "import runpy, sys; sys.path[:] = sys.argv[2:]; "
    "from covey_verify.children import die_with; die_with(int(sys.argv[1])); "
    "runpy.run_module('covey.models.kernels.trial', run_name='__main__')"
)
"""Code of the child, with this process's paths: under `python -m` torch would import a `random.py` of the
working folder.
"""
COMPILERS = ("cc", "gcc", "clang")
"""Compilers in the order they are tried. The compiler that CC names is tried before them."""
COST = "torch does their work: rollouts and updates take about three times as long"
REMEDY = "install gcc or clang (apt-get install gcc), or choose another compiler, such as CC=clang"


class Kernels(NamedTuple):
    """A library that computes correct values on this processor."""

    operations: ctypes.CDLL
    path: Path
    trial: Trial
    instructions: str
    """Widest instructions that its products use."""
    origin: str
    digest: str
    """Hash of its bytes, since two compilers may give sums of the same sources different last bits."""


class Candidate(NamedTuple):
    """A library that has not been tried on this processor."""

    content: bytes
    path: Path
    """Path in the cache; the result of its trial is kept next to it."""
    instructions: str
    origin: str


@cache
def library() -> ctypes.CDLL | None:
    """The compiled operations, built if they are not in the cache yet; None if there are none."""
    choice = os.environ.get(OFF, "")
    if choice.startswith("/"):
        return _permit_tiles(ctypes.CDLL(choice))
    tested = tested_kernels() if choice != "0" else None
    return None if tested is None else tested.operations


@cache
def tested_kernels() -> Kernels | None:
    """The fastest library that passes its trial; None, with a line on the console, if there is none."""
    if os.environ.get(OFF):
        return None
    # The last reason is the one reported: candidates come best first, and each may fail its trial.
    reason: object = ""
    try:
        for content, path, instructions, origin in _candidates():
            trial = _trial_result(content, path)
            reason = trial.problem
            if trial.works:
                try:
                    operations = _permit_tiles(_load_library(content, path))
                # The child could load the library, but this process may not be permitted to.
                except OSError as error:
                    print(f"note: {instructions} is not used: {error}", file=sys.stderr, flush=True)
                    reason = error
                    continue
                keep_freed_memory()
                digest = hashlib.sha256(content).hexdigest()[:12]
                return Kernels(operations, path, trial, instructions, origin, digest)
    except (OSError, subprocess.SubprocessError) as error:
        reason = error
    if reason:
        warnings.warn(f"the compiled operations cannot be used ({reason!s:.300}); {COST}", stacklevel=2)
    else:
        print(f"note: no compiled operations: {no_compiler()}; {COST}; {REMEDY}", file=sys.stderr, flush=True)
    return None


def _candidates() -> Iterator[Candidate]:
    """The wheel's libraries for this processor, then compiled ones, then those in the cache; best first."""
    yield from _from_the_wheel()
    if platform.system() not in ("Linux", "Darwin"):
        return
    folder = cache_folder()
    option_sets = _option_sets()
    requested = os.environ.get("CC")
    if requested and not shutil.which(requested):
        print(f"note: CC={requested} is not a program here and is not used", file=sys.stderr, flush=True)
    for compiler in compilers():
        yield from _compiled_by(compiler, option_sets)
    # A machine without a compiler may have had one earlier, or its cache may come from another machine.
    for options in option_sets:
        libraries = folder.glob(f"kernels-{_identity_of(options)}-*.so")
        for path in sorted(libraries, key=lambda p: (p.lstat().st_mtime_ns, p.name), reverse=True):
            content = kept_library(path, "not used")
            if content is not None:
                yield Candidate(content, path, _instructions(content), "compiled here")


def _from_the_wheel() -> Iterator[Candidate]:
    machine = platform.machine()
    flags = set(processor().split())
    for level in LEVELS if platform.system() == "Linux" else ():
        file = WHEEL / f"{level.name}.so"
        # A processor meets all levels below its best: if that library fails its trial, the next is tried.
        if level.machine == machine and level.needs <= flags and file.is_file():
            content = file.read_bytes()
            cached = cache_folder() / f"{level.name}-{_identity(content, processor())}.so"
            yield Candidate(content, cached, level.instructions, "from the wheel")


def _option_sets() -> list[list[str]]:
    """Sets of compiler options; the first one makes the fastest library."""
    # A system may not permit the AMX tiles that its processor has; then the library without them is next.
    return [[], [WITHOUT_TILES]] if "amx_bf16" in processor().split() else [[]]


def compilers() -> list[str]:
    """The compilers on this machine, each once: `cc` is usually a link to another one."""
    names = dict[str, str]()
    for name in (os.environ.get("CC", ""), *COMPILERS):
        path = shutil.which(name)
        if path:
            names.setdefault(os.path.realpath(path), name)
    return list(names.values())


def no_compiler() -> str:
    """The reason why no compiler made a library."""
    names = ", ".join(compilers())
    return f"no C compiler that works ({names} failed)" if names else "no C compiler"


def _compiled_by(compiler: str, option_sets: Sequence[Sequence[str]]) -> Iterator[Candidate]:
    """Yield the libraries that this compiler can build.

    If the last attempt failed, print a note before the next compiler is tried.
    """
    failure: Exception | None = None
    for options in option_sets:
        try:
            content, path = _find_or_compile(compiler, options)
        except subprocess.TimeoutExpired as error:
            failure = error
            break
        except (OSError, subprocess.CalledProcessError) as error:
            failure = error  # an older compiler has no tiles, and may compile the next options
            continue
        failure = None
        yield Candidate(content, path, _instructions(content), "compiled here")
    if failure is not None:
        print(
            f"note: {compiler} cannot compile the operations: {_reason_of(failure)}",
            file=sys.stderr,
            flush=True,
        )


def _reason_of(failure: Exception) -> str:
    """A compiler's first error message, or its last line, or how it ended."""
    if isinstance(failure, subprocess.TimeoutExpired):
        return f"no answer within {failure.timeout:.0f} seconds"
    if isinstance(failure, subprocess.CalledProcessError):
        lines = failure.stderr.decode(errors="replace").strip().splitlines()
        lines = lines or [how_ended(failure.returncode)]
        return next((line for line in lines if "error:" in line), lines[-1])[:200]
    return str(failure)[:200]


def _instructions(content: bytes) -> str:
    """The widest instructions of a library that was compiled here for this processor.

    A compiler older than the processor makes a library without tiles, and does not tell.
    """
    machine = platform.machine()
    flags = set(processor().split())
    if TILES not in content:
        flags.discard("amx_bf16")
    levels = (lv for lv in LEVELS if lv.machine == machine.replace("arm64", "aarch64") and lv.needs <= flags)
    return next((level.instructions for level in levels), machine)


def _permit_tiles(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, after asking the system for permission to use AMX tiles if it has any."""
    if hasattr(library, TILES.decode()) and library.permit_tiles() != 0:
        raise OSError("the system does not let this process use AMX")
    return library


def _trial_result(content: bytes, path: Path) -> Trial:
    """The trial of this library in a child process; the result is kept next to the library."""
    record = path.with_suffix(".json")
    try:
        return trial_of(unsealed(read_private_file(record)))
    except (OSError, ValueError):
        tell_damaged(record, "measured anew")
    try:
        process = _run_trial(content)
        trial = trial_of(json.loads(process.stdout))
        is_permanent = True
    except subprocess.TimeoutExpired:
        trial = Trial(problem=f"no result within {TRIAL_SECONDS} seconds")
        is_permanent = False
    except ValueError:
        last_line = process.stderr.decode(errors="replace").strip().rpartition("\n")[2] or how_ended(
            process.returncode
        )
        trial = Trial(problem=f"they fail on this processor: {last_line:.200}")
        # A crash will happen again; any other failure, such as a lack of memory, may be temporary.
        is_permanent = -process.returncode in CRASHES
    if is_permanent:
        with contextlib.suppress(OSError):
            write_private_file(record, sealed(vars(trial)).encode())
    return trial


def _run_trial(content: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run a trial of these bytes in a child process, and return its output."""
    handle = _in_memory(content)
    with tempfile.TemporaryDirectory() as scratch:
        # The child inherits the open file under the same number, so this path is valid there too.
        library = Path(f"/proc/self/fd/{handle}")
        if handle is None:
            library = Path(scratch) / "kernels.so"
            library.write_bytes(content)
        try:
            return run(
                [sys.executable, "-P", "-c", TRIAL, str(os.getpid()), *sys.path],
                TRIAL_SECONDS,
                env={**os.environ, OFF: str(library), "OMP_NUM_THREADS": "1"},
                pass_fds=() if handle is None else (handle,),
            )
        finally:
            if handle is not None:
                os.close(handle)


def _find_or_compile(compiler: str, options: Sequence[str] = ()) -> tuple[bytes, Path]:
    """A compiler's library for this processor, from the cache or compiled now, and its path there."""
    target = cache_folder() / f"kernels-{_identity_of(options)}-{_identity(_version(compiler))}.so"
    content = kept_library(target, "compiled anew")
    if content is None:
        print(
            f"note: compiling operations for this processor with {compiler}, once: half a minute",
            file=sys.stderr,
            flush=True,
        )
        content = compile_library(compiler, [NATIVE, *options], c_sources())
        with contextlib.suppress(OSError):  # on a full disk it is compiled anew next time
            keep_library(target, content)
    return content, target


def _identity_of(options: Sequence[str]) -> str:
    """Hash of a library's sources, options and processor, whichever compiler makes it."""
    parts = (*FLAGS, NATIVE, *options)
    return _identity(*c_sources().values(), *parts, platform.machine(), processor())


def _identity(*parts: bytes | str) -> str:
    """Hash of a library and of the files that try it, so that a new test tries every library anew."""
    trial_sources = [
        (Path(__file__).with_name(name)).read_bytes() for name in ("trial.py", "known_answers.py", "bits.py")
    ]
    encoded = [part.encode() if isinstance(part, str) else part for part in (*parts, *trial_sources)]
    return hashlib.sha256(b"\0".join(encoded)).hexdigest()[:16]


def _load_library(content: bytes, path: Path) -> ctypes.CDLL:
    """Load exactly the bytes that were checked; the file could have changed since."""
    handle = _in_memory(content)  # stays open: the loader knows libraries by their path
    return ctypes.CDLL(str(path) if handle is None else f"/proc/self/fd/{handle}")


def _in_memory(content: bytes) -> int | None:
    """An open file in memory with these bytes, because a disk may forbid execution (`noexec`).

    None if the system has no such files, or does not execute from them.
    """
    if not hasattr(os, "memfd_create"):
        return None
    handle = None
    try:
        handle = os.memfd_create("covey-kernels")
        os.write(handle, content)
        # Try what the loader needs: the path through /proc, and a mapping that may be executed.
        Path(f"/proc/self/fd/{handle}").stat()
        mmap.mmap(handle, len(content), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
    except (OSError, ValueError):  # ValueError: not all was written
        if handle is not None:
            os.close(handle)
        return None
    return handle


@cache
def _version(compiler: str) -> bytes:
    return run([compiler, "--version"], 20).stdout


def processor() -> str:
    """The processor's flags, on which `-march=native` and so the last bits of sums depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
