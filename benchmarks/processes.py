"""Two processes on two cores beside one process with two threads: what a step costs.

    python benchmarks/processes.py [--rounds 1] [--steps 10]

The ways take turns, so that other work on the machine hits all of them. Seconds of processor time are those
of a long run less those of a short one, over all processes; where other work disturbs the clock they say more
than the clock does. The least of the steps' seconds by the clock is given as well.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import yaml

CONFIG = {
    "model": "tiny",
    "data": {"task": "last_digit", "test_size": 8},
    "rewards": ["mine.py:varied"],
    "rollout": {"group_size": 8, "prompts_per_step": 16, "max_tokens": 32},
    "algorithm": "grpo",
    "train": {"lr": 1e-4, "save_every": 1000},
    "eval": {"problems": 4, "samples": 1},
}
WAYS = {"1 process, 1 thread": (1, 1), "1 process, 2 threads": (1, 2), "2 processes, 1 thread each": (2, 1)}
SHORT = 2


def spent() -> float:
    """Seconds of processor time of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    cost, clock = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "mine.py").write_text("def varied(completion):\n    return sum(map(ord, completion)) % 7\n")
        (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
        for n in range(arguments.rounds):
            for way, (processes, threads) in WAYS.items():
                took = {}
                for steps in (SHORT, arguments.steps):
                    out = folder / f"{n}-{processes}-{threads}-{steps}"
                    settings = ("--output", out, "--threads", threads, "--launch.processes", processes)
                    command = (sys.executable, "-m", "covey", "train", folder / "run.yaml", *settings)
                    begun = spent()
                    subprocess.run(
                        [str(c) for c in (*command, "--train.steps", steps)],
                        stdout=subprocess.DEVNULL,
                        check=False,
                    )
                    took[steps] = spent() - begun
                    for line in (out / "timings.jsonl").read_text().splitlines()[1:]:
                        times = json.loads(line)
                        clock[way].append(
                            sum(times[f"seconds/{p}"] for p in ("rollout", "prepare", "update"))
                        )
                cost[way].append((took[arguments.steps] - took[SHORT]) / (arguments.steps - SHORT))
    print("| | processor, s a step | clock, s, the fastest step |\n|---|---|---|")
    for way in WAYS:
        print(f"| {way} | {min(cost[way]):.2f} | {min(clock[way]):.2f} |", flush=True)


if __name__ == "__main__":
    main()
