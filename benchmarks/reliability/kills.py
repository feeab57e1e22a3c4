"""Kill runs by `kill -9` at random instants, up to five times each; then let them end, and compare.

    python benchmarks/reliability/kills.py [--kills 300] [--signal TERM] [--write]

Every trial is counted as identical only if weights, metric stream, evaluations and rollout log are
those of an uninterrupted run, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from harness import CONFIGS, child, covey, fingerprint, report, wait, warm_up, write_config

MOST = 5


def trial(config: Path, whole: str, seconds: float, number: int, rng: random.Random) -> Counter[str]:
    """Kill one run 1 to 5 times; then compare its end with ``whole``."""
    found: Counter[str] = Counter(runs=1)
    run = config.parent / "run"
    shutil.rmtree(run, ignore_errors=True)
    for _ in range(rng.randint(1, MOST)):
        pid = child(covey("train", str(config), "--output", str(run)))
        time.sleep(rng.uniform(0.0, seconds))
        os.kill(pid, number)
        started = time.monotonic()
        code = wait(pid)
        found["hits"] += code in (-number, 75)
        found["wrong exit"] += code not in (-number, 75, 0)
        found["slowest end, ms"] = max(found["slowest end, ms"], int(1000 * (time.monotonic() - started)))
    code = wait(child(covey("train", str(config), "--output", str(run))))
    found["resumed"] += code in (0, 1)
    found["identical"] += fingerprint(run) == whole
    return found


def main() -> None:
    """All configurations in turn, until there were enough kills."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=300, help="signals that hit a living process, in all")
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL")
    parser.add_argument("--configs", type=int, default=len(CONFIGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    number = signal.Signals[f"SIG{arguments.signal}"].value
    rng, total = random.Random(arguments.seed), Counter[str]()
    warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        wholes = {}
        for i, (name, settings) in enumerate(list(CONFIGS.items())[: arguments.configs]):
            config = write_config(Path(scratch) / str(i), settings)
            started = time.monotonic()
            code = wait(child(covey("train", str(config), "--output", str(config.parent / "run"))))
            assert code in (0, 1), (name, code)
            wholes[name] = (config, fingerprint(config.parent / "run"), time.monotonic() - started)
        while total["hits"] < arguments.kills:
            for config, whole, seconds in wholes.values():
                found = trial(config, whole, seconds, number, rng)
                slowest = max(total["slowest end, ms"], found["slowest end, ms"])
                total.update(found)
                total["slowest end, ms"] = slowest
    ok = total["identical"] == total["resumed"] == total["runs"] and not total["wrong exit"]
    figures = {"configs": len(wholes), **total, "ok": ok}
    name = "random kill -9" if arguments.signal == "KILL" else "random SIGTERM"
    report(name, figures, arguments.write)
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()
