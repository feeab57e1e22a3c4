"""The recipes of `examples`, whole, as a user runs them: what each stage added, and how long it took.

    python benchmarks/recipes.py [r1_zero r1 sft_dpo_rl iterative_grpo] [--runs FOLDER] [--write]

Runs that FOLDER has already are not run again, so that a stopped one goes on. With --write the tables go to
benchmarks/results/recipes.md and the curves of R1-Zero to benchmarks/results/r1_zero.svg.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from covey.insight.chart import Line, Panel, chart
from covey.insight.stages import stage_table
from covey.runs.folder import read_numbers
from covey.runs.reader import stages_in

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
RECIPES = ("r1_zero", "r1", "sft_dpo_rl", "iterative_grpo")
CURVES = {
    "tokens of a completion": {
        "all": "length/mean",
        "correct": "length/correct",
        "incorrect": "length/incorrect",
    },
    "format": {"all": "reward/answer_format/mean"},
    "signs of reflection": {
        "all": "text/reflection",
        "correct": "text/reflection/correct",
        "incorrect": "text/reflection/incorrect",
    },
    "correct": {"all": "accuracy"},
}
"""Panel -> line -> metric of the reinforcement stage."""
POINTS = 5
"""Steps averaged into a point."""


def run(name: str, folder: Path) -> float:
    """One recipe by the command line, on one thread; CPU seconds of this and earlier tries."""
    command = [sys.executable, "-m", "covey", "train", f"examples/{name}.yaml", "--output", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before = cpu_seconds()
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{name} ended with {done.returncode}")
    spent = folder / "cpu_seconds.txt"
    with spent.open("a") as file:
        file.write(f"{cpu_seconds() - before}\n")
    return sum(map(float, spent.read_text().split()))


def cpu_seconds() -> float:
    """Of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def section(name: str, folder: Path, seconds: float) -> str:
    """The table of a recipe."""
    table = "\n".join(stage_table(stages_in(folder)))
    return f"## covey train examples/{name}.yaml\n\n{seconds:.0f} CPU seconds.\n\n```\n{table}\n```\n"


def curves(folder: Path) -> str:
    """Length, format, reflection and accuracy of R1-Zero's reinforcement, as an SVG."""
    metrics = read_numbers(stages_in(folder)[-1], "metrics.jsonl")
    panels = []
    for title, lines in CURVES.items():
        drawn = []
        for name, metric in lines.items():
            known = [(m["step"] + 1, m[metric]) for m in metrics if m.get(metric) is not None]
            means = [np.mean(known[n : n + POINTS], axis=0) for n in range(0, len(known), POINTS)]
            drawn.append(Line(name, [x for x, _ in means], [y for _, y in means]))
        panels.append(Panel(title, drawn))
    return chart(panels, "R1-Zero on the small model", across=2, wide=300, high=150)


def main() -> None:
    """Run what is asked for, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=RECIPES)
    parser.add_argument(
        "--runs", type=Path, default=Path(tempfile.gettempdir()) / "covey-benchmarks" / "recipes"
    )
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    sections = []
    for name in arguments.names:
        folder = arguments.runs.resolve() / name
        sections.append(section(name, folder, run(name, folder)))
        print(sections[-1])
    if not arguments.write:
        return
    if "r1_zero" in arguments.names:
        (RESULTS / "r1_zero.svg").write_text(curves(arguments.runs / "r1_zero"))
    machine = f"{platform.machine()}, one thread, Python {platform.python_version()}"
    head = f"# The recipes, stage by stage\n\n{dt.date.today()}, {machine}, by `benchmarks/recipes.py`"
    (RESULTS / "recipes.md").write_text("\n\n".join([head, *sections]))


if __name__ == "__main__":
    main()
