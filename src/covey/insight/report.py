"""`covey report`: write a run as one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import nan
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from covey.config.load import flatten
from covey.insight.chart import Line, Panel, chart
from covey.insight.show import NumberRecords, findings, said_of, spoken_prompt
from covey.insight.verdict import recorded_verdict
from covey.runs.atomic import write_file
from covey.runs.estimates import Evaluation
from covey.runs.folder import read_numbers, read_stream
from covey.runs.reader import (
    last_stage,
    read_ending,
    read_environment,
    recorded_settings,
    seconds_of,
    stages_in,
)
from covey.runs.rollouts import RolloutLog, read_rollouts, recorded_steps
from covey.system.console import duration, inert
from covey.types import VERSION
from covey_verify.errors import ConfigError

SMALL: Mapping[str, Mapping[str, str]] = {
    "reward": {"": "reward/mean"},
    "loss": {"": "loss"},
    "groups": {"dead": "groups/dead", "dead, all correct": "groups/dead_correct"},
    "tokens": {"correct": "length/correct", "incorrect": "length/incorrect"},
    "truncated": {"": "length/truncated"},
    "signs of reflection": {"correct": "text/reflection/correct", "incorrect": "text/reflection/incorrect"},
    "problems by pass rate": {"below 20 %": "hard", "20 to 80 %": "frontier", "above 80 %": "easy"},
    "entropy, nats a token": {"": "entropy/sampled"},
    "KL, nats a completion": {"": "kl/completion_k1"},
    "gradient norm": {"": "optimizer/grad_norm"},
}
"""Title of a panel -> name of a line -> metric."""
MOST_POINTS = 120
"""Number of points of a line; more steps are averaged."""


def write_report(run: Path, output: Path) -> None:
    """Write the report of a run, or of all stages of a pipeline. Raises ConfigError without a run."""
    stages = [run] if (run / "config.yaml").exists() else stages_in(run) or [last_stage(run)]
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"--output {output}: name a file in a folder that exists")
    template = (files("covey.insight") / "report.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True).from_string(template)
    write_file(
        output, page.render(name=run.resolve().name, version=VERSION, stages=[_stage(s) for s in stages])
    )


def _stage(stage: Path) -> dict[str, object]:
    settings, environment = recorded_settings(stage) or {}, read_environment(stage) or {}
    metrics, evals, timings = (read_numbers(stage, f"{n}.jsonl") for n in ("metrics", "evals", "timings"))
    seconds = seconds_of(stage, timings)
    known = read_stream(stage, "evals.jsonl")
    measured = [Evaluation.from_record(e) for e in known]
    verdict = recorded_verdict(stage, known, seconds)
    steps = f"{len(metrics)} of {settings['train']['steps']}"
    # CSS class of the verdict; "cannot tell" has none.
    moods = {"learned": "learned", "got worse": "worse", "did not learn": "worse"}
    return {
        "title": f"{stage.name}: {settings['method']}, {steps} steps in {duration(seconds)}",
        "verdict": " ".join(said for said in (verdict and verdict.sentence, read_ending(stage)) if said),
        "mood": moods.get(verdict.word, "") if verdict else "",
        "charts": [
            Markup(chart([panel], panel.title, across=1))  # noqa: S704 - our own SVG, escaped where it is made
            for panel in _panels(metrics, evals, timings)
        ],
        "findings": [inert(f) for f in findings(stage)],
        "measures": list(measured[0].summary()) if measured else [],
        "evaluations": [(int(e["step"]), m.summary().values()) for e, m in zip(evals, measured, strict=True)],
        "groups": _groups(stage),
        "settings": list(flatten(settings)),
        "environment": [(k, inert(str(v))) for k, v in flatten(environment)],
    }


def _panels(metrics: NumberRecords, evals: NumberRecords, timings: NumberRecords) -> list[Panel]:
    """Return the panels, each drawn as its own picture, so that the page can wrap them to its width."""
    panels = []
    if evals:
        lines = [_measured(evals, name, said) for name, said in (("greedy", "greedy"), ("pass@1", "sampled"))]
        training = _line("in training", metrics, "accuracy", background=True)
        panels.append(Panel("accuracy", [*lines, *training], bounds=(0.0, 1.0)))
        panels.append(Panel("held-out reward", [_measured(evals, "reward", "")]))
    # Adds the three difficulty fractions, which are not logged themselves.
    counted = [{**m, **_frontier(m)} for m in metrics]
    for title, named in SMALL.items():
        drawn = [line for said, metric in named.items() for line in _line(said, counted, metric)]
        if drawn and not (title == "loss" and any("reward/mean" in m for m in metrics)):
            # A curve of zeros has no range of its own.
            flat = not any(y for line in drawn for y in line.y)
            panels.append(Panel(title, drawn, bounds=(0.0, 1.0) if flat else None))
    rates = [
        line
        for which in ("rollout", "update")
        for line in _line(which, timings, f"tokens_per_second/{which}")
    ]
    return [*panels, *([Panel("tokens a second", rates)] if rates else [])]


def _frontier(record: Mapping[str, float]) -> dict[str, float]:
    """Return a curriculum's ten buckets of pass rates as three: hard, frontier, easy."""
    shares = [v for k, v in record.items() if k.startswith("difficulty/pass_rate")]
    parts = {"hard": shares[:2], "frontier": shares[2:8], "easy": shares[8:]}
    return {name: sum(part) for name, part in parts.items()} if shares else {}


