"""5,000 checks, some of which hang, crash, hog memory, fork or flood; every healthy one must be right.

python benchmarks/verifiers/pool.py [checks] [backend]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages/verify/tests/sandbox"))

from attacks import processes_below

from covey_verify.machine import available_cpus
from covey_verify.programs.code import code_tests
from covey_verify.sandbox.choice import choose

TROUBLE = {
    "hang": (0.02, "def f(x):\n    while True: pass"),
    "crash": (0.02, "import os\ndef f(x): os.abort()"),
    "hog": (0.01, "def f(x): return [bytearray(1 << 20) for _ in range(4096)]"),
    "fork bomb": (0.01, "import os\ndef f(x):\n    while True: os.fork()"),
    "flood": (0.01, "def f(x): return 'x' * 10**8"),
}
TESTS = [{"input": [n], "output": n * n + 1} for n in (2, 3, 5)]


def job(rng: random.Random) -> tuple[str, str, float]:
    """(kind, completion, expected value)."""
    draw = rng.random()
    for kind, (share, code) in TROUBLE.items():
        if draw < share:
            return kind, code, 0.0
        draw -= share
    if draw < 0.46:
        return "right", f"def f(x): return x * x + {rng.choice(('1', 'True', 'len([x])'))}", 1.0
    return "wrong", f"def f(x): return x * x + {rng.randint(2, 9)}", 0.0


def main(checks: int, backend: str) -> None:
    """Run the campaign and print its result."""
    sandbox = choose(backend).sandbox
    rng = random.Random(0)
    jobs = [job(rng) for _ in range(checks)]
    before = processes_below(os.getpid())
    began = time.monotonic()

    def judge(work: tuple[str, str, float]) -> tuple[str, bool, str, float]:
        kind, code, expected = work
        start = time.monotonic()
        score = code_tests(
            f"```python\n{code}\n```", sandbox=sandbox, tests=TESTS, entry_point="f", seconds=1.0,
            memory_mb=256, total_seconds=3.0,
        )  # fmt: skip
        return kind, score.value == expected, score.status, time.monotonic() - start

    with ThreadPoolExecutor(4 * available_cpus()) as pool:
        found = list(pool.map(judge, jobs))
    seconds = time.monotonic() - began
    time.sleep(0.5)
    left = processes_below(os.getpid()) - before - {p for p in processes_below(os.getpid()) if _is_server(p)}
    result = {
        "backend": backend,
        "layers": sandbox.layers,
        "checks": checks,
        "seconds": round(seconds, 1),
        "checks_per_second": round(checks / seconds, 1),
        "kinds": Counter(kind for kind, *_ in found),
        "wrong_verdicts": Counter(kind for kind, right, *_ in found if not right),
        "statuses": {
            k: Counter(s for kind, _, s, _ in found if kind == k) for k in (*TROUBLE, "right", "wrong")
        },
        "processes_left": len(left),
    }
    print(json.dumps(result))


def _is_server(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return b"covey_verify.sandbox.server" in command or b"bwrap" in command


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", type=int, nargs="?", default=5000)
    parser.add_argument("backend", nargs="?", default="landlock")
    given = parser.parse_args()
    main(given.checks, given.backend)
