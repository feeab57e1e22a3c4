"""Nine algorithms on `last_digit`, from the same cold starts, to the same bars.

    python benchmarks/presets.py [--seeds 3] [--steps 220] [--jobs 1] [--only grpo dapo] [--write]

The demo's first stage is run once per seed; each preset goes on from that model with the demo's second
stage: 256 completions a step, a KL to a reference that is renewed (without it one cold start in four
stays at 60 %, see docs/log.md), and its own settings of the table below. The bars are 80 and
90 % of held-out problems solved greedily.
Runs are kept in covey-benchmarks/presets of the temporary folder,
so that the same command goes on after an interruption; remove the folder
to start afresh. With --write the table and the curves go to benchmarks/results/presets.{md,svg}.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

from covey.insight.chart import Line, Panel, chart
from covey.runs.estimates import wilson
from covey_verify.machine import available_cpus

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DEMO = yaml.safe_load((ROOT / "src" / "covey" / "config" / "recipes" / "demo.yaml").read_text())
BASE = {**{k: v for k, v in DEMO.items() if k != "stages"}, "data": {"task": "last_digit"}}
BARS = (0.8, 0.9)
VERDICT = {"math_answer": {"rule": "answer_tag"}}
EVAL = {"every": 10, "problems": 256, "samples": 1}
Settings = Mapping[str, Any]

PRESETS: dict[str, tuple[Settings, str]] = {
    "grpo": ({}, "clip .2"),
    "dr_grpo": ({}, "no std, constant length"),
    "dapo": ({}, "clip .2/.28, tied groups replaced, so more completions a step"),
    "gspo": (
        {"algorithm.surrogate": {"clip_low": 3.0e-3, "clip_high": 4.0e-3}},
        "clip ten times its paper's: at lr 2e-4 instead of 1e-6 one update goes beyond 4e-4",
    ),
    "cispo": ({}, "weights capped at 5"),
    "rloo": ({"algorithm.ratio": "token"}, "weighted by the ratio of tokens, for four updates per batch"),
    "reinforce_pp": (
        {"rollout.group_size": 1, "rollout.prompts_per_step": 256},
        "one completion per prompt, as many completions; its KL stands in the reward",
    ),
    "max_rl": (
        {"rollout.group_size": 16, "rollout.prompts_per_step": 16, "rewards": [VERDICT]},
        "larger groups, as many completions; the 0/1 verdict alone, since it divides by the mean reward",
    ),
    "gdpo": ({}, "each reward normalised by itself"),
}
"""name -> what differs from the demo's second stage beside the algorithm, and the reason."""


@dataclass(frozen=True)
class Curve:
    """One run: held-out accuracy over its steps, and what had been sampled by then."""

    steps: list[int]
    greedy: list[float]
    sampled: list[float]
    completions: list[float]

    def crossing(self, bar: float) -> int | None:
        """The first evaluation at or above a bar; None if there was none."""
        return next((i for i, share in enumerate(self.greedy) if share >= bar), None)


def merged(base: Settings, over: Settings) -> dict[str, Any]:
    """Nested settings; dotted keys reach inside."""
    result = {k: dict(v) if isinstance(v, Mapping) else v for k, v in base.items()}
    for key, value in over.items():
        section, _, name = key.partition(".")
        if name or (isinstance(value, Mapping) and isinstance(result.get(section), dict)):
            result[section] = {**result.get(section, {}), **({name: value} if name else value)}
        else:
            result[section] = value
    return result


