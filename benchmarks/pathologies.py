"""Baselines, group sizes and label noise, on `last_digit`; benchmarks/diseases.py has what goes wrong.

    python benchmarks/pathologies.py [--only CASE ...] [--seed 1] [--steps 60] [--write]

A case is a few configs from one cold start; each trains below a minute of one thread, and its metrics are
shown early and late in the run, beside what `covey explain` finds. `baselines` and `group_size` also
measure the gradient's noise on the cold start. Runs are kept in covey-benchmarks/pathologies of the temporary
folder, so that the same command goes on after an interruption. With --write
everything goes to benchmarks/results/pathologies.{md,svg}.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from covey.config.load import load_config
from covey.insight.chart import Line, Panel, chart
from covey.insight.findings.settings import unknown
from covey.insight.findings.table import explain
from covey.insight.findings.view import RunView
from covey.learner.objectives import PolicyObjective
from covey.learner.old_logprobs import old_logprob_source
from covey.rng import key
from covey.rollouts.batch import Position
from covey.rollouts.loop import Rollouts
from covey.runs.folder import read_stream
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.rl import prepare
from covey.training.setup import set_up
from presets import RESULTS, ROOT, VERDICT, Settings, cold_start, config_of, merged, trained

FOLDER = Path(tempfile.gettempdir()) / "covey-benchmarks" / "pathologies"
BASE: Settings = {
    "rewards": [VERDICT],
    "algorithm.kl": 0.1,
    "eval": {"every": 20, "problems": 256, "samples": 1},
}
BY_STEP: Settings = {
    "rewards": [
        {"math_answer": {"rule": "answer_tag", "weight": 0}},  # it measures
        {f"{ROOT / 'src/covey/tasks/sums.py'}:partial_sums": {"modulus": 10}},
    ],
    "algorithm": {"name": "grpo_process", "advantage": {"credit": "own_step"}},
}
ABOUT = """\
`last_digit` from one cold start, one seed: GRPO, 256 completions a step in groups of 8, four updates
per batch, KL .1, unless said otherwise. Metrics are means over the first and the last fifth of the steps.
Greedy accuracy is that on 256 held-out problems before and after; two standard errors are 6 points. The
gradient's variance is that of a batch of 256 completions, on the cold start; its noise is the variance over
the square of the mean: so many batches have to be averaged until noise and signal are equal."""


@dataclass(frozen=True)
class Case:
    """Some configs that differ in one thing."""

    question: str
    arms: Mapping[str, Settings]
    shows: tuple[str, ...] = ()
    """Metrics of a run. None: nothing is trained, only the gradient's noise is measured."""
    draws: str = "greedy"
    """The metric that is drawn, or held-out accuracy."""
    noise: bool = False
    """Whether the gradient's noise on the cold start is measured too."""


