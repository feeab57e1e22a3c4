"""Draw a run's learning curve as SVG: accuracy and reward, on held-out problems and in training."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from covey.insight.chart import Line, Panel, chart
from covey.insight.evidence import Records
from covey.runs.atomic import write_file

SMOOTHING = 10
"""Number of steps that one point of the training curve averages."""


def write_curve(path: Path, title: str, metrics: Records, evals: Records) -> None:
    """Draw a run's `metrics.jsonl` and `evals.jsonl` records."""
    accuracy = [
        _held_out(evals, "greedy", "held-out, greedy", 100),
        _held_out(evals, "pass@1", "held-out, sampled", 100),
        _training(metrics, "accuracy", 100),
    ]
    reward = [_held_out(evals, "reward", "held-out, sampled"), _training(metrics, "reward/mean")]
    panels = [Panel("Accuracy", accuracy, unit=" %", bounds=(0, 100)), Panel("Reward", reward)]
    write_file(path, chart(panels, title, across=2, wide=300, high=200, title=title))


def _training(metrics: Records, name: str, scale: float = 1.0) -> Line:
    known = [(m["step"] + 1, scale * m[name]) for m in metrics if m.get(name) is not None]
    means = [np.mean(known[i : i + SMOOTHING], axis=0).tolist() for i in range(0, len(known), SMOOTHING)]
    return Line("training, sampled", [s for s, _ in means], [v for _, v in means], background=True)


def _held_out(evals: Records, name: str, shown: str, scale: float = 1.0) -> Line:
    """Return an estimate over the steps of its evaluations; None in a record means unknown."""

    def values(key: str) -> list[float]:
        return [math.nan if e.get(key) is None else scale * e[key] for e in evals]

    steps = [e["step"] for e in evals]
    return Line(shown, steps, values(name), values(f"{name}/low"), values(f"{name}/high"))
