"""Two runs side by side: settings that differ, the same held-out problems, the same problems in training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from covey.estimates import Evaluation, gains
from covey.runs.reader import recorded_settings
from covey.runs.rollouts import read_rollouts, recorded_steps
from covey.ui.records import Record, differing_settings, news, tails

LATEST = 20
"""Steps of each run whose problems are compared, the last ones."""
MOST = 100
"""Problems that the page lists."""


def compared(a: Path, b: Path) -> Record:
    """What differs between two runs, from a to b."""
    settings = [{s["setting"]: s["value"] for s in differing_settings(run)} for run in (a, b)]
    differ = [k for k in sorted({*settings[0], *settings[1]}) if settings[0].get(k) != settings[1].get(k)]
    read = [{name: tail.read() for name, tail in tails(run).items()} for run in (a, b)]
    why_not = _incomparable(a, b, [r["evals"] for r in read])
    held_out = None
    if not why_not:
        last = [Evaluation.from_record(r["evals"][-1]) for r in read]
        held_out = [{"name": name, **vars(gain)} for name, gain in gains(*last).items()]
    found = [_problems(run) for run in (a, b)]
    both = [p for p in found[0] if p in found[1]]
    both.sort(key=lambda p: -abs(found[1][p]["mean"] - found[0][p]["mean"]))
    return {
        "a": news(a, read[0]),
        "b": news(b, read[1]),
        "settings": [{"setting": k, "a": settings[0].get(k), "b": settings[1].get(k)} for k in differ],
        "held_out": held_out,
        "why_not": why_not,
        "problems": [{"problem": p, "a": found[0][p], "b": found[1][p]} for p in both[:MOST]],
    }


def _incomparable(a: Path, b: Path, evals: list[list[Record]]) -> str:
    """Why the last evaluations of two runs say nothing of each other; empty if they do."""
    if not all(evals):
        return "One of them has not been evaluated yet."
    first, second = (recorded_settings(run) or {} for run in (a, b))
    same = [(s.get("data"), s.get("seed") if _generated(s) else None) for s in (first, second)]
    if same[0] != same[1] or evals[0][-1]["problems"] != evals[1][-1]["problems"]:
        return "They were evaluated on different problems."
    if evals[0][-1]["verdict"] != evals[1][-1]["verdict"]:
        return "Different rewards say what is correct."
    return ""


def _generated(settings: Mapping[str, Any]) -> bool:
    return bool((settings.get("data") or {}).get("task"))


def _problems(run: Path) -> dict[str, Record]:
    """Problem -> its mean reward when it was last sampled."""
    found: dict[str, Record] = {}
    for step in recorded_steps(run)[-LATEST:]:
        log = read_rollouts(run, step)
        for group, places in log.groups.items():
            rewards = [r for i in places if (r := log.rows[i]["reward"]) is not None]
            if rewards:
                place = {"step": step, "group": group, "mean": float(np.mean(rewards))}
                found[log.rows[places[0]]["problem"]] = place
    return found