def trained(config: Settings, folder: Path, threads: int) -> Path:
    """Train as a user would, unless that has been done; the folder of the run."""
    if not (folder / "result.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.parent / f"{folder.name}.yaml"
        file.write_text(yaml.safe_dump({**config, "output": str(folder), "threads": threads}))
        command = [sys.executable, "-m", "covey", "train", str(file), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not (folder / "result.json").exists():
            raise SystemExit(f"{folder.name}: {done.stderr[-1000:]}")
    return folder


def cold_start(seed: int, folder: Path, threads: int, over: Settings | None = None) -> Path:
    """The model every preset starts from: the demo's first stage, or one with settings of its own."""
    config = merged(merged(BASE, DEMO["stages"][0]), {"seed": seed, **(over or {})})
    return trained(config, folder / f"cold-{seed}", threads) / "final"


def config_of(name: str, seed: int, steps: int, model: Path) -> dict[str, Any]:
    """The demo's second stage with a preset and its own settings."""
    config = merged(BASE, DEMO["stages"][1])
    config["algorithm"] = {"name": name, "kl": config["algorithm"]["kl"]}  # each with its own advantage
    config = merged(config, {"seed": seed, "model": str(model), "train.steps": steps})
    return merged(config, {"eval": EVAL, "train.save_every": 1000, **PRESETS[name][0]})


def run_preset(name: str, seed: int, steps: int, folder: Path, threads: int) -> Curve:
    """A preset from a cold start; its learning curve."""
    config = config_of(name, seed, steps, (folder / f"cold-{seed}" / "final").resolve())
    run = trained(config, folder / f"{name}-{seed}-{steps}", threads)
    evals = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    each = [m["groups/count"] * config["rollout"]["group_size"] for m in metrics]
    return Curve(
        steps=[e["step"] for e in evals],
        greedy=[e["greedy"] for e in evals],
        sampled=[e["pass@1"] for e in evals],
        completions=[sum(each[: e["step"]]) for e in evals],
    )


def spread(values: Sequence[float], middle: float, scale: float = 1.0) -> str:
    """A middle with its range."""
    return f"{middle * scale:.0f} ({min(values) * scale:.0f} to {max(values) * scale:.0f})"


def to_bar(curves: Sequence[Curve], bar: float, what: str, scale: float = 1.0) -> str:
    """Median and range of steps or completions to a bar; runs that missed it are said."""
    crossings = [(c, c.crossing(bar)) for c in curves]
    reached = [getattr(c, what)[at] for c, at in crossings if at is not None]
    if not reached:
        return "not reached"
    missed = len(curves) - len(reached)
    return spread(reached, median(reached), scale) + (f", {missed} missed" if missed else "")


def table(found: Mapping[str, Sequence[Curve]]) -> str:
    """Markdown, a preset a row."""
    heads = [*(f"steps to {100 * bar:.0f} %" for bar in BARS), f"1000 completions to {100 * BARS[0]:.0f} %"]
    heads = ["preset", *heads, "greedy in the end, %", "sampled, %", "settings"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, curves in found.items():
        ends = [[getattr(c, which)[-1] for c in curves] for which in ("greedy", "sampled")]
        cells = [name, *(to_bar(curves, bar, "steps") for bar in BARS)]
        cells += [to_bar(curves, BARS[0], "completions", 1e-3)]
        cells += [spread(end, mean(end), 100) for end in ends]
        lines.append(f"| {' | '.join([*cells, PRESETS[name][1]])} |")
    return "\n".join(lines)


def picture(found: Mapping[str, Sequence[Curve]]) -> str:
    """A panel a preset, a line a seed, all to the same scale; the bars are dashed."""
    panels = [
        Panel(name, [_seed(c) for c in curves], unit=" %", bounds=(0, 100), bars=[100 * bar for bar in BARS])
        for name, curves in found.items()
    ]
    return chart(panels, "Held-out greedy accuracy over steps, a panel a preset, a line a seed")


def _seed(curve: Curve) -> Line:
    """One run's accuracy, with the interval of its held-out problems."""
    known = [wilson(round(EVAL["problems"] * g), EVAL["problems"]) for g in curve.greedy]
    low, high = [100 * e.low for e in known], [100 * e.high for e in known]
    return Line("", curve.steps, [100 * g for g in curve.greedy], low, high)


def report(
    found: Mapping[str, Sequence[Curve]], arguments: argparse.Namespace, starts: Sequence[float]
) -> str:
    """The page of results."""
    command = " ".join(["python benchmarks/presets.py", *sys.argv[1:]])
    return (
        f"# {len(found)} algorithms from the same cold starts\n\n"
        f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}. `{command}`\n\n"
        f"`last_digit`, {len(starts)} seed{'s' * (len(starts) > 1)}, {arguments.steps} steps of 256 "
        "completions; lr "
        f"{DEMO['stages'][1]['train']['lr']:g}, four updates per batch and a KL of .1, unless said "
        f"otherwise. Accuracy on {EVAL['problems']} held-out problems every {EVAL['every']} steps; the cold "
        f"starts solve {spread(starts, mean(starts), 100)} % greedily. The bars are greedy accuracies. "
        "Ranges are over seeds; steps to the bar are a median, accuracies a mean. One small task says which "
        "settings work, not which algorithm is best.\n\n"
        f"{table(found)}\n\n![Held-out greedy accuracy over steps](presets.svg)\n"
    )


def main() -> None:
    """Cold starts first, then every preset from each of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--only", nargs="+", choices=PRESETS, default=list(PRESETS), metavar="PRESET")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "covey-benchmarks" / "presets",
        help="where runs are kept",
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/presets.{md,svg}")
    arguments = parser.parse_args()
    threads = max(1, available_cpus() // arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        seeds = range(arguments.seeds)
        list(pool.map(lambda seed: cold_start(seed, arguments.folder, threads), seeds))

        def one(job: tuple[str, int]) -> Curve:
            curve = run_preset(*job, arguments.steps, arguments.folder, threads)
            print(f"{job[0]} seed {job[1]}: {curve.greedy[0]:.2f} -> {curve.greedy[-1]:.2f}", flush=True)
            return curve

        jobs = [(name, seed) for seed in seeds for name in arguments.only]
        curves = dict(zip(jobs, pool.map(one, jobs), strict=True))
    found = {name: [curves[name, seed] for seed in seeds] for name in arguments.only}
    page = report(found, arguments, [found[arguments.only[0]][seed].greedy[0] for seed in seeds])
    print(page)
    if arguments.write:
        (RESULTS / "presets.md").write_text(page)
        (RESULTS / "presets.svg").write_text(picture(found))


if __name__ == "__main__":
    main()