def of_size(size: int) -> Settings:
    """Groups of a size, as many completions as ever."""
    return {"rollout.group_size": size, "rollout.prompts_per_step": 256 // size}


BASELINES: Mapping[str, Settings] = {
    "none": {"algorithm.advantage": "reward"},
    "batch mean": {"algorithm.advantage": "reward", "algorithm.whiten": "batch_centered"},
    "group mean": {"algorithm.advantage": "group_centered"},
    "leave one out": {"algorithm.advantage": "leave_one_out"},
    "group z-score": {},
}
NOISES = (0.0, 0.1, 0.2, 0.4)
CASES: dict[str, Case] = {
    "group_size": Case(
        "What do larger groups change, with as many completions?",
        {f"G {size}": of_size(size) for size in (4, 8, 16, 32)},
        ("ratio/q99", "ratio/q01", "groups/dead", "accuracy"),
        noise=True,
    ),
    "baselines": Case(
        "How noisy is the gradient under each baseline? Tokens are summed, so that all have one mean.",
        {name: {"algorithm.reduce": "constant_length", **own} for name, own in BASELINES.items()},
        noise=True,
    ),
    "noise": Case(
        "How much noise of the judge does a run bear, with a reward for the answer?",
        {f"{100 * n:.0f} % wrong": {"scoring": {"noise": n}} for n in NOISES},
        ("accuracy", "reward/std"),
    ),
    "noisy_steps": Case(
        "And with a reward for every step?",
        {f"{100 * n:.0f} % wrong": {**BY_STEP, "scoring": {"noise": n}} for n in NOISES},
        ("accuracy", "reward/std"),
    ),
}


def config_of_arm(case: str, arm: str, seed: int, steps: int, model: Path) -> dict[str, Any]:
    """The demo's second stage with GRPO and a reference that stays, and what the arm changes."""
    return merged(merged(config_of("grpo", seed, steps, model), BASE), CASES[case].arms[arm])


def gradient_noise(config: Settings, folder: Path, batches: int = 40) -> tuple[float, float]:
    """Variance of a batch's gradient, and the square of its mean, over batches from the same weights."""
    folder = folder.with_name(f"{folder.name}-noise")  # not the run's own, whose logs it would begin anew
    file = folder.with_suffix(".json")
    if not file.exists():
        settings = merged(config, {"train.updates_per_batch": 1, "output": str(folder), "threads": 1})
        run = set_up(load_config(values=settings), RunConsole(quiet=True), StopSignal())
        loaded, learner, now = run.loaded, run.learner, run.state.coefficients
        rollout, algorithm = loaded.config.rollout, loaded.algorithm
        source = Rollouts(run.train_set, run.sampler, run.rewards, rollout, algorithm, loaded.config.seed)
        objective = PolicyObjective(algorithm, rollout.temperature, rollout.max_tokens, now)
        old = old_logprob_source(algorithm, run.sampler, updates=1)
        found = []
        for sampled in islice(source.after(0, Position(), lambda *_: None), batches):
            batch = prepare(sampled.groups, learner, algorithm, loaded.config, old, now)
            learner.forward_backward(batch, objective)
            gradients = [m.grad for m in learner.optimizer.masters]
            found.append(torch.cat([g.flatten() for g in gradients if g is not None]))
            learner.clear()
        run.journal.folder.close()
        gradients = torch.stack(found)
        variance = float(gradients.var(0).sum())
        signal = float(gradients.mean(0).square().sum()) - variance / batches
        file.write_text(json.dumps([variance, signal]))
    return json.loads(file.read_text())


def points(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a metric, as means of five steps; steps without a value are left out."""
    known = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    width = 1 if name == "greedy" else 5
    cut = [known[i : i + width] for i in range(0, len(known), width)]
    return [c[0][0] for c in cut], [sum(v for _, v in c) / len(c) for c in cut]


def run_case(name: str, seed: int, steps: int) -> tuple[str, Panel | None]:
    """The section of a case, and its diagram."""
    case = CASES[name]
    model = cold_start(seed, FOLDER, 1)
    heads = ["config", *(f"`{m}`" for m in case.shows), *["greedy, %"] * bool(case.shows)]
    heads += ["gradient's variance", "its noise"] if case.noise else []
    rows, said, drawn = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"], [], []
    for arm in case.arms:
        config = config_of_arm(name, arm, seed, steps, model.resolve())
        folder = FOLDER / f"{key(json.dumps(config, sort_keys=True)):016x}"  # one run for equal configs
        cells = [arm]
        if case.shows:
            run = trained(config, folder, 1)
            metrics, evals = read_stream(run, "metrics.jsonl"), read_stream(run, "evals.jsonl")
            seen = RunView(metrics)
            cells += [f"{seen.early(m):.3g} to {seen.late(m):.3g}" for m in case.shows]
            cells += [f"{100 * evals[0]['greedy']:.0f} to {100 * evals[-1]['greedy']:.0f}"]
            said += [f"- {arm}: {finding.sentence}." for finding in explain(metrics, evals, unknown)]
            drawn.append(Line(arm, *points(evals if case.draws == "greedy" else metrics, case.draws)))
        if case.noise:
            variance, signal = gradient_noise(config, folder)
            cells += [f"{variance:.3g}", f"{variance / signal:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    heard = ["", "`covey explain` says:", "", *(said or ["- nothing."])] if case.shows else []
    panel = Panel(f"{name}: {case.draws}", drawn) if drawn else None
    return "\n".join([f"## {name}", "", case.question, "", *rows, *heard]), panel


def main() -> None:
    """Cases one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/pathologies.{md,svg}")
    arguments = parser.parse_args()
    found = [run_case(name, arguments.seed, arguments.steps) for name in arguments.only]
    command = f"python benchmarks/pathologies.py --seed {arguments.seed} --steps {arguments.steps}"
    where = (
        f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    parts = [f"{where}. `{command}`", ABOUT, *(section for section, _ in found)]
    parts += ["![A metric of each case over its steps](pathologies.svg)"]
    page = "\n\n".join(["# What goes wrong, and what mends it", *parts]) + "\n"
    print(page)
    if arguments.write:
        (RESULTS / "pathologies.md").write_text(page)
        panels = [panel for _, panel in found if panel is not None]
        label = "A metric of each case over its steps"
        (RESULTS / "pathologies.svg").write_text(chart(panels, label, across=2, wide=280))


if __name__ == "__main__":
    main()
