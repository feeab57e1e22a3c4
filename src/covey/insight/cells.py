"""The results of a sweep: its cells with intervals, each minus the first on the same seeds and problems."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from covey.insight.chart import Line, Panel, chart
from covey.insight.conclusion import points
from covey.insight.evidence import student
from covey.runs.atomic import make_folder, write_file
from covey.runs.estimates import Estimate, Evaluation, over_seeds
from covey.runs.folder import RESULT, read_numbers, read_stream
from covey.runs.reader import read_environment, seconds_of
from covey.system.plot import align_columns
from covey.system.text import duration, percent

RECORD_NAME = "sweep.json"
CHART_NAME = "sweep.svg"
SEED_SPREAD = 0.05
"""Std of accuracy over seeds, assumed if each cell has one seed; 3 points were measured."""
COMPARED = ("greedy", "sampled")
CODE_FILES = (".py", "own code")
"""Endings of recorded files that no setting of a sweep changes, unlike the model or the data."""


@dataclass(frozen=True)
class Cell:
    """One choice of values, and the folder of its run for each seed."""

    values: tuple[str, ...]
    folders: Mapping[int, Path]
    last_stage: str = ""
    """Name of the last planned stage's folder in that of a run, which has no result before that stage ends;
    empty without stages."""


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, made or not."""

    home: Path
    keys: tuple[str, ...]
    cells: Sequence[Cell]


class EndedRun(NamedTuple):
    """A run that has ended: its last held-out results, and the problems they belong to."""

    rates: Mapping[str, np.ndarray]
    """`greedy` and `sampled` by problem, (n,)."""
    began: float
    """Sampled accuracy before the first step; NaN if it was not measured."""
    measured_on: object
    """The data and the verdict; equal for two runs whose rates may be compared."""
    seconds: float
    stage: Path


class CellRow(NamedTuple):
    """The results of a cell."""

    cell: Cell
    ended: Mapping[int, EndedRun]
    accuracy: Mapping[str, Estimate]
    """`greedy` and `sampled` over all seeds."""
    change: Mapping[str, Estimate]
    """Accuracy minus the first cell's accuracy, over the seeds and problems that both have."""


def cell_rows(sweep: Sweep) -> list[CellRow]:
    """Return the results of every cell with a run that ended with held-out problems."""
    rows = list[CellRow]()
    baseline = dict[int, EndedRun]()
    for cell in sweep.cells:
        runs = {seed: _read_ended_run(folder / cell.last_stage) for seed, folder in cell.folders.items()}
        ended = {seed: run for seed, run in runs.items() if run is not None}
        # The first cell with results is the baseline of all others.
        baseline = baseline or ended
        shared_seeds = [s for s in ended if s in baseline and ended[s].measured_on == baseline[s].measured_on]
        # Runs of one cell with different numbers of problems were measured on different data.
        sizes = {len(run.rates["greedy"]) for run in ended.values()}
        if len(sizes) != 1:
            continue
        accuracy = {}
        change = {}
        for name in COMPARED:
            accuracy[name] = over_seeds(np.stack([run.rates[name] for run in ended.values()]))
            if shared_seeds and ended is not baseline:
                gaps = [ended[s].rates[name] - baseline[s].rates[name] for s in shared_seeds]
                change[name] = over_seeds(np.stack(gaps), -1.0)
        rows.append(CellRow(cell, ended, accuracy, change))
    return rows


def _read_ended_run(stage: Path) -> EndedRun | None:
    evals = read_stream(stage, "evals.jsonl")
    if not evals or not (stage / RESULT).exists():
        return None
    last = Evaluation.from_record(evals[-1])
    seconds = seconds_of(stage, read_numbers(stage, "timings.jsonl"))
    rates = {"greedy": last.greedy.astype(float), "sampled": last.pass_rate}
    initial = math.nan
    if evals[0].get("step") == 0:
        initial = float(Evaluation.from_record(evals[0]).pass_rate.mean())
    data = (read_environment(stage) or {}).get("data")
    return EndedRun(rates, initial, (data, last.verdict), seconds, stage)


def changed_between(rows: Sequence[CellRow]) -> list[str]:
    """Return the code files whose content differs between runs."""
    contents = dict[str, set[str]]()
    for run in (run for row in rows for run in row.ended.values()):
        for name, digest in (read_environment(run.stage) or {}).get("files", {}).items():
            contents.setdefault(name, set()).add(digest)
    differing = (name for name, digests in contents.items() if len(digests) > 1)
    return [name for name in differing if name.endswith(CODE_FILES)]


