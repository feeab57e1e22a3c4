"""What a step costs, seconds and memory, over group size, length, vocabulary and model; what is predicted.

    python benchmarks/cost.py [--threads 2] [--steps 3] [--only G32 V64k] [--write]

Each cell is a run of `covey train` in a process of its own, from random weights that never end a completion.
Memory is the run's own forecast (`env.json`), made before its first step. Seconds follow from the matrix
products, the attention, the vocabulary and the decode steps of a cell, at rates fitted on the other cells.
With --write the table and the curves go to benchmarks/results/cost.{md,svg}.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from covey.insight.chart import Line, Panel, chart
from presets import RESULTS

sys.path.insert(0, str(Path(__file__).parent / "speed"))

import subject

from covey.learner.memory import Shape

GROUP, LENGTH = 8, 128
BASE = dict(zip(subject.NAMES, subject.SHAPES["5M"], strict=True))
CELLS: dict[str, tuple[str, float, Mapping[str, int], int, int]] = {
    "base": ("", 0, {}, GROUP, LENGTH),
    **{f"G{g}": ("group size", g, {}, g, LENGTH) for g in (2, 4, 16, 32)},
    **{f"L{n}": ("completion length", n, {}, GROUP, n) for n in (32, 64, 256, 512)},
    **{f"V{v}": ("vocabulary", v, {"vocab_size": v}, GROUP, LENGTH) for v in (1024, 16_384, 65_536, 151_936)},
    **{
        f"D{d}": ("width", d, {"hidden_size": d, "intermediate_size": 4 * d}, GROUP, LENGTH)
        for d in (128, 512, 768)
    },
    **{f"N{n}": ("layers", n, {"num_hidden_layers": n}, GROUP, LENGTH) for n in (2, 8, 16)},
}
"""name -> what it varies and to what, the model's shape, group size, completion length."""
BASE_VALUE = {
    "group size": GROUP,
    "completion length": LENGTH,
    "vocabulary": BASE["vocab_size"],
    "width": BASE["hidden_size"],
    "layers": BASE["num_hidden_layers"],
}


class Demand(NamedTuple):
    """What some tokens ask for, once through the model."""

    products: float
    attention: float
    """GFLOP."""
    logits: float
    """Billions."""
    decoding: float
    """Thousands of decode steps times layers."""


class Cost(NamedTuple):
    """What a cell cost, and what it had to do."""

    rollout: float
    update: float
    """Seconds of a step."""
    memory: float
    forecast: float
    """MB beside program and libraries."""
    work: list[float]
    """Of sampling, as ``Demand``."""


def worker(cell: str, steps: int, threads: int) -> None:
    """Run a cell and print its cost as JSON."""
    import covey

    _, _, shape, group, length = CELLS[cell]
    subject.SHAPES[cell] = tuple({**BASE, **shape}.values())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subject.build(cell, "equal", "fp32", folder)
        rng = np.random.default_rng(0)
        texts = [" + ".join(map(str, rng.integers(0, 40, 9))) for _ in range(subject.PROMPTS)]
        (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
        covey.train(
            quiet=True,
            model=name,
            threads=threads,
            data={"train": str(folder / "p.jsonl")},
            rewards=[lambda completions, **_: list(map(float, range(len(completions))))],  # no two alike
            algorithm="dr_grpo",
            rollout={"group_size": group, "prompts_per_step": subject.PROMPTS, "max_tokens": length},
            train={"steps": steps, "lr": 1e-6, "save_every": 1000},
            output=str(folder / "run"),
        )
        times = [json.loads(line) for line in (folder / "run/timings.jsonl").read_text().splitlines()]
        metrics = json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[-1])
        roles = json.loads((folder / "run/env.json").read_text())["memory"]
    program = roles.pop("program")
    cost = Cost(
        median(t["seconds/rollout"] for t in times[1:]),
        median(t["seconds/update"] for t in times[1:]),
        max(t["memory/peak_mib"] for t in times) * 2**20 / 1e6 - program / 1e6,
        sum(roles.values()) / 1e6,
        list(work_of(cell, group, metrics["length/mean"])),
    )
    print(json.dumps(cost))


