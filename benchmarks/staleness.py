"""How stale may completions be, with and without a correction; and what running ahead of slow rewards wins.

    python benchmarks/staleness.py [--seeds 3] [--steps 40] [--lr 2e-3] [--only N ...] [--write]

A tiny model, not trained before, learns to write digits: the reward is the fraction of its characters that
are some. GRPO with one update per batch, so that nothing but `rollout.staleness` makes a token older than
the weights it trains. The second part scores by a function that sleeps two seconds, under staleness 0 and 1.
Runs are kept in covey-benchmarks/staleness of the temporary folder,
so that the same command goes on after an interruption; remove the folder to
start afresh. With --write the page and the curves go to benchmarks/results/staleness.{md,svg}.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch

from covey.config.load import load_config
from covey.console import RunConsole
from covey.errors import GuardStop
from covey.insight.chart import Line, Panel, chart
from covey.runs.folder import read_numbers
from covey.signals import StopSignal
from covey.training.pipeline import run_pipeline
from presets import RESULTS, Settings, merged

FOLDER = Path(tempfile.gettempdir()) / "covey-benchmarks" / "staleness"
BOUNDS = (0, 1, 2, 4, 8)
CORRECTIONS: Mapping[str, object] = {"none": None, "truncated": "truncated"}
GENTLE_STEPS, GENTLE_LR = 60, 1e-3
SLEEP, SLOW_STEPS, ROUNDS = 2.0, 6, 3


@dataclass(frozen=True)
class Outcome:
    """One run."""

    reward: list[float]
    """Of each step."""
    staleness: float
    mismatch: float
    """Nats a token, mean over the steps."""


def digits(completion: str) -> float:
    """The fraction of the characters that are digits."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


async def asleep(completions: Sequence[str]) -> list[float]:
    """A reward that takes as long as a judge, and costs nothing."""
    await asyncio.sleep(SLEEP)
    return [digits(c) for c in completions]


def config_of(bound: int, correction: object, seed: int, steps: int, lr: float) -> Settings:
    """A run of seconds."""
    return {
        "seed": seed,
        "threads": 1,
        "data": {"task": "last_digit", "train_size": 512, "test_size": 64},
        "rewards": (digits,),
        "rollout": {"group_size": 8, "prompts_per_step": 8, "max_tokens": 12, "staleness": bound},
        "algorithm": {"name": "grpo", "kl": None, "correction": correction},
        "train": {"steps": steps, "lr": lr, "save_every": 1000},
        "eval": {"problems": 64, "samples": 4},
    }


def train(settings: Settings, folder: Path) -> float:
    """Train unless that has been done; seconds. A guard that ends the run is a result, too."""
    begun = time.monotonic()
    if not (folder / "done").exists():
        try:
            loaded = load_config(values={**settings, "output": str(folder)})
            run_pipeline(loaded, RunConsole(quiet=True), StopSignal())
        except GuardStop as stopped:
            print(f"{folder.name}: {stopped}", flush=True)
        (folder / "done").touch()
    return time.monotonic() - begun


def outcome(folder: Path) -> Outcome:
    """What a run's logs say."""
    steps = read_numbers(folder, "metrics.jsonl")
    return Outcome(
        [m["reward/mean"] for m in steps],
        mean(m.get("staleness/mean", 0.0) for m in steps),
        mean(m.get("mismatch/mean", 0.0) for m in steps),
    )