def sweep_record(sweep: Sweep, failed: Mapping[Path, str]) -> dict[str, object]:
    """Return a sweep as JSON."""
    rows = cell_rows(sweep)
    return {
        "folder": str(sweep.home),
        "settings": list(sweep.keys),
        "cells": [
            {
                "settings": dict(zip(sweep.keys, row.cell.values, strict=True)),
                "runs": {seed: str(folder) for seed, folder in row.cell.folders.items()},
                "ended": list(row.ended),
                **{name: asdict(estimate) for name, estimate in row.accuracy.items()},
                "less_first": {name: asdict(estimate) for name, estimate in row.change.items()} or None,
                "seconds": float(np.mean([run.seconds for run in row.ended.values()])),
            }
            for row in rows
        ],
        "changed_between": changed_between(rows),
        "failed": {str(folder): reason for folder, reason in failed.items()},
    }


def sweep_lines(sweep: Sweep, failed: Mapping[Path, str]) -> Iterator[str]:
    """Yield a sweep as a table for people, and its conclusions."""
    rows = cell_rows(sweep)
    if rows:
        head = [*sweep.keys, "seeds", "greedy", "sampled", "sampled, minus the first", "a run"]
        yield from align_columns([head, *map(_cells, rows)])
    else:
        yield "no run with held-out problems has ended yet: nothing to compare"
    if len(rows) > 1:
        yield best_cell_line(sweep, rows, failed)
    if changed := changed_between(rows):
        yield (
            f"{', '.join(changed)} changed between these runs, so they cannot be compared: remove the "
            "folders of the earlier ones and repeat the command"
        )
    if any(len(row.ended) == 1 for row in rows):
        yield "with one seed the intervals leave out the variation over seeds: use --seeds 3"
    for folder, reason in failed.items():
        yield f"failed: {folder.name}: {reason.partition('. ')[0]}"


def _cells(row: CellRow) -> list[str]:
    """Return a row of the table."""
    accuracies = [str(row.accuracy[name]) for name in COMPARED]
    change = points(row.change["sampled"]) if row.change else "-"
    seconds = float(np.mean([run.seconds for run in row.ended.values()]))
    return [*row.cell.values, str(len(row.ended)), *accuracies, change, duration(seconds)]


def best_cell_line(sweep: Sweep, rows: Sequence[CellRow], failed: Mapping[Path, str]) -> str:
    """Name the best cell, and tell whether its lead is beyond chance.

    Cells without a failed run are preferred: the surviving runs of a setting are no fair sample of all its
    runs.
    """
    without_failure = [row for row in rows if failed.keys().isdisjoint(row.cell.folders.values())]
    best = max(without_failure or rows, key=lambda row: row.accuracy["sampled"].value)
    name = ", ".join(f"{k} {v}" for k, v in zip(sweep.keys, best.cell.values, strict=True))
    name += " (of the settings without a failed run)" if 0 < len(without_failure) < len(rows) else ""
    initial = float(np.mean([run.began for run in best.ended.values()]))
    if initial == best.accuracy["sampled"].value == 1:
        return "all answers were correct from the start: only harder problems can distinguish the cells"
    if best.accuracy["sampled"].value <= initial:
        return f"no setting improved on its start ({percent(initial, '.1f')} sampled); {name} lost the least"
    if best is rows[0]:
        return f"none is better than the first, {name}"
    rivals = [row for row in rows if row is not best and not _surely_better(best, row, rows)]
    if not rivals:
        return f"best: {name}"
    remark = "" if rows[0] in rivals else "; that over the first is not"
    return f"highest: {name}. Its lead over {len(rivals)} of the other cells may be chance{remark}"