def _measured(evals: NumberRecords, name: str, said: str) -> Line:
    values = [[_known(e.get(f"{name}{end}")) for e in evals] for end in ("", "/low", "/high")]
    return Line(said, [e["step"] for e in evals], values[0], values[1], values[2])


def _line(said: str, records: NumberRecords, metric: str, background: bool = False) -> list[Line]:
    """Return a metric over the steps as one line of at most ``MOST_POINTS``; [] if it was never logged."""
    known = [(r["step"] + 1, r[metric]) for r in records if r.get(metric) is not None]
    # Ceiling division: records per point.
    size = max(1, -(-len(known) // MOST_POINTS))
    parts = [known[i : i + size] for i in range(0, len(known), size)]
    means = [[sum(column) / len(part) for column in zip(*part, strict=True)] for part in parts]
    return [Line(said, [m[0] for m in means], [m[1] for m in means], background=background)] if means else []


def _known(value: float | None) -> float:
    return nan if value is None else value


def _groups(stage: Path) -> list[dict[str, object]]:
    """Return the best and the worst completion of a group with the widest rewards, of first and last step."""
    steps = recorded_steps(stage)
    return [found for step in sorted({*steps[:1], *steps[-1:]}) if (found := _extremes(stage, step))]


def _extremes(stage: Path, step: int) -> dict[str, object] | None:
    log = read_rollouts(stage, step)
    scored = {n: _scored(log, places) for n, places in log.groups.items()}
    groups = {n: rows for n, rows in scored.items() if rows}
    if not groups:
        return None
    # Rows are sorted by reward, so this is the group with the largest range.
    number, rows = max(groups.items(), key=lambda g: g[1][-1]["reward"] - g[1][0]["reward"])
    shown = (("worst", rows[0]), ("best", rows[-1])) if len(rows) > 1 else (("best", rows[0]),)
    return {
        "title": f"Step {step}, group {number}",
        "prompt": inert(spoken_prompt(rows[0]["prompt"])),
        "completions": [
            (kind, f"{kind}: {inert(said_of(row))}", inert(row["completion"])) for kind, row in shown[::-1]
        ],
    }


def _scored(log: RolloutLog, places: Sequence[int]) -> list[Mapping[str, Any]]:
    rows = [log.rows[place] for place in places if log.rows[place]["reward"] is not None]
    return sorted(rows, key=lambda r: r["reward"])
