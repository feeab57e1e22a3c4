"""`covey diff`: compare the settings, curves, held-out and training problems of two runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from covey.config.rows import flatten
from covey.insight.conclusion import points
from covey.insight.show import NumberRecords, curve_lines, series
from covey.runs.estimates import (
    Estimate,
    Evaluation,
    gains,
    on_shared_problems,
    paired_bootstrap,
    why_incomparable,
)
from covey.runs.folder import read_numbers, read_stream
from covey.runs.reader import last_stage, read_environment, recorded_yaml
from covey.runs.rollouts import read_rollouts, recorded_steps
from covey.system.integrity import changes
from covey.system.plot import Curve, span

LATE = 0.25
"""Fraction of the logged steps that count as late."""
FEW_IN_COMMON = 3
"""Least number of problems that two runs must share to be compared by them."""
LOGS = ("metrics.jsonl", "evals.jsonl")
CURVES = {"reward": "reward/mean", "dead groups": "groups/dead", "tokens": "length/mean", "loss": "loss"}


def difference(a: Path, b: Path) -> tuple[Mapping[str, object], list[str]]:
    """Compare run B with run A: settings and results, as JSON and as lines for people. Raises ConfigError."""
    first = last_stage(a)
    second = last_stage(b)
    settings = differing_settings(first, second)
    files = changed_files(first, second)
    held_out, reason = held_out_change(first, second)
    unlike = _unlike_rewards(first, second, settings, files)
    training, shared = (None, 0) if unlike else shared_gain(_late_rewards(first), _late_rewards(second))
    record = {
        "a": str(first),
        "b": str(second),
        "settings": {name: list(values) for name, values in settings.items()},
        "files": files,
        "held_out": {name: estimate.as_json() for name, estimate in held_out.items()} or None,
        "note": reason,
        "training": {"problems": shared, **training.as_json()} if training is not None else None,
        "training_note": unlike,
    }
    results = [f"held-out, the same problems, B - A: {name} {signed(e)}" for name, e in held_out.items()]
    results.append(reason)
    if training is not None:
        results.append(f"training reward of {shared} problems that both met late, B - A: {signed(training)}")
    results.append(unlike)
    metrics, evals = ([read_numbers(s, name) for s in (first, second)] for name in LOGS)
    return record, [
        *(f"A: {first}", f"B: {second}", ""),
        *_changes(settings, files),
        *("", *paired_curves(metrics, evals), ""),
        *filter(None, results),
    ]


def _changes(settings: Mapping[str, tuple[object, object]], files: Mapping[str, str]) -> list[str]:
    """Return what differs between two runs before they began, as lines."""
    return [
        "what differs" if settings or files else "same settings, same files",
        *(f"  {name}: {old} -> {new}" for name, (old, new) in settings.items()),
        *(f"  {name}: {change}" for name, change in files.items()),
    ]


def differing_settings(first: Path, second: Path) -> dict[str, tuple[object, object]]:
    """Return the settings in which two runs differ, except their output folder."""
    flat = [dict(flatten(recorded_yaml(stage))) for stage in (first, second)]
    names = [n for n in {**flat[0], **flat[1]} if n != "output"]
    pairs = ((name, (flat[0].get(name), flat[1].get(name))) for name in names)
    return {name: pair for name, pair in pairs if pair[0] != pair[1]}


def held_out_change(first: Path, second: Path) -> tuple[dict[str, Estimate], str]:
    """Return the changes from A's last evaluation to B's, and a note if there are none or few problems."""
    logs = [read_stream(stage, "evals.jsonl") for stage in (first, second)]
    if not all(logs):
        return {}, "one of them has no evaluation"
    a, b = (Evaluation.from_record(log[-1]) for log in logs)
    if reason := why_incomparable(a, b, ("in A", "in B")):
        return {}, f"{reason}: not compared"
    estimates = gains(a, b)
    shared = on_shared_problems(a, b)
    estimates["reward"] = paired_bootstrap(shared[0].reward, shared[1].reward)
    count = len(shared[0].greedy)
    larger = max(len(a.greedy), len(b.greedy))
    note = f"{count} held-out problems that both measured" if count < larger else ""
    return {name: e for name, e in estimates.items() if not math.isnan(e.value)}, note


def changed_files(first: Path, second: Path) -> dict[str, str]:
    """Return the files that differ: data, sources of the user's functions, models."""
    before = (read_environment(first) or {}).get("files", {})
    after = (read_environment(second) or {}).get("files", {})
    return changes(before, after)


