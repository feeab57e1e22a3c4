"""The demo over ten seeds: whether it learns every time, and how long it takes.

    python benchmarks/demo_seeds.py [--seeds 10] [--jobs 1] [--write]

Prints a table; with --write it goes to benchmarks/results/demo_seeds.md with date and machine.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from covey_verify.machine import available_cpus

RESULTS = Path(__file__).parent / "results" / "demo_seeds.md"


def run_demo(seed: int, folder: Path, threads: int) -> dict[str, float]:
    """One demo as a user runs it; held-out accuracy in per cent before and after, and its seconds."""
    started = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "covey",
        "demo",
        "--seed",
        str(seed),
        "--output",
        str(folder),
        "--threads",
        str(threads),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode not in (0, 1):
        raise SystemExit(f"seed {seed} failed: {done.stderr[-500:]}")
    evals = [json.loads(line) for line in (folder / "2-rl" / "evals.jsonl").read_text().splitlines()]
    before, after = evals[0], evals[-1]
    return {
        "seed": seed,
        "problems": after["problems"],
        "greedy before": 100 * before["greedy"],
        "greedy after": 100 * after["greedy"],
        "sampled before": 100 * before["pass@1"],
        "sampled after": 100 * after["pass@1"],
        "seconds": seconds,
    }


def good(row: dict[str, float]) -> bool:
    """The bar: a weak start, 90 % greedy at the end, sampled accuracy at least doubled."""
    return (
        row["sampled before"] <= 40
        and row["greedy after"] >= 90
        and row["sampled after"] >= 2 * row["sampled before"]
    )


def table(rows: list[dict[str, float]]) -> str:
    """Markdown."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} | bar |", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| {' | '.join(f'{row[n]:.0f}' for n in names)} | {'reached' if good(row) else 'missed'} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the seeds one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="demos at a time, which share the cores")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/demo_seeds.md")
    arguments = parser.parse_args()
    threads = max(1, available_cpus() // arguments.jobs)
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        folders = [Path(folder) / str(seed) for seed in range(arguments.seeds)]
        for row in pool.map(run_demo, range(arguments.seeds), folders, [threads] * arguments.seeds):
            rows.append(row)
            print(json.dumps(row), flush=True)
    reached = sum(map(good, rows))
    text = (
        f"# The demo over {len(rows)} seeds\n\n"
        f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}. `python benchmarks/demo_seeds.py {' '.join(sys.argv[1:])}`\n\n"
        "Accuracy in per cent on so many held-out problems; seconds are of the whole command, Python start "
        f"counted, {arguments.jobs} at a time with {threads} threads each. The bar: at most 40 % sampled "
        "after the cold start, at least 90 % greedy in the end, sampled accuracy at least doubled. Reached "
        f"by {reached} of {len(rows)}.\n\n{table(rows)}\n"
    )
    print(text)
    if arguments.write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
