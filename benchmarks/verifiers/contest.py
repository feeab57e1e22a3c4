"""Programs of contests must run in a sandbox as under plain Python: the same output, the same end.

python benchmarks/verifiers/contest.py FOLDER [backend ...]

FOLDER has NAME.py and its input NAME.in. Packages that a program imports beyond the standard library and the
sandbox's own are missing on both sides if they are not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from covey_verify.machine import available_cpus
from covey_verify.sandbox.choice import choose
from covey_verify.sandbox.confine import Limits

LIMITS = Limits(wall=20.0, cpu=20)
PACKAGES = ("numpy", "sympy", "scipy", "networkx", "sortedcontainers", "more_itertools")


def plain(program: Path) -> tuple[bool, str]:
    """Return whether a program ends well under plain Python, and its output."""
    with TemporaryDirectory() as folder, program.with_suffix(".in").open("rb") as given:
        # No modules beside the program, and no limit on the digits of a number, as sandboxes have it.
        command = [sys.executable, "-P", "-X", "int_max_str_digits=0", str(program)]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": ""}
        with subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
        ) as child:
            try:
                output, _ = child.communicate(timeout=3 * LIMITS.wall)
            except subprocess.TimeoutExpired:
                child.kill()
                return False, ""
    return child.returncode == 0, output.decode("utf-8", "surrogateescape")


def main(folder: Path, backends: list[str]) -> None:
    """Run all programs everywhere and print how many differ on each backend, and which."""
    programs = sorted(folder.glob("*.py"))
    codes = [p.read_text(errors="replace") for p in programs]
    inputs = [p.with_suffix(".in").read_bytes().decode() for p in programs]
    with ThreadPoolExecutor(available_cpus()) as pool:
        expected = list(pool.map(plain, programs))
        print(json.dumps({"programs": len(programs), "end well": sum(well for well, _ in expected)}))
        for backend in backends:
            sandbox = choose(backend, packages=PACKAGES).sandbox
            script = sandbox.script
            ends = list(pool.map(lambda code, text: script(code, text, LIMITS), codes, inputs))  # noqa: B023
            odd = []
            for program, ours, (well, output) in zip(programs, ends, expected, strict=True):
                if (ours.kind == "ok") != well or (well and ours.value != output):
                    if plain(program) != (well, output):
                        continue  # it draws random numbers without a seed
                    ends_of = output[-80:], str(ours.value)[-80:]
                    odd.append([program.name, well, ours.kind, ours.text, *ends_of])
            kinds = Counter(end.kind for end in ends)
            print(json.dumps({"backend": backend, "ends": kinds, "different": len(odd)}))
            for line in odd:
                print("   ", json.dumps(line))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("backends", nargs="*", default=["landlock", "bwrap"])
    given = parser.parse_args()
    main(given.folder, given.backends)
