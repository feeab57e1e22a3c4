"""Kill one of two processes that train together, at random instants, and compare how the run ends.

    python benchmarks/reliability/ranks.py [--trials 12] [--write]

Each run loses one to three processes: the one that works for a rank or the one that waits for it. The
launcher has to notice, and the run has to end by itself with the bits of one that was left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from harness import CONFIGS, fingerprint, report, write_config

NAMES = ("accumulation, dynamic sampling, adaptive coefficients", "cold start, then RL", "adapters")


def launched(config: Path, run: Path) -> subprocess.Popen[bytes]:
    """The command, which starts two processes."""
    settings = ("--output", str(run), "--launch.processes", "2", "--launch.restarts", "9")
    command = [sys.executable, "-m", "covey", "train", str(config), *settings]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ranks(command: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes of all ranks, those that wait and those that work, once they are all there."""
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):
        (launcher,) = psutil.Process(command.pid).children()
        waiting = launcher.children()
        return [*waiting, *(p for w in waiting for p in w.children())]
    return []


def trial(config: Path, whole: str, seconds: float, rng: random.Random) -> Counter[str]:
    """One run with its losses."""
    found: Counter[str] = Counter(runs=1)
    run = config.parent / f"run-{rng.random()}"
    command = launched(config, run)
    for _ in range(rng.randint(1, 3)):
        time.sleep(rng.uniform(0.1, seconds))
        if victims := ranks(command):
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(victims).kill()
                found["kills"] += 1
    code = command.wait(timeout=1200)
    found["ended"] += code in (0, 1)
    found["identical"] += fingerprint(run) == whole
    return found


def main() -> None:
    """All configurations in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rng, total = random.Random(arguments.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        wholes = []
        for n in range(arguments.trials):
            if n < len(NAMES):
                config = write_config(Path(scratch) / str(n), CONFIGS[NAMES[n]])
                started = time.monotonic()
                launched(config, config.parent / "run").wait()
                wholes.append((config, fingerprint(config.parent / "run"), time.monotonic() - started))
            total.update(trial(*wholes[n % len(NAMES)], rng))
            print(dict(total), flush=True)
    ok = total["identical"] == total["ended"] == total["runs"]
    report("one of two processes killed", {"configs": len(wholes), **total, "ok": ok}, arguments.write)
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()
