"""Real pretrained weights: tasks and methods, seed by seed, for docs/results.md.

    python benchmarks/real.py --model MODEL [ROW ...] [--seeds 5]   # train what is missing
    python benchmarks/real.py --write                               # renew the page's tables

MODEL is SmolLM2-135M-Instruct as a hub id, a folder or a GGUF file; for the row `base`, Gemma 3 270M. A row
is a config with settings; `--list` prints them all. A run whose numbers are in benchmarks/results/real.jsonl
is not trained again, so a stopped campaign continues. The tables are of bfloat16 products; `--precision
float32` keeps records to compare with.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from covey.insight.evidence import student
from covey.models.kernels.build import tested_kernels
from covey.runs.folder import read_numbers
from covey.runs.reader import stages_in
from covey_verify.machine import processor_name

ROOT = Path(__file__).parents[1]
RECORDS = Path(__file__).parent / "results" / "real.jsonl"
PAGE = ROOT / "docs" / "results.md"
PAGE_PROCESSOR = "AMD EPYC, AVX-512 with bfloat16"
"""The processor that the page names; costs are of it alone, for another takes another time."""


@dataclass(frozen=True)
class Row:
    """One row of the page: a config and what is changed in it."""

    table: str
    words: str
    config: str
    settings: Sequence[str] = ()

    @property
    def command(self) -> list[str]:
        """The command as a user writes it, without model, seed and output."""
        program = ["python"] if self.config.endswith(".py") else ["covey", "train"]
        return [*program, self.config, *self.settings]


FACTS = "src/covey/config/recipes/demo_real.yaml"
ROWS = {
    "facts": Row("tasks", "JSON facts", FACTS),
    "dates": Row("tasks", "dates, README's own task", "examples/dates/run.yaml"),
    "base": Row("tasks", "dates, Gemma 3 270M", "examples/real/base_model.yaml"),
    "word_sums": Row("tasks", "stories with one calculation", "examples/real/word_sums.yaml"),
    "svamp": Row("tasks", "SVAMP", "examples/real/svamp.yaml"),
    "instructions": Row("tasks", "strict instructions", "examples/real/instructions.yaml"),
    "calculator": Row("tasks", "a calculator as a tool", "examples/real/calculator.yaml"),
    "preferences": Row("tasks", "DPO on pairs of its own", "examples/real/preferences.yaml"),
    "trl": Row("methods", "DAPO by TRL 1.16", "benchmarks/real_trl.py"),
    "grpo": Row("methods", "GRPO", FACTS, ("--algorithm", "grpo")),
    "dr_grpo": Row("methods", "Dr. GRPO", FACTS, ("--algorithm", "dr_grpo")),
    "rloo": Row(
        "methods",
        "RLOO, one update a batch",
        FACTS,
        ("--algorithm", "rloo", "--train.updates_per_batch", "1"),
    ),
    "ppo": Row(
        "methods",
        "PPO, a critic on the policy's trunk",
        FACTS,
        ("--algorithm", "{name: ppo, critic: {trunk: policy}}"),
    ),
    "rejection": Row("methods", "rejection sampling, then SFT", "examples/real/rejection.yaml"),
    "rank_1": Row("weights", "rank 1", FACTS, ("--lora.rank", "1")),
    "rank_64": Row("weights", "rank 64", FACTS, ("--lora.rank", "64")),
    "rate_1e-4": Row("weights", "rank 16, rate 1e-4", FACTS, ("--train.lr", "1e-4")),
    "rate_1e-3": Row("weights", "rank 16, rate 1e-3", FACTS, ("--train.lr", "1e-3")),
    "full": Row("weights", "all weights, rate 1e-5", FACTS, ("--lora", "null", "--train.lr", "1e-5")),
}


def train(row: Row, seed: int, precision: str, model: str, folder: Path) -> dict[str, object]:
    """Train one row from one seed as a user does, and return its record.

    TRL's script has a precision of its own, bfloat16.

    Raises SystemExit if the command fails.
    """
    options = ["--model", model, "--seed", str(seed), "--output", str(folder)]
    if row.command[0] == "covey":
        options += ["--precision", precision]
    # `covey` and `python` are those of this interpreter.
    module = ["-m"] if row.command[0] == "covey" else []
    command = [sys.executable, *module, *row.command[1 - len(module) :], *options]
    started = time.monotonic()
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(child.pid, 0)  # this child's CPU time and memory, and nobody else's
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with {code}: see {folder}.log")
    return {
        **outcome(folder),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "seconds": round(time.monotonic() - started, 1),
        "peak_mb": used.ru_maxrss // 1024,
    }


def outcome(folder: Path) -> dict[str, object]:
    """Return what a run's first and last evaluations on held-out problems say, over all of its stages."""
    if (folder / "outcome.json").is_file():  # TRL's
        return json.loads((folder / "outcome.json").read_text())
    stages = stages_in(folder) or [folder]
    evaluations = [line for stage in stages for line in read_numbers(stage, "evals.jsonl")]
    before, after = evaluations[0], evaluations[-1]
    steps = [line for stage in stages for line in read_numbers(stage, "metrics.jsonl")]
    return {
        "problems": after["problems"],
        "greedy": [before["greedy"], after["greedy"]],
        "sampled": [before["pass@1"], after["pass@1"]],
        "completions": int(sum(line.get("rollout/scored", 0) for line in steps)),
    }