def _unlike_rewards(
    first: Path, second: Path, settings: Mapping[str, object], files: Mapping[str, object]
) -> str:
    """Return why the logged rewards of two runs do not compare; empty if they do.

    They do not under other rewards, other code of the same ones, another label noise, or if one run sums
    steps.
    """
    names = [name for name in settings if name.partition(".")[0] == "rewards" or name == "scoring.noise"]
    names += [name for name in files if name.endswith(".py")]
    evals = [read_stream(stage, "evals.jsonl") for stage in (first, second)]
    bases = [Evaluation.from_record(log[-1]).basis.rewards for log in evals if log]
    if not names and len({basis for basis in bases if basis}) > 1:
        names = ["what a reward measures"]
    if not names:
        return ""
    verb = "differs" if len(names) == 1 else "differ"
    return f"training rewards are not compared: {', '.join(names)} {verb}"


def shared_gain(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[Estimate | None, int]:
    """Return B's mean minus A's over the problems that both have, and their number; None if they are few."""
    common = sorted(a.keys() & b.keys())
    if len(common) < FEW_IN_COMMON:
        return None, len(common)
    before = np.array([a[problem] for problem in common])
    after = np.array([b[problem] for problem in common])
    return paired_bootstrap(before, after), len(common)


def _late_rewards(stage: Path) -> dict[str, float]:
    """Return problem and prompt -> mean late reward."""
    steps = recorded_steps(stage)
    late = steps[-max(1, round(LATE * len(steps))) :]
    by_prompt = by_problem(stage, late, lambda row: row["reward"])
    return {prompt: float(np.mean(rewards)) for prompt, rewards in by_prompt.items()}


def by_problem(
    stage: Path, steps: Iterable[int], value: Callable[[Mapping[str, Any]], float | None]
) -> dict[str, list[float]]:
    """Return the values of the logged completions that have one, by problem and prompt.

    The prompt belongs to the key because two files may use one name for different problems.
    """
    values = defaultdict[str, list[float]](list)
    for step in steps:
        for row in read_rollouts(stage, step).rows:
            number = value(row)
            if number is not None:
                values[f"{row['problem']} {row['prompt']}"].append(number)
    return values


def paired_curves(logs: Sequence[NumberRecords], evals: Sequence[NumberRecords]) -> Iterator[str]:
    """Yield the curves of both runs, metric by metric, side by side and on one scale."""
    last = max([1.0, *(m["step"] for log in (*logs, *evals) for m in log[-1:])])
    rewarded = any("reward/mean" in m for m in logs[0])
    for name, metric in CURVES.items():
        if metric != "loss" or not rewarded:
            yield from _pair(name, [series(log, metric) for log in logs], last)
    yield from _pair("held-out accuracy", [series(log, "pass@1") for log in evals], last, (0.0, 1.0))


def _pair(
    name: str,
    points: Sequence[Sequence[tuple[float, float]]],
    last: float,
    bounds: tuple[float, float] | None = None,
) -> Iterator[str]:
    """Yield the lines of one metric's curves; none if a run does not have it."""
    if all(points):
        bounds = bounds or span([value for curve in points for _, value in curve])
        curves = [
            Curve(f"{run} {name}", curve, bounds=bounds) for run, curve in zip("AB", points, strict=True)
        ]
        yield from curve_lines(curves, 4, last)


def signed(estimate: Estimate) -> str:
    """Return a difference with its sign and its interval."""
    if estimate.is_fraction:
        return points(estimate)
    return f"{estimate.value:+.3g} [{estimate.low:+.3g}, {estimate.high:+.3g}]"
