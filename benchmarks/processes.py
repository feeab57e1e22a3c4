"""Two processes on two cores beside one process with two threads: where a step's time goes.

    python benchmarks/processes.py [--rounds 3] [--steps 8]

The runs take turns, so that other work on the machine hits all of them. The least and the median of the
steps' seconds are printed: the least is what other work has disturbed the least.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
    "rollout": {"group_size": 8, "prompts_per_step": 32, "max_tokens": 40},
    "algorithm": "grpo",
    "train": {"lr": 1e-4, "save_every": 1000},
    "eval": {"problems": 4, "samples": 1},
}
WAYS = {"1 process, 1 thread": (1, 1), "1 process, 2 threads": (1, 2), "2 processes": (2, 1)}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "mine.py").write_text("def varied(completion):\n    return sum(map(ord, completion)) % 7\n")
        (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
        for n in range(arguments.rounds):
            for way, (processes, threads) in WAYS.items():
                out = folder / f"{n}-{processes}-{threads}"
                settings = ("--output", out, "--threads", threads, "--launch.processes", processes)
                command = [sys.executable, "-m", "covey", "train", folder / "run.yaml", *settings]
                subprocess.run(
                    [str(c) for c in (*command, "--train.steps", arguments.steps)],
                    stdout=subprocess.DEVNULL,
                    check=False,
                )
                for line in (out / "timings.jsonl").read_text().splitlines()[1:]:
                    for name, value in json.loads(line).items():
                        if name in ("seconds/rollout", "seconds/update"):
                            seen[way, name].append(value)
    print("| | rollout, least | median | update, least | median |\n|---|---|---|---|---|")
    for way in WAYS:
        cells = [seen[way, f"seconds/{phase}"] for phase in ("rollout", "update")]
        numbers = (f"{f(of):.2f}" for of in cells for f in (min, statistics.median))
        print(f"| {way} | {' | '.join(numbers)} |")


if __name__ == "__main__":
    main()
