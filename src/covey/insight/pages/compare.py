"""Comparison of two runs for the pages: settings, and the held-out and training problems of both."""

from __future__ import annotations

import json
from pathlib import Path

from covey.insight.difference import changed_files, differing_settings, held_out_change
from covey.insight.pages.records import news, shared_streams
from covey.insight.pages.settings import sentence_on
from covey.insight.pages.thinning import Record
from covey.insight.show import group_facts
from covey.runs.reader import recorded_yaml
from covey.runs.rollouts import read_rollouts, recorded_steps

LATEST = 20
"""Number of last steps of each run whose problems are compared."""
MAX_PROBLEMS = 100
"""Number of problems that the page lists."""
Problems = dict[tuple[str, str], Record]
"""(problem, prompt) -> its record. Two files may use one name for different problems."""


def run_differences(a: Path, b: Path) -> Record:
    """Return the differences of two runs, from a to b."""
    records = [news(shared_streams(run).streams()) for run in (a, b)]
    held_out, reason = held_out_change(a, b)
    recorded = recorded_yaml(b)
    settings = [
        {
            "setting": name,
            "a": json.dumps(old, default=str),
            "b": json.dumps(new, default=str),
            "says": sentence_on(name, recorded),
        }
        for name, (old, new) in differing_settings(a, b).items()
    ]
    changes = changed_files(a, b)
    files = [{"setting": name, "a": "", "b": change, "says": ""} for name, change in changes.items()]
    return {
        "a": records[0],
        "b": records[1],
        "settings": [*settings, *files],
        "held_out": [{"name": name, **vars(estimate)} for name, estimate in held_out.items()],
        "why_not": reason,
        "problems": _common_problems(_problems(a), _problems(b)),
    }


def _common_problems(first: Problems, second: Problems) -> list[Record]:
    """Return the problems of both runs, those whose mean reward changed the most first."""
    common = [key for key in first if key in second]
    common.sort(key=lambda key: -abs(second[key]["mean"] - first[key]["mean"]))
    return [{"problem": key[0], "a": first[key], "b": second[key]} for key in common[:MAX_PROBLEMS]]


def _problems(run: Path) -> Problems:
    """Return each problem's mean reward when it was last sampled, in the last steps of a run."""
    problems: Problems = {}
    for step in recorded_steps(run)[-LATEST:]:
        log = read_rollouts(run, step)
        for facts in (group_facts(log, group) for group in log.groups):
            if facts["mean"] is not None:
                latest = {"step": step, "group": facts["group"], "mean": facts["mean"]}
                problems[facts["problem"], str(facts["prompt"])] = latest
    return problems