def read_records() -> list[dict[str, object]]:
    """Return the records that are kept."""
    return [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.is_file() else []


# --- the page -------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> str:
    """Return the mean over seeds with Student's 95 % interval, such as `81 [71, 90]`; both values of two."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{100 * mean:.0f}"
    if len(values) == 2:  # their interval would be most of the scale
        return f"{100 * mean:.0f} ({100 * min(values):.0f}, {100 * max(values):.0f})"
    quantile = student(NormalDist().inv_cdf(0.975), len(values) - 1)
    half = quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5
    low = max(0.0, mean - half)
    high = min(1.0, mean + half)
    return f"{100 * mean:.0f} [{100 * low:.0f}, {100 * high:.0f}]"


def table(name: str, records: Sequence[dict[str, object]]) -> str:
    """Return one of the page's tables as Markdown."""
    runs = defaultdict(list)
    for record in records:
        if record["precision"] == "bfloat16":
            runs[record["row"]].append(record)
    lines = [
        "| | seeds | greedy, % | sampled, % | points per CPU hour | CPU minutes | memory, GB | command |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, row in ROWS.items():
        if row.table != name or key not in runs:
            continue
        of = runs[key]
        columns = {
            side: [[record[side][i] for record in of] for i in (0, 1)] for side in ("greedy", "sampled")
        }
        costs = newest_costs(of)
        if not costs:
            raise SystemExit(
                f"{key}: no run on the page's processor, {PAGE_PROCESSOR}, so its cost is unknown"
            )
        hours = np.mean([record["cpu_seconds"] for record in costs]) / 3600
        before, after = columns["sampled"]
        gain = 100 * (np.mean(after) - np.mean(before))
        cells = [
            row.words,
            str(len(of)),
            *(f"{100 * np.mean(first):.0f} → {interval(last)}" for first, last in columns.values()),
            f"{gain / hours:.0f}",
            f"{60 * hours:.1f}",
            f"{np.max([record['peak_mb'] for record in of]) / 1000:.1f}",
            f"`{shlex.join(row.command)}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    missing = [key for key, row in ROWS.items() if row.table == name and key not in runs]
    sentence = f"Not measured yet: {', '.join(missing)}." if missing else ""
    return "\n\n".join(filter(None, ["\n".join(lines) if len(lines) > 2 else "", sentence]))


def newest_costs(records: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Return the records of the newest day on the page's processor: covey, and the machine, change by day."""
    here = [record for record in records if record["processor"] == PAGE_PROCESSOR]
    newest = max((str(record["date"]) for record in here), default="")
    return [record for record in here if record["date"] == newest]


def write_page(records: Sequence[dict[str, object]]) -> None:
    """Renew the tables of docs/results.md, which stand between comments with their names."""
    text = PAGE.read_text()
    for name in dict.fromkeys(row.table for row in ROWS.values()):
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, rest = text.split(start)
        _, after = rest.split(end, 1)
        text = f"{before}{start}\n{table(name, records)}\n\n{end}{after}"
    PAGE.write_text(text)


def main() -> None:
    """Train what is missing, or renew the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", default=list(ROWS))
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--runs", type=Path, default=Path(tempfile.gettempdir()) / "covey-benchmarks" / "real"
    )
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--write", action="store_true", help="renew docs/results.md and train nothing")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{key:12} {' '.join(row.command)}" for key, row in ROWS.items()))
        return
    if arguments.write:
        write_page(read_records())
        return
    unknown = set(arguments.rows) - set(ROWS)
    if unknown:
        parser.error(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    arguments.runs.mkdir(parents=True, exist_ok=True)
    kernels = tested_kernels()
    instructions = kernels.instructions if kernels else "torch"
    for seed in range(arguments.seeds):
        for key in arguments.rows:
            run = (key, seed, arguments.precision)
            if any((record["row"], record["seed"], record["precision"]) == run for record in read_records()):
                continue
            folder = arguments.runs.resolve() / "-".join(map(str, run))
            numbers = train(ROWS[key], seed, arguments.precision, arguments.model, folder)
            record = {
                "row": key,
                "seed": seed,
                "precision": arguments.precision,
                **numbers,
                "processor": f"{processor_name()}, {instructions}",
                "date": str(dt.date.today()),
            }
            with RECORDS.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
