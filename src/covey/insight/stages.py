"""Print what each stage of a pipeline has gained, as a table from the records of its stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.insight.verdict import points
from covey.runs.estimates import Evaluation, gains
from covey.runs.folder import read_stream
from covey.system.opening import count_lines
from covey.system.plot import table
from covey.tasks.source import EXAMPLES

HEAD = ("stage", "steps", "greedy", "sampled", "gain of the stage", "tokens", "besides")
MEASURES: Mapping[str, str] = {
    "held_out/preference/accuracy": "held-out pairs ranked {:.0%}",
    "held_out/reward_model/accuracy": "held-out ranked {:.0%}",
    "text/reflection": "reflection {:.2f}",
}
"""Metrics of the last step that accuracy does not show, with their texts."""


def stage_table(folders: Sequence[Path]) -> list[str]:
    """Return lines for people: each stage, its final held-out accuracy and its gain."""
    return table([HEAD, *(_row(folder) for folder in folders)])


def _row(folder: Path) -> tuple[str, ...]:
    metrics = read_stream(folder, "metrics.jsonl")
    evals = [Evaluation.from_record(record) for record in read_stream(folder, "evals.jsonl")]
    accuracy = ("", "", "")
    if len(evals) > 1:
        end = evals[-1].summary()
        accuracy = (str(end["greedy"]), str(end["pass@1"]), points(gains(evals[0], evals[-1])["sampled"]))
    last: Mapping[str, Any] = metrics[-1] if metrics else {}
    length = last.get("length/mean", math.nan)
    tokens = "" if length is None or math.isnan(length) else f"{length:.0f}"
    return (folder.name, str(len(metrics)), *accuracy, tokens, ", ".join(_remarks(folder, last)))


def _remarks(folder: Path, last: Mapping[str, Any]) -> Iterator[str]:
    """Yield what accuracy does not show of a stage, from the metrics of its ``last`` step."""
    if (folder / EXAMPLES).is_file():
        yield f"{count_lines(folder, EXAMPLES)} examples"
    for name, text in MEASURES.items():
        if last.get(name):
            yield text.format(last[name])
    for name, value in last.items():
        # The mean of each reward function; the mean of their sum is reward/mean.
        if name.startswith("reward/") and name.endswith("/mean") and name.count("/") == 2:
            yield f"{name.split('/')[1]} {value:.2f}"