def _surely_better(best: CellRow, rival: CellRow, rows: Sequence[CellRow]) -> bool:
    """Whether the best cell beats another by more than problems, seeds and selection explain.

    The level is divided by the number of pairs: if all cells are equal, no pair passes in 95 % of sweeps. The
    variance over seeds is pooled over all cells; with one seed each it is ``SEED_SPREAD`` squared.
    """
    best_run = next(iter(best.ended.values()))
    rival_run = next(iter(rival.ended.values()))
    same_size = len(best_run.rates["sampled"]) == len(rival_run.rates["sampled"])
    if best_run.measured_on != rival_run.measured_on or not same_size:
        return False
    # Mean accuracy over the seeds by problem, (problems,), of either cell.
    means = [np.mean([run.rates["sampled"] for run in row.ended.values()], axis=0) for row in (best, rival)]
    # Two opposite pseudo-problems keep the standard error above 0 where all problems agree.
    changes = np.append(means[0] - means[1], (1.0, -1.0))
    problem_error = float(changes.std(ddof=1)) / math.sqrt(len(changes))
    variance, freedom = _seed_variance(rows)
    seed_error = math.sqrt(variance * (1 / len(best.ended) + 1 / len(rival.ended)))
    # Bonferroni over all pairs of cells.
    normal = NormalDist().inv_cdf(1 - 0.025 / math.comb(len(rows), 2))
    doubt = math.hypot(normal * problem_error, student(normal, freedom or math.inf) * seed_error)
    return float(means[0].mean() - means[1].mean()) > doubt


def _seed_variance(rows: Sequence[CellRow]) -> tuple[float, int]:
    """Return the variance of accuracy over seeds, pooled over all cells, and its degrees of freedom."""
    accuracies = [[float(run.rates["sampled"].mean()) for run in row.ended.values()] for row in rows]
    freedom = sum(len(seeds) - 1 for seeds in accuracies)
    if not freedom:
        return SEED_SPREAD**2, 0
    return sum(float(np.var(seeds)) * len(seeds) for seeds in accuracies) / freedom, freedom


def write_sweep(sweep: Sweep, failed: Mapping[Path, str]) -> None:
    """Write the results as JSON, and the chart if there are any, into the sweep's folder."""
    make_folder(sweep.home)
    write_file(sweep.home / RECORD_NAME, json.dumps(sweep_record(sweep, failed), indent=1) + "\n")
    if rows := cell_rows(sweep):
        write_file(sweep.home / CHART_NAME, sweep_chart(sweep, rows))


def sweep_chart(sweep: Sweep, rows: Sequence[CellRow]) -> str:
    """Draw held-out accuracy over each setting, one line per choice of the others, and over training."""
    panels = [
        _over(sweep, rows, n) for n in range(len(sweep.keys)) if len({row.cell.values[n] for row in rows}) > 1
    ]
    panels.append(Panel("training, sampled", [_course(row) for row in rows], unit=" %", bounds=(0, 100)))
    title = f"{sweep.home.name}: held-out accuracy, sampled, with 95 % intervals"
    return chart(panels, title, title=title)


def _over(sweep: Sweep, rows: Sequence[CellRow], n: int) -> Panel:
    """Return accuracy over the values of setting ``n``, a line for each choice of the other settings."""
    # Values of a setting may be words, so they are drawn at equal distances with labels.
    marks = list(dict.fromkeys(row.cell.values[n] for row in rows))
    choices = dict.fromkeys(_drop_value(row.cell.values, n) for row in rows)
    lines = []
    for choice in choices:
        chosen_rows = [row for row in rows if _drop_value(row.cell.values, n) == choice]
        x = [float(marks.index(row.cell.values[n])) for row in chosen_rows]
        sampled = [row.accuracy["sampled"] for row in chosen_rows]
        value, low, high = ([100 * getattr(e, end) for e in sampled] for end in ("value", "low", "high"))
        lines.append(Line(", ".join(choice), x, value, low, high))
    return Panel(sweep.keys[n], lines, sweep.keys[n], " %", (0, 100), marks=marks)


def _drop_value(values: Sequence[str], n: int) -> tuple[str, ...]:
    """Return the values without number ``n``."""
    return (*values[:n], *values[n + 1 :])


def _course(row: CellRow) -> Line:
    """Return the accuracy of a cell's sampled groups over the steps, averaged over its seeds."""
    by_step = dict[float, list[float]]()
    for run in row.ended.values():
        for metrics in read_numbers(run.stage, "metrics.jsonl"):
            if metrics.get("accuracy") is not None:
                by_step.setdefault(metrics["step"], []).append(100 * metrics["accuracy"])
    means = [float(np.mean(values)) for values in by_step.values()]
    return Line(", ".join(row.cell.values) or "all seeds", list(by_step), means)