def late(run: Outcome) -> float:
    """Mean reward of the last fifth of the steps."""
    return mean(run.reward[-max(1, len(run.reward) // 5) :])


def first_above(values: Sequence[float], bar: float) -> str:
    """The step after which five have been above a bar on average."""
    means = [mean(values[i : i + 5]) for i in range(len(values) - 4)]
    return next((str(i + 5) for i, m in enumerate(means) if m > bar), "never")


def table(found: Mapping[tuple[int, str], Sequence[Outcome]]) -> str:
    """Markdown, a bound a row."""
    lines = [
        "| `rollout.staleness` | correction | staleness seen | mismatch, nats | reward late | steps to .5 |"
    ]
    lines.append("|---" * 6 + "|")
    for (bound, name), runs in found.items():
        ends = [late(r) for r in runs]
        half = [first_above(r.reward, 0.5) for r in runs]
        cells = [str(bound), name, f"{mean(r.staleness for r in runs):.1f}"]
        cells += [f"{mean(r.mismatch for r in runs):.3f}"]
        cells += [f"{mean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})", ", ".join(half)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(found: Mapping[tuple[int, str], Sequence[Outcome]]) -> str:
    """A panel for each correction, a line a bound: the mean over seeds, with their range."""
    panels = []
    for name in CORRECTIONS:
        lines = []
        for bound in BOUNDS:
            runs = found.get((bound, name), found[0, "none"] if bound == 0 else [])
            if not runs:
                continue
            columns = list(zip(*(smooth(r.reward) for r in runs), strict=False))
            places = [5 * i for i in range(len(columns))]
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            lines.append(Line(f"{bound}", places, [mean(c) for c in columns], low, high))
        panels.append(Panel(f"correction {name}: reward", lines, bounds=(0, 1)))
    return chart(panels, "Reward over steps by rollout.staleness", across=2, wide=300)


def smooth(values: Sequence[float]) -> list[float]:
    """Means of five steps."""
    return [mean(values[i : i + 5]) for i in range(0, len(values), 5)]


def overlap() -> dict[int, list[float]]:
    """Seconds a step under a reward that sleeps, by bound; the bounds take turns."""
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for turn in range(ROUNDS):
        for bound, into in seconds.items():
            base = config_of(bound, None, turn, SLOW_STEPS, 1e-3)
            folder = FOLDER / f"slow-{bound}-{turn}"
            train(merged(base, {"rewards": (asleep,), "eval": {"problems": 1}}), folder)
            times = read_numbers(folder, "timings.jsonl")
            whole = [
                sum(v for k, v in t.items() if k.startswith("seconds/") and k != "seconds/reward")
                for t in times
            ]
            into.append(mean(whole[1:]))
    return seconds


def report(
    found: Mapping[tuple[int, str], Sequence[Outcome]],
    gentle: Mapping[tuple[int, str], Sequence[Outcome]],
    slow: Mapping[int, Sequence[float]],
    given: argparse.Namespace,
) -> str:
    """The page of results."""
    one, other = (median(slow[bound]) for bound in (0, 1))
    return (
        f"# How stale completions may be\n\n{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}, one thread, beside other work. "
        f"`python benchmarks/staleness.py {' '.join(sys.argv[1:])}`\n\n"
        "A model of 0.8M, random at first, learns to write digits in 12 tokens: the reward is the fraction "
        f"of its characters that are some. {given.seeds} seeds, {given.steps} steps of 64 completions in "
        f"groups of 8, GRPO without a KL, one update per batch, lr {given.lr:g}. Late is the last fifth of "
        "the steps, its range over seeds; steps to .5 are of each seed. Staleness and mismatch are means "
        "over tokens and steps. Without a correction stale tokens are trained as if present weights had "
        "drawn them.\n\n"
        f"{table(found)}\n\n![Reward over steps by rollout.staleness](staleness.svg)\n\n"
        f"Half the learning rate, one seed, {GENTLE_STEPS} steps:\n\n{table(gentle)}\n\n"
        "## What it wins\n\n"
        f"A reward that sleeps {SLEEP:g} s, {SLOW_STEPS} steps of 64 completions, {ROUNDS} runs of each in "
        "turn; seconds a step without the first one, the median run (and the range). Sleeping takes no "
        "processor, so that the ratio holds on a busy machine, too.\n\n"
        "| `rollout.staleness` | seconds a step |\n|---|---|\n"
        + "".join(f"| {b} | {median(s):.2f} ({min(s):.2f} to {max(s):.2f}) |\n" for b, s in slow.items())
        + f"\n{one / other:.2f} times as many steps an hour.\n"
    )


def outcomes(
    seeds: int, bounds: Sequence[int], steps: int, lr: float
) -> dict[tuple[int, str], list[Outcome]]:
    """The runs of each bound and correction, one after the other."""
    found: dict[tuple[int, str], list[Outcome]] = {}
    for seed in range(seeds):
        for bound in bounds:
            for name, correction in CORRECTIONS.items() if bound else [("none", None)]:
                folder = FOLDER / f"{bound}-{name}-{seed}-{steps}-{lr:g}"
                took = train(config_of(bound, correction, seed, steps, lr), folder)
                run = outcome(folder)
                found.setdefault((bound, name), []).append(run)
                print(f"{folder.name}: {late(run):.3f}, {took:.0f} s", flush=True)
    return found


def main() -> None:
    """The runs one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--only", nargs="+", type=int, default=list(BOUNDS), choices=BOUNDS, metavar="N")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/staleness.{md,svg}")
    given = parser.parse_args()
    found = outcomes(given.seeds, given.only, given.steps, given.lr)
    gentle = outcomes(1, BOUNDS, GENTLE_STEPS, GENTLE_LR)
    print(table(found), flush=True)
    page = report(found, gentle, overlap(), given)
    print(page)
    if given.write:
        (RESULTS / "staleness.md").write_text(page)
        (RESULTS / "staleness.svg").write_text(picture(found))


if __name__ == "__main__":
    main()
