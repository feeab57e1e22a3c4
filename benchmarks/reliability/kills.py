"""Kill runs by `kill -9` at random instants, up to five times each; then let them end, and compare.

    python benchmarks/reliability/kills.py [--kills 300] [--signal TERM] [--configs critic stage] [--write]

Every trial is counted as identical only if weights, metric stream, evaluations and rollout log are
those of an uninterrupted run, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle
from pathlib import Path

from harness import CONFIGS, child, covey, fingerprint, report, wait, warm_up, write_config

MOST = 5
SLOWEST = "slowest end, ms"


def trial(config: Path, whole: str, seconds: float, number: int, rng: random.Random) -> Counter[str]:
    """Kill one run 1 to 5 times; then compare its end with ``whole``."""
    found: Counter[str] = Counter(runs=1)
    run = config.parent / "run"
    shutil.rmtree(run, ignore_errors=True)
    for _ in range(rng.randint(1, MOST)):
        pid = child(covey("train", str(config), "--output", str(run)))
        time.sleep(rng.uniform(0.0, 0.8 * seconds))  # whatever is left of it is hit by the tries after it
        os.kill(pid, number)
        started = time.monotonic()
        code = wait(pid)
        found["hits"] += code in (-number, 75)
        found["wrong exit"] += code not in (-number, 75, 0)
        found[SLOWEST] = max(found[SLOWEST], int(1000 * (time.monotonic() - started)))
        if code == 0:
            break  # it had ended before
    code = wait(child(covey("train", str(config), "--output", str(run))))
    found["resumed"] += code in (0, 1)
    found["identical"] += fingerprint(run) == whole
    return found


def uninterrupted(config: Path) -> tuple[Path, str, float]:
    """A whole run: its config, its fingerprint and how long it took."""
    started = time.monotonic()
    code = wait(child(covey("train", str(config), "--output", str(config.parent / "run"))))
    assert code in (0, 1), (config, code)
    return config, fingerprint(config.parent / "run"), time.monotonic() - started


def main() -> None:
    """All configurations in turn, until there were enough kills."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=300, help="signals that hit a living process, in all")
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL")
    parser.add_argument("--configs", nargs="+", default=[""], help="parts of their names; all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    number = signal.Signals[f"SIG{arguments.signal}"].value
    rng = random.Random(arguments.seed)
    wanted = {n: c for part in arguments.configs for n, c in CONFIGS.items() if part in n}
    totals = {name: Counter[str]() for name in wanted}
    warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        wholes = dict[str, tuple[Path, str, float]]()
        for name in cycle(wanted):
            if sum(t["hits"] for t in totals.values()) >= arguments.kills and all(totals.values()):
                break
            if name not in wholes:
                wholes[name] = uninterrupted(write_config(Path(scratch) / str(len(wholes)), wanted[name]))
            found, total = trial(*wholes[name], number, rng), totals[name]
            slowest = max(total[SLOWEST], found[SLOWEST])
            total.update(found)
            total[SLOWEST] = slowest
            print(f"{name}: {dict(total)}", file=sys.stderr)
    counted = ("runs", "hits", "wrong exit", "resumed", "identical")
    sums = {what: sum(t[what] for t in totals.values()) for what in counted}
    ok = sums["identical"] == sums["resumed"] == sums["runs"] and not sums["wrong exit"]
    by_config = {name: [t["hits"], t["runs"], t["identical"]] for name, t in totals.items()}
    slowest = max(t[SLOWEST] for t in totals.values())
    figures = {**sums, SLOWEST: slowest, "hits, runs, identical by config": by_config, "ok": ok}
    name = "random kill -9" if arguments.signal == "KILL" else "random SIGTERM"
    report(name, figures, arguments.write)
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()
