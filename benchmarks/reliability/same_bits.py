"""What must not change a bit: threads, reward workers. What must not grow: memory, files, threads.

python benchmarks/reliability/same_bits.py hashes [--write]
python benchmarks/reliability/same_bits.py soak [--steps 1000] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
from harness import CONFIGS, fingerprint, report, write_config

WORKERS = """
import covey.rewards.scorer, sys
covey.rewards.scorer.SHARED_SIZE = int(sys.argv[1])
from covey.cli import main
sys.exit(main(["train", *sys.argv[2:], "--json"]))
"""
SLOW = """
import random, time
from covey import reward

@reward(concurrent=True)
def varied(completion):
    time.sleep(random.Random().random() / 500)  # answers come in another order every time
    return len(completion) + sum(map(ord, completion)) % 7
"""

WITH_CANARIES = """
from covey import reward

@reward(example=lambda row: "mmmmmmm", counterexample=lambda row: "", format_only=False, verdict=False)
def varied(completion):
    return len(completion) / 7 + sum(map(ord, completion)) % 7 / 70 if completion else 0.0
"""


def hashes(folder: Path) -> dict[str, object]:
    """Every configuration with 1 and 2 threads, 1 and 8 reward workers, twice."""
    distinct = {}
    for i, (name, settings) in enumerate(CONFIGS.items()):
        config = write_config(folder / str(i), settings)
        (config.parent / "rewards.py").write_text(SLOW)
        found = set()
        for n, (threads, workers) in enumerate(((1, 1), (2, 1), (1, 8), (2, 8))):
            run = config.parent / f"run{n}"
            command = [sys.executable, "-c", WORKERS, str(workers), str(config), "--output", str(run)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(
                [*command, "--threads", str(threads)], env=environment, capture_output=True, check=False
            )
            assert done.returncode in (0, 1), done.stderr[-500:]
            found.add(fingerprint(run))
        distinct[name] = len(found)
    return {
        "runs": 4 * len(distinct),
        "distinct hashes by config": distinct,
        "ok": set(distinct.values()) == {1},
    }


def soak(folder: Path, steps: int) -> dict[str, object]:
    """One long run; memory, open files, threads and children by the step, the first tenth left out.

    A built-in verifier and a user's function are asked about their canaries in every step.
    """
    from covey.config.load import load_config
    from covey.system.console import RunConsole
    from covey.system.signals import StopSignal
    from covey.training.pipeline import run_pipeline

    samples: list[tuple[int, int, int, int]] = []

    class Watching(RunConsole):
        """Notes what the process holds after every step."""

        def step(self, *_: object) -> None:
            process = Path("/proc/self")
            pages = int((process / "statm").read_text().split()[1])
            children = [pid for task in process.glob("task/*/children") for pid in task.read_text().split()]
            files = list((process / "fd").iterdir())
            samples.append((pages * 4, len(files), threading.active_count(), len(children)))

    config = write_config(
        folder / "soak",
        {
            "algorithm": "grpo",
            "train": {"steps": steps, "save_every": steps, "lr": 1e-6},
            "eval": {"problems": 2, "samples": 1},
            "rewards": [{"rewards.py:varied": {}}, {"math_answer": {"rule": "answer_tag", "verdict": True}}],
        },
    )
    (config.parent / "rewards.py").write_text(WITH_CANARIES)
    resolved = load_config(config, ["--output", str(folder / "run")])
    run_pipeline(resolved, Watching(quiet=True), StopSignal())
    kept = np.array(samples[len(samples) // 10 :], dtype=float)
    slope = float(np.polyfit(np.arange(len(kept)), kept[:, 0], 1)[0])
    half = len(kept) // 2
    later = float(np.polyfit(np.arange(half), kept[-half:, 0], 1)[0])
    # In the second half: the process for formulas starts when the first one is met.
    spread = dict(zip(("open files", "threads", "child processes"), kept[-half:, 1:].T, strict=True))
    constant = {name: f"{int(v.min())} to {int(v.max())}" for name, v in spread.items()}
    return {
        "steps": steps,
        "KiB per step": round(slope, 2),
        "KiB per step, second half": round(later, 2),
        "resident, MiB": f"{kept[0, 0] / 1024:.1f} to {kept[-1, 0] / 1024:.1f}",
        **constant,
        "ok": later < 1 and all(np.ptp(v) == 0 for v in spread.values()),
    }


def main() -> None:
    """One of the two."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("hashes", "soak"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        figures = hashes(folder) if arguments.kind == "hashes" else soak(folder, arguments.steps)
    names = {"hashes": "1 and 2 threads, 1 and 8 reward workers", "soak": "soak with canaries"}
    report(names[arguments.kind], figures, arguments.write)
    raise SystemExit(not json.loads(json.dumps(figures["ok"])))


if __name__ == "__main__":
    main()
