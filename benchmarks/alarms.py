"""False alarms: what findings say of runs in which nothing happens, or that learn slowly.

    python benchmarks/alarms.py [--runs 300] [--write]

Runs are drawn, not trained: problems that are easy or hard, groups of completions, two rewards of which one
is a form that the model knows, evaluations. Their records go through `covey explain`'s own rules, which look
after every step. A severe finding is a false alarm in each of them; what is said first hides what follows.
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covey.insight.findings.finding import Finding
from covey.insight.findings.table import explain
from covey.objective.diagnostics import standard_error
from covey.runs.estimates import Evaluation

RESULTS = Path(__file__).parent / "results"
SEVERE = "severe"
QUIET: dict[str, float] = {
    "reward/unscored": 0.0, "groups/dead_unscored": 0.0, "groups/collapsed": 0.0, "groups/near_ties": 0.0,
    "length/correct": 20.0, "length/incorrect": 22.0, "length/truncated": 0.02, "text/duplicates": 0.2,
    "text/repetition": 0.05, "entropy/sampled": 0.6, "ratio/q99": 1.1, "clip/low": 0.01, "clip/high": 0.01,
    "mismatch/mean": 1e-4, "optimizer/grad_norm": 1.0, "optimizer/lr": 1e-6,
}  # fmt: skip
"""What no world changes."""


@dataclass(frozen=True)
class World:
    """A run that is well: how often it is correct from the first step to the last, and how it is measured."""

    first: float
    last: float
    steps: int = 100
    prompts: int = 16
    size: int = 8
    form: float = 0.97
    spread: float = 1.0
    """Problems are Beta(p / spread, (1 - p) / spread): at 1 many are always or never solved, at 0 alike."""
    every: int = 0
    """Steps between evaluations of 128 problems; 0: none."""
    nats: float = 0.02
    """How far a step moves the policy, nats per completion."""
    logged: bool = True
    """Whether standard errors are in the records."""

    def __str__(self) -> str:
        rate = f"{self.first:.2f}" if self.first == self.last else f"{self.first:.2f} to {self.last:.2f}"
        rest = f", evaluated every {self.every}" if self.every else ""
        rest += f", {self.nats:g} nats per step" if self.nats > 0.1 else ""
        rest += "" if self.logged else ", no standard errors"
        return f"{rate}, {self.steps} steps of {self.prompts} x {self.size}, form {self.form:g}{rest}"


IDLE = [
    World(0.08, 0.08, 25), World(0.08, 0.08, 25, 32), World(0.02, 0.02, 25), World(0.05, 0.05),
    World(0.05, 0.05, logged=False), World(0.2, 0.2, 25, 12), World(0.46, 0.46, 25, 12),
    World(0.46, 0.46, 200), World(0.46, 0.46, 100, every=10), World(0.2, 0.2, 100, 64, form=0.9),
    World(0.3, 0.3, 40, 8, 4), World(0.08, 0.08, 25, nats=0.7), World(0.46, 0.46, 100, spread=0.02),
]  # fmt: skip
SLOW = [
    World(0.2, 0.4), World(0.05, 0.15), World(0.05, 0.15, every=10), World(0.2, 0.4, 100, 64),
    World(0.2, 0.4, 100, 32, logged=False), World(0.02, 0.1, 300, 16),
]  # fmt: skip


def problems(world: World, rate: float, count: int, generator: np.random.Generator) -> np.ndarray:
    """(count,) how likely each is solved."""
    if not world.spread:
        return np.full(count, rate)
    return generator.beta(rate / world.spread, (1 - rate) / world.spread, count)


def step_record(world: World, step: int, generator: np.random.Generator) -> dict[str, Any]:
    """The metrics of a step, as `group_metrics` would have them of such groups."""
    rate = world.first + (world.last - world.first) * step / max(1, world.steps - 1)
    shape = (world.prompts, world.size)
    solved = generator.random(shape) < problems(world, rate, world.prompts, generator)[:, None]
    formed = generator.random(shape) < world.form
    rewards = {"answer": solved.astype(float), "form": formed.astype(float)}
    total = rewards["answer"] + 0.1 * rewards["form"]
    dead = np.ptp(total, axis=1) == 0
    record: dict[str, Any] = {
        "step": step + 1, **QUIET, "accuracy": solved.mean(), "reward/mean": total.mean(),
        "reward/std": total.std(), "groups/count": float(world.prompts), "groups/dead": dead.mean(),
        "groups/dead_correct": (dead & solved.all(1)).mean(),
        "groups/dead_incorrect": (dead & ~solved.any(1)).mean(), "groups/cliff": dead.mean(),
        "optimizer/updates": 1.0,
        "kl/start": world.nats * (step + generator.normal()) if step else 0.0,
    }  # fmt: skip
    for name, values in rewards.items():
        record |= {f"reward/{name}/mean": values.mean(), f"reward/{name}/std": values.std()}
    if world.logged:
        record["accuracy/stderr"] = standard_error(list(rewards["answer"]))
        record["reward/stderr"] = standard_error(list(total))
        record |= {f"reward/{name}/stderr": standard_error(list(v)) for name, v in rewards.items()}
    return record


def evaluations(world: World, generator: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Of the same problems each time, with new luck."""
    luck = generator.random(128)
    for step in range(0, world.steps + 1, world.every) if world.every else ():
        rate = world.first + (world.last - world.first) * step / world.steps
        chances = np.quantile(problems(world, rate, 4096, generator), luck)
        correct = generator.binomial(2, chances)
        greedy = generator.random(128) < chances
        evaluation = Evaluation(greedy, correct, greedy, correct / 2, 2, "answer")
        yield {"step": step, **evaluation.record()}


def said_of(world: World, seed: int) -> list[Finding]:
    """What covey says of one run of a world."""
    generator = np.random.default_rng([seed, world.steps, world.prompts])
    records = [step_record(world, step, generator) for step in range(world.steps)]
    known = {"train.steps": world.steps, "rollout.group_size": world.size, "algorithm.advantage": "none"}
    return explain(records, list(evaluations(world, generator)), known.get)


def severe_fraction(world: World, runs: int) -> tuple[float, Counter[str]]:
    """The fraction of runs with a severe finding, and in how many runs each finding is said."""
    every = [said_of(world, seed) for seed in range(runs)]
    counts = Counter(found.id for said in every for found in said)
    return sum(any(f.severity == SEVERE for f in said) for said in every) / runs, counts


def main() -> None:
    """A row for each world."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/alarms.md")
    arguments = parser.parse_args()
    rows = ["| nothing happens, or it is learned slowly | severe | said |", "|---|---|---|"]
    for world in (*IDLE, *SLOW):
        fraction, counts = severe_fraction(world, arguments.runs)
        said = ", ".join(f"`{name}` {n / arguments.runs:.0%}" for name, n in counts.most_common())
        rows.append(f"| {world} | {fraction:.1%} | {said or 'nothing'} |")
        print(rows[-1], flush=True)
    if arguments.write:
        about = (__doc__ or "").split("\n\n")[2].replace("\n", " ")
        head = f"# False alarms\n\n{dt.date.today()}, {arguments.runs} runs of each world. {about}\n\n"
        (RESULTS / "alarms.md").write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
