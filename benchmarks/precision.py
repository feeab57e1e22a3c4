"""Does `precision: bfloat16` learn as well as float32? Both from the same cold starts, also with adapters.

    python benchmarks/precision.py [--seeds 0 1 2] [--tasks ...] [--jobs 1] [--write]

The tasks are the demo's and that of examples/tools.yaml, as they stand, only that nothing stops before the
last step, and the demo's with adapters. Each seed has one cold start, in float32, from which both go on with
the same prompts and random numbers. Runs are kept in covey-benchmarks/precision of the temporary folder,
so that the same command goes on after
an interruption. With --write the table goes to benchmarks/results/precision.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from covey.insight.stages import points
from covey.runs.estimates import Evaluation, over_seeds
from lanes import machine, merged, records
from presets import RESULTS, ROOT

FOLDER = Path(tempfile.gettempdir()) / "covey-benchmarks" / "precision"
DEMO = "src/covey/config/recipes/demo.yaml"
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "the demo's sums": (DEMO, {}),
    "products, with a tool": ("examples/tools.yaml", {}),
    "the demo's sums, adapters": (DEMO, {"lora": {"rank": 16}, "train": {"lr": 1e-3}}),
}
"""Files, and what is changed in the second of their stages."""
PRECISIONS = ("float32", "bfloat16")
STEPS, EVERY = 60, 20
RL = {
    "train": {"steps": STEPS, "stop_at": None, "save_every": 10_000},
    "eval": {"every": EVERY, "samples": 4},
}


def stage(task: str, number: int) -> dict[str, Any]:
    """A stage of a task's file as a run of its own."""
    settings = yaml.safe_load((ROOT / TASKS[task][0]).read_text())
    stages = settings.pop("stages")
    return merged(settings, stages[number])


def train(name: str, settings: dict[str, Any]) -> Path:
    """Train, unless it was done before; -> the run."""
    folder, file = FOLDER / name, FOLDER / f"{name}.yaml"
    if not (folder / "result.json").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump({**settings, "output": str(folder), "threads": 1}))
        command = "resume" if (folder / "config.yaml").exists() else "train"
        asked = str(folder if command == "resume" else file)
        done = subprocess.run(
            [sys.executable, "-m", "covey", command, asked], capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 1):  # 1: it has not learned, which is a result
            raise SystemExit(f"{name}: {done.stderr}")
    return folder


def pair(task: str, seed: int) -> list[Path]:
    """A cold start, and from it a run in either precision."""
    file, changes = TASKS[task]
    name = f"{Path(file).stem}-{seed}"
    start = train(f"{name}-start", {**stage(task, 0), "seed": seed, "precision": "float32"})
    settings = merged(merged(stage(task, 1), RL), changes)
    settings |= {"seed": seed, "model": str(start / "final")}
    kind = f"{name}-{'-'.join(changes)}" if changes else name
    return [train(f"{kind}-{precision}", {**settings, "precision": precision}) for precision in PRECISIONS]


def sampled(runs: Sequence[Path], step: int) -> np.ndarray:
    """Fraction of samples that are correct, for each seed and problem. (S, n)."""
    found = [next(e for e in records(run, "evals") if e["step"] == step) for run in runs]
    return np.stack([Evaluation.from_record(e).pass_rate for e in found])


def rows_of(task: str, pairs: Sequence[Sequence[Path]]) -> list[str]:
    """The table's rows of a task: one for each precision, one for their difference."""
    lines, steps = [], range(0, STEPS + 1, EVERY)
    for precision, runs in zip(PRECISIONS, zip(*pairs, strict=True), strict=True):
        seconds = np.median([records(run, "timings")[-1]["elapsed"] for run in runs])
        cells = [str(over_seeds(sampled(runs, step))) for step in steps]
        lines.append(f"| {task} | {precision} | {' | '.join(cells)} | {seconds:.0f} |")
    full, half = zip(*pairs, strict=True)
    gaps = [points(over_seeds(sampled(half, s) - sampled(full, s), low=-1, high=1)) for s in steps]
    return [*lines, f"| {task} | difference | {' | '.join(gaps)} | |"]


def report(found: dict[str, list[list[Path]]], seeds: int) -> str:
    """The page of results."""
    steps = " | ".join(f"after {step} steps" for step in range(EVERY, STEPS + 1, EVERY))
    head = f"| task | precision | cold start | {steps} | seconds |"
    lines = [line for task, pairs in found.items() for line in rows_of(task, pairs)]
    about = (
        f"Sampled accuracy on held-out problems, {seeds} seeds, four samples a problem, with 95 % intervals "
        "over seeds and problems. Both precisions go on from the same cold start, with the same prompts and "
        "random numbers. Seconds are medians of a run's, evaluations counted."
    )
    title, rule = "# bfloat16 products beside float32", "|---" * (head.count("|") - 1) + "|"
    return "\n".join([title, "", machine("precision"), "", about, "", head, rule, *lines, ""])


def main() -> None:
    """Train what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/precision.md")
    arguments = parser.parse_args()
    asked = list(product(arguments.tasks, arguments.seeds))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = list(pool.map(lambda key: pair(*key), asked))
    found = {
        task: [run for (name, _), run in zip(asked, runs, strict=True) if name == task]
        for task in arguments.tasks
    }
    text = report(found, len(arguments.seeds))
    print(text)
    if arguments.write:
        (RESULTS / "precision.md").write_text(text)


if __name__ == "__main__":
    main()