def work_of(cell: str, group: int, length: float, prompt: int = 36) -> Demand:
    """What the completions of a step ask for, once through the model."""
    names = {**dict(zip(subject.NAMES, subject.SHAPES["5M"], strict=True)), **CELLS[cell][2]}
    subject.SHAPES[cell] = tuple(names.values())
    shape = Shape(
        parameters=subject.matrix_parameters(cell) + names["vocab_size"] * names["hidden_size"],
        trained=0,
        vocabulary=names["vocab_size"],
        layers=names["num_hidden_layers"],
        width=names["hidden_size"],
        queries=names["num_attention_heads"],
        keys=names["num_key_value_heads"],
        head=names["head_dim"],
        inner=names["intermediate_size"],
        number=4,
        exact=True,
    )
    completions = subject.PROMPTS * group
    tokens, head = completions * length, shape.vocabulary * shape.width
    inner = shape.parameters - 2 * head  # embeddings are not tied
    attended = completions * (length * prompt + length**2 / 2)
    return Demand(
        products=2e-9 * ((tokens + subject.PROMPTS * prompt) * inner + tokens * head),
        attention=4e-9 * shape.layers * shape.queries * shape.head * attended,
        logits=1e-9 * tokens * shape.vocabulary,
        decoding=1e-3 * tokens / min(completions, 256) * shape.layers,
    )


PARTS = {"rollout": 4, "update": 3}
"""How many parts of the work a phase's seconds follow from."""


def rates(costs: Sequence[Cost], which: str) -> np.ndarray:
    """Seconds by unit of work, least squares of relative errors."""
    seconds = np.array([getattr(c, which) for c in costs])
    amounts = np.array([c.work[: PARTS[which]] for c in costs])
    return np.linalg.lstsq(amounts / seconds[:, None], np.ones(len(costs)))[0]


def predicted(costs: Mapping[str, Cost], which: str) -> dict[str, float]:
    """Seconds of every cell at rates that are fitted on all others."""
    others = {name: [c for other, c in costs.items() if other != name] for name in costs}
    return {n: float(rates(others[n], which) @ c.work[: PARTS[which]]) for n, c in costs.items()}


def table(costs: Mapping[str, Cost], said: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown, a cell a row, every figure with what was predicted."""
    lines = [
        "| cell | rollout, s | predicted | update, s | predicted | memory, MB | forecast |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cost in costs.items():
        axis, value, *_ = CELLS[name]
        cells = [f"{axis} {value:,.0f}" if axis else "base"]
        for which in said:
            found, wanted = said[which][name], getattr(cost, which)
            figures = ("{:.2f}", "{:.2f}") if which != "memory" else ("{:,.0f}", "{:,.0f}")
            cells += [figures[0].format(wanted), f"{figures[1].format(found)} ({found / wanted - 1:+.0%})"]
        lines.append(f"| {' | '.join(cells)} |")
    worst = {w: max(abs(said[w][n] / getattr(c, w) - 1) for n, c in costs.items()) for w in said}
    return "\n".join(lines) + "\n\nLargest errors: " + ", ".join(f"{w} {e:.0%}" for w, e in worst.items())


def picture(costs: Mapping[str, Cost], said: Mapping[str, Mapping[str, float]]) -> str:
    """A row a variable, a column a quantity."""
    panels = []
    for axis, base in BASE_VALUE.items():
        values = {n: CELLS[n][1] for n in costs if CELLS[n][0] == axis} | {"base": base}
        names = sorted((n for n in values if n in costs), key=values.__getitem__)
        for which, unit in (("rollout", " s"), ("update", " s"), ("memory", " MB")):
            found = {"measured": [getattr(costs[n], which) for n in names]}
            found["predicted"] = [said[which][n] for n in names]
            lines = [Line(line, [values[n] for n in names], figures) for line, figures in found.items()]
            panels.append(Panel(which, lines, axis, unit))
    return chart(panels, "Seconds and memory of a step over five variables, measured and predicted")


def main() -> None:
    """Measure, predict, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/cost.{md,svg}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        return worker(chosen.worker, chosen.steps, chosen.threads)
    costs: dict[str, Cost] = {}
    for cell in chosen.only:
        command = [sys.executable, __file__, "--worker", cell, "--steps", chosen.steps]
        command += ["--threads", chosen.threads]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{cell}: {done.stderr[-1000:]}")
        costs[cell] = Cost(*json.loads(done.stdout.splitlines()[-1]))
        print(cell, *(f"{figure:.3g}" for figure in costs[cell][:4]), flush=True)
    said = {which: predicted(costs, which) for which in ("rollout", "update")}
    said["memory"] = {name: cost.forecast for name, cost in costs.items()}
    text = (
        f"# What a step costs\n\n{dt.date.today()}, {platform.machine()}, {chosen.threads} threads, Python "
        f"{platform.python_version()}. `python benchmarks/cost.py {' '.join(sys.argv[1:])}`\n\n"
        f"Base: 5M parameters, {subject.PROMPTS} prompts, {GROUP} completions each of {LENGTH} tokens, fp32; "
        "each other cell changes one thing. Memory is the peak above program and libraries.\n\n"
        f"{table(costs, said)}.\n\n![Measured and predicted](cost.svg)\n"
    )
    print(text)
    if chosen.write:
        (RESULTS / "cost.md").write_text(text)
        (RESULTS / "cost.svg").write_text(picture(costs, said))
    return None


if __name__ == "__main__":
    main()
