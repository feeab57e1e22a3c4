"""Checks per second and milliseconds per sandboxed run, beside math-verify, TRL and a bare subprocess.

python benchmarks/verifiers/speed.py        (TRL's accuracy_reward is measured where trl is installed)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from covey_verify.errors import SandboxUnavailable
from covey_verify.mathematics.answers import math_answer
from covey_verify.sandbox.choice import choose
from covey_verify.sandbox.confine import Limits

MATH = {
    "integers": [(str(7 * n), str(7 * n + n % 2)) for n in range(200)],
    "fractions": [(rf"\frac{{{n}}}{{{n + 1}}}", f"{2 * n}/{2 * n + 2}") for n in range(200)],
    "integers after 8 KB": [(str(7 * n), "x " * 4000 + rf"\boxed{{{7 * n}}}") for n in range(100)],
    "expressions": [(rf"(x+{n})^2", rf"x^2+{2 * n}x+{n * n}") for n in range(1, 41)],
}
CODE = "def f(x): return x + 1"
INPUTS = [([n], {}) for n in range(20)]
PROGRAM = "print(sum(map(int, input().split())))"


def boxed(text: str) -> str:
    """As a completion."""
    return text if "boxed" in text else rf"So it is \boxed{{{text}}}."


def rate(judge: Callable[[str, str], object], pairs: list[tuple[str, str]]) -> float:
    """Checks per second, the best of three rounds."""
    judge(boxed(pairs[0][1]), pairs[0][0])
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        for gold, answer in pairs:
            judge(boxed(answer), gold)
        best = max(best, len(pairs) / (time.perf_counter() - began))
    return round(best, 1)


def milliseconds(run: Callable[[], object], times: int = 40) -> dict[str, float]:
    """Median and smallest wall time of a run."""
    run()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(1000 * (time.perf_counter() - began))
    return {"median": round(statistics.median(taken), 1), "smallest": round(min(taken), 1)}


def graders() -> dict[str, Callable[[str, str], object]]:
    """Those that are installed."""
    found: dict[str, Callable[[str, str], object]] = {"covey": math_answer}
    try:
        from math_verify import parse, verify

        found["math-verify"] = lambda text, gold: verify(parse(f"${gold}$"), parse(text))
    except ImportError:
        pass
    try:
        from trl.rewards import accuracy_reward

        found["trl accuracy_reward"] = lambda text, gold: accuracy_reward(
            [[{"content": text}]], [f"${gold}$"]
        )
    except ImportError:
        pass
    return found


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    result: dict[str, object] = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    result["checks per second"] = {
        name: {kind: rate(judge, pairs) for kind, pairs in MATH.items()} for name, judge in graders().items()
    }
    bare = [sys.executable, "-I", "-S", "-c", PROGRAM]
    runs = {
        "bare subprocess": milliseconds(
            lambda: subprocess.run(bare, input=b"1 2", capture_output=True, check=True)
        )
    }
    for backend in ("landlock", "bwrap", "wasm"):
        try:
            sandbox = choose(backend).sandbox
        except SandboxUnavailable as error:
            runs[backend] = {"unavailable": str(error).splitlines()[1].strip()}  # type: ignore[dict-item]
            continue
        runs[backend] = milliseconds(lambda s=sandbox: s.script(PROGRAM, "1 2", Limits()))  # type: ignore[misc]
        call = milliseconds(lambda s=sandbox: list(s.calls(CODE, "f", INPUTS, Limits(), 5.0)))  # type: ignore[misc]
        runs[f"{backend}, 20 calls of a function"] = call
    result["milliseconds per run"] = runs
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
