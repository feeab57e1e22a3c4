"""Compare two runs for the pages: settings, and the held-out and training problems of both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from covey.insight.difference import changed, changed_files, held_out_change
from covey.insight.pages.records import Record, news, reading
from covey.runs.rollouts import read_rollouts, recorded_steps

LATEST = 20
"""Number of last steps of each run whose problems are compared."""
MOST = 100
"""Number of problems that the page lists."""


def compared(a: Path, b: Path) -> Record:
    """Return the differences of two runs, from a to b."""
    read = [reading(run).streams() for run in (a, b)]
    found, why_not = held_out_change(a, b)
    first, second = _problems(a), _problems(b)
    both = [p for p in first if p in second]
    both.sort(key=lambda p: -abs(second[p]["mean"] - first[p]["mean"]))
    settings = [(k, *(json.dumps(v, default=str) for v in pair)) for k, pair in changed(a, b).items()]
    settings += [(name, "", what) for name, what in changed_files(a, b).items()]
    return {
        "a": news(read[0]),
        "b": news(read[1]),
        "settings": [{"setting": k, "a": old, "b": new} for k, old, new in settings],
        "held_out": [{"name": name, **vars(estimate)} for name, estimate in found.items()],
        "why_not": why_not,
        "problems": [{"problem": p[0], "a": first[p], "b": second[p]} for p in both[:MOST]],
    }


def _problems(run: Path) -> dict[tuple[str, str], Record]:
    """Return (problem, prompt) -> its mean reward when it was last sampled."""
    found: dict[tuple[str, str], Record] = {}
    for step in recorded_steps(run)[-LATEST:]:
        log = read_rollouts(run, step)
        for group, places in log.groups.items():
            rewards = [r for i in places if (r := log.rows[i]["reward"]) is not None]
            if rewards:
                place = {"step": step, "group": group, "mean": float(np.mean(rewards))}
                asked = log.rows[places[0]]
                found[asked["problem"], str(asked["prompt"])] = place
    return found
